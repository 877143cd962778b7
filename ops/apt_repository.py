"""apt on a host with one repository of NVIDIA's packages: read anew and strictly, simulated, then installed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import Any

from pyinfra.api import QuoteString, StringCommand

from gpubox.nvidia.repository import Place, RepositorySettings
from ops.judged import Judge, Judged
from ops.streamed import Streamed

# apt's index of a directory of .debs, made anew: what lies there may have changed. The directory may be read-only.
INDEX = """
set -e
new={index}.new
rm -rf "$new"
mkdir -p "$new"
for deb in {directory}/*.deb; do
  [ -f "$deb" ] || {{ echo "{who}.repository = {directory}: no .deb there on the box" >&2; exit 1; }}
  ln -s "$deb" "$new/"
  dpkg-deb --field "$deb"
  printf 'Filename: ./%s\\nSize: %s\\nSHA256: %s\\n\\n' \\
    "${{deb##*/}}" "$(stat -Lc %s "$deb")" "$(sha256sum <"$deb" | cut -d' ' -f1)"
done >"$new.Packages"
mv "$new.Packages" "$new/Packages"
rm -rf {index}
mv "$new" {index}
"""

APT = "DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300"
INSTALL = (
    f"{APT} install --no-install-recommends --allow-downgrades --allow-change-held-packages"
    " -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold"
)
Words = Callable[[], list[str]]  # for apt-get install, decided when it runs


def read_anew(place: Place, settings: RepositorySettings, judge: Judge, *, offline: bool) -> Iterator[Any]:
    """Of this repository strictly: apt-get update otherwise goes on with what it had when a signature is wrong."""
    if settings.is_directory:
        script = INDEX.format(index=place.index, directory=shlex.quote(settings.repository), who=place.who)
        yield StringCommand("sh", "-c", QuoteString(script))
    ours = (
        f"{APT} update -o Dir::Etc::sourcelist={place.sources} -o Dir::Etc::sourceparts=- -o APT::Get::List-Cleanup=0"
        " -o APT::Update::Error-Mode=any"
    )
    yield Judged("LC_ALL=C", ours, "2>&1", judge=judge)
    if not settings.is_directory and not offline:
        # What the packages need of the system: its own warnings stay warnings.
        yield Judged("LC_ALL=C", APT, "update", "2>&1", judge=judge)


def simulated_then_installed(words: Words, judge: Judge) -> Iterator[Any]:
    """`judge` sees apt's plan before anything changes."""
    yield Judged("LC_ALL=C", INSTALL, "--simulate", *map(QuoteString, words()), "2>&1", judge=judge)
    yield Streamed(INSTALL, *map(QuoteString, words()))
