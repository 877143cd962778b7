"""NVIDIA's .run file on a host: fetched when it is an address, verified, executed. A file of another hash never is."""

from __future__ import annotations

import shlex

from gpubox.nvidia.driver import RunFileDriver

DRIVERS = "/var/lib/gpubox/driver"  # .run files fetched by the host
LOG = "/var/log/gpubox-nvidia-installer.log"

SCRIPT = """
set -eu
run={path}
hash() {{ sha256sum "$1" | cut -d' ' -f1; }}
{fetch}
[ -f "$run" ] || {{ echo "driver.run = $run: no such file here" >&2; exit 1; }}
got=$(hash "$run")
if [ "$got" != {sha256} ]; then
  {discard}
  echo "$run: its sha256 is $got, driver.sha256 is {sha256}: not executed" >&2
  echo "  what to do: compare both with what NVIDIA publishes for {version}, then correct the wrong one" >&2
  exit 1
fi
TMPDIR=/var/tmp sh "$run" {options} --log-file-name={log} || {{
  echo "the installer failed; the end of {log}:" >&2
  tail -n 40 {log} >&2 || true
  exit 1
}}
"""

FETCH = """
if [ ! -f "$run" ] || [ "$(hash "$run")" != {sha256} ]; then
  mkdir -p {directory}
  echo "fetching {name}"
  curl --fail --silent --show-error --location --proto '=https' --retry 3 --output "$run.part" {url}
  mv "$run.part" "$run"
fi
"""


def install_script(driver: RunFileDriver, options: list[str]) -> str:
    """POSIX sh that runs the .run file of `driver` with `options`; fails before that on another hash."""
    name = driver.run.rsplit("/", 1)[-1]
    local = driver.run.startswith("/")
    path = driver.run if local else f"{DRIVERS}/{name}"
    fetch = FETCH.format(sha256=driver.sha256, directory=DRIVERS, name=shlex.quote(name), url=shlex.quote(driver.run))
    return SCRIPT.format(
        path=shlex.quote(path),
        fetch="" if local else fetch,
        discard=":" if local else 'rm -f "$run"',
        sha256=driver.sha256,
        version=driver.version,
        options=shlex.join(options),
        log=LOG,
    )
