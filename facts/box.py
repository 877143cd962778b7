"""Everything the roles ask of a box, in one remote command.

`box_state()` is what operations use: it reads again only after something changed on that host, so a converged deploy
pays for one read in each phase however many operations look.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from pyinfra import host
from pyinfra.api import FactBase

from facts import gpus, userland
from facts.per_host import PerHost
from gpubox.nvidia.box_readings import BoxReadings, read_box
from gpubox.settings import Settings

# POSIX sh, since a bare machine may have nothing else. Every line of output is 'key value'; always exits 0.
SCRIPT = r"""
root=/opt/gpubox
dpkg-query -W -f '${{db:Status-Status}} ${{Package}}\n' {packages} 2>/dev/null | sed -n 's/^installed /package /p'
for p in python3 python{python}; do command -v "$p" >/dev/null && say command "$p"; done
say user "$(getent passwd {user} | cut -d: -f1)"
for f in {paths}; do
  if [ -f "$f" ]; then say file "$(sha256sum "$f" | cut -d' ' -f1) $(stat -c '%a %U:%G' "$f") $f"; fi
  if [ -d "$f" ]; then say directory "$(stat -c '%a %U:%G' "$f") $f"; fi
done
name_of() {{ l=$(readlink "$1" 2>/dev/null) && basename "$l"; }}
say tools "$(name_of $root/tools)"
say gpubox "$(readlink /usr/local/bin/gpubox 2>/dev/null)"
for kind in stacks models releases; do
  for d in "$root/$kind"/*/; do [ -d "$d" ] && say "$kind" "$(basename "$d")"; done
done
say current "$(name_of $root/current)"
for f in "$root"/state/failed/*.json; do
  [ -f "$f" ] && say failed "$(basename "$f" .json) $(cat "$f")"
done
[ -f $root/state/pending.json ] && say pending yes
if command -v systemctl >/dev/null; then
  say reload "$(systemctl show -p NeedDaemonReload --value sglang.service gpubox-recover.service | grep -m1 yes)"
  for u in sglang.service gpubox-recover.service; do say "enabled" "$u $(systemctl is-enabled $u 2>/dev/null)"; done
  say active "$(systemctl show -p ActiveState --value sglang.service 2>/dev/null)"
  pid=$(systemctl show -p MainPID --value sglang.service 2>/dev/null)
  [ "${{pid:-0}}" != 0 ] && say running "$(tr '\0' '\n' <"/proc/$pid/environ" | sed -n 's/^GPUBOX_RELEASE=//p')"
fi
listener=$(ss -Hltnp "sport = :{port}" 2>/dev/null | head -n 1 | tr -s ' ')
pid=$(echo "$listener" | sed -n 's/.*pid=\([0-9]*\).*/\1/p')
grep -q 'sglang\.service' "/proc/${{pid:-0}}/cgroup" 2>/dev/null || say foreign_listener "$listener"
[ -n {model_path} ] && [ -f {model_path}/config.json ] && say model_config yes
[ -n {wheelhouse} ] && [ -d {wheelhouse} ] && say wheelhouse yes
"""


@dataclass
class BoxState:
    """What the script saw. `files`: path -> (sha256, mode, owner:group); `directories`: path -> (mode, owner:group)."""

    one: dict[str, str] = field(default_factory=dict)
    many: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    directories: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def readings(self) -> BoxReadings:
        """What it says of driver, GPUs and toolkits."""
        return read_box(self.many)

    def get(self, key: str) -> str | None:
        return self.one.get(key)

    def has(self, key: str, value: str) -> bool:
        return value in self.many.get(key, [])


class Box(FactBase[BoxState]):
    """The state of a box. Of an empty or unreachable machine: nothing is there."""

    def command(
        self,
        packages: list[str],
        paths: list[str],
        user: str,
        port: int,
        python: str,
        model_path: str,
        wheelhouse: str,
        ask_cuda: bool,
    ) -> str:
        script = SCRIPT.format(
            packages=shlex.join(packages),
            paths=shlex.join(paths),
            user=shlex.quote(user),
            port=port,
            python=python,
            model_path=shlex.quote(model_path),
            wheelhouse=shlex.quote(wheelhouse),
        )
        whole = gpus.SHELL + script + userland.script(user, ask=ask_cuda) + "true"
        return f"sh -c {shlex.quote(whole)}"

    def process(self, output: list[str]) -> BoxState:
        seen = BoxState()
        for line in output:
            key, _, value = line.partition(" ")
            seen.one[key] = value
            seen.many.setdefault(key, []).append(value)
            if key == "file":
                digest, mode, owner, path = value.split(" ", 3)
                seen.files[path] = (digest, mode, owner)
            elif key == "directory":
                mode, owner, path = value.split(" ", 2)
                seen.directories[path] = (mode, owner)
        return seen

    @staticmethod
    def default() -> BoxState:
        return BoxState()


@dataclass(frozen=True)
class Question:
    """What to look at on one host; fixed for a run."""

    settings: Settings
    packages: tuple[str, ...]
    paths: tuple[str, ...]
    port: int
    model_path: str


def _read(question: Question) -> BoxState:
    seen: BoxState = host.get_fact(
        Box,
        packages=list(question.packages),
        paths=list(question.paths),
        user=question.settings.service_user,
        port=question.port,
        python=question.settings.python,
        model_path=question.model_path,
        wheelhouse=question.settings.wheelhouse or "",
        ask_cuda=question.settings.driver is not None,
    )
    return seen


_boxes = PerHost(_read)
look_at = _boxes.ask
box_state = _boxes.answer
