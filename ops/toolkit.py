"""CUDA toolkits by exact version from one repository, with nothing of a driver; then held where they are."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pyinfra import host, state
from pyinfra.api import QuoteString, StringCommand, operation
from pyinfra.api.state import StateStage

from facts.box import box_state
from gpubox.nvidia import toolkit
from gpubox.nvidia.toolkit import LOCAL_INDEX, SOURCES, ToolkitSettings
from ops.judged import Judged
from ops.refusal import refusal
from ops.streamed import Streamed

# apt's index of a directory of .debs, made anew: what lies there may have changed. The directory may be read-only.
INDEX = """
set -e
new={index}.new
rm -rf "$new"
mkdir -p "$new"
for deb in {directory}/*.deb; do
  [ -f "$deb" ] || {{ echo "toolkits.repository = {directory}: no .deb there on the box" >&2; exit 1; }}
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
# Only this repository, and strictly: apt-get update otherwise goes on with what it had when a signature is wrong.
UPDATE_OURS = (
    f"{APT} update -o Dir::Etc::sourcelist={SOURCES} -o Dir::Etc::sourceparts=- -o APT::Get::List-Cleanup=0"
    " -o APT::Update::Error-Mode=any"
)
INSTALL = (
    f"{APT} install --no-install-recommends --allow-downgrades --allow-change-held-packages"
    " -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold"
)


@operation()
def allowed(settings: ToolkitSettings, keys: list[str]) -> Iterator[Any]:
    """Before anything changes: a supported system, and the key that belongs to it. `keys`: their fingerprints."""
    seen = box_state().readings
    if not seen.answered and state.current_stage != StateStage.Execute:
        host.noop("the system is looked at when the box runs")
        return
    checks = [partial(toolkit.check_system, seen)]
    if not settings.is_directory:
        checks.append(partial(toolkit.check_key, settings, keys, seen))
    if stop := refusal(*checks):
        yield stop
        return
    host.noop(f"{seen.system}, {'no key' if settings.is_directory else 'the key has the expected fingerprint'}")


@operation()
def installed(settings: ToolkitSettings, wanted: Mapping[str, str], offline: bool) -> Iterator[Any]:
    """The toolkits side by side. What apt would do is looked at first; a driver or a removal is refused."""
    exact = toolkit.exact_versions(settings, wanted)
    absent = toolkit.missing(exact, box_state().readings)
    if not absent:
        host.noop("all toolkits are installed: " + ", ".join(f"{name}={version}" for name, version in exact.items()))
        return

    def judge(succeeded: bool, output: str) -> None:
        if not succeeded:
            raise toolkit.explain(output, absent)
        toolkit.check_simulation(output)

    if settings.is_directory:
        script = INDEX.format(index=LOCAL_INDEX, directory=shlex.quote(settings.repository))
        yield StringCommand("sh", "-c", QuoteString(script))
    yield Judged("LC_ALL=C", UPDATE_OURS, "2>&1", judge=judge)
    if not settings.is_directory and not offline:
        yield StringCommand(APT, "update")  # what the toolkits need of the system; its own warnings stay warnings
    names = [QuoteString(f"{name}={version}") for name, version in absent.items()]
    yield Judged("LC_ALL=C", INSTALL, "--simulate", *names, "2>&1", judge=judge)
    yield Streamed(INSTALL, *names)


@operation()
def frozen(wanted: Mapping[str, str]) -> Iterator[Any]:
    """On hold, with every part of them: an upgrade of the system moves nothing of a toolkit."""
    moving = toolkit.unfrozen(wanted, box_state().readings)
    if not moving:
        host.noop("all packages of the toolkits are on hold")
        return
    yield StringCommand("apt-mark", "hold", *moving)


@operation()
def proved(settings: ToolkitSettings, wanted: Mapping[str, str]) -> Iterator[Any]:
    """Every toolkit is complete, and no driver, kernel package or second libcuda came with one."""
    if state.current_stage != StateStage.Execute:
        host.noop("the toolkits are looked at when everything has run")
        return
    seen, exact = box_state().readings, toolkit.exact_versions(settings, wanted)
    if stop := refusal(lambda: toolkit.check_proof(wanted, exact, seen)):
        yield stop
        return
    host.noop(", ".join(toolkit.home(name) for name in wanted))
