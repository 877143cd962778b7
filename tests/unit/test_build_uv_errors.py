"""What uv 0.13.9 really said, each provoked once (index addresses and long lists shortened), and what we make of it."""

from __future__ import annotations

import pytest

from gpubox.build.uv_errors import explain_uv_failure
from gpubox.errors import ExitCode

HASH = """\
error: Failed to download `six==1.17.0`
  cause: Hash mismatch for `six==1.17.0`

         Expected:
           sha256:0721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274
           sha256:0f70335d468e7eb6ec65b95b99d3a2836546063f63acc5171de367e834932a81

         Computed:
           sha256:4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274
"""
UNKNOWN = """\
error: No solution found when resolving dependencies
  cause: Because sixxxx-not-there was not found in the package registry and you require sixxxx-not-there==1.17.0, \
we can conclude that your requirements are unsatisfiable.
"""
VERSION = """\
error: No solution found when resolving dependencies
  cause: Because there is no version of six==9.9.9 and you require six==9.9.9, we can conclude that \
your requirements are unsatisfiable.
"""
OFFLINE = """\
error: No solution found when resolving dependencies
  cause: Because nvidia-nvtx-cu12 was not found in the cache and you require nvidia-nvtx-cu12==12.8.90, \
we can conclude that your requirements are unsatisfiable.

hint: Packages were unavailable because the network was disabled. When the network is disabled, registry packages \
may only be read from the cache.
"""
DNS = """\
error: Failed to fetch: (address)
  cause: error sending request for url (address)
  cause: client error (Connect)
  cause: dns error
  cause: error resolving DNS
  cause: failed to lookup address information: Temporary failure in name resolution
"""
PROXY = """\
error: Failed to fetch: (address)
  cause: error sending request for url (address)
  cause: client error (Connect)
  cause: tunnel error: failed to create underlying connection
  cause: tcp connect error
  cause: Connection refused (os error 111)
"""
NO_WHEEL = """\
error: No solution found when resolving dependencies
  cause: Because docopt==0.6.2 has no usable wheels and you require docopt==0.6.2, we can conclude that \
your requirements are unsatisfiable.

hint: Wheels are required for `docopt` because building from source is disabled for all packages \
(i.e., with `--no-build`)
"""
FULL_CACHE = """\
Downloading numpy (16.0MiB)
error: Failed to download `numpy==2.2.6`
  cause: Failed to extract archive: numpy-2.2.6-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl
  cause: I/O operation failed during extraction
  cause: failed to write to file `/x/numpy/test_laguerre.py`: No space left on device (os error 28)
"""
FULL_VENV = """\
error: Failed to install: nvidia_nvtx_cu12-12.8.90-py3-none-manylinux2014_x86_64.whl (nvidia-nvtx-cu12==12.8.90)
  cause: Failed to copy to `/x/site-packages/nvidia/nvtx/include/nvToolsExtSync.h`
  cause: failed to copy file from /x/a.h to /x/b: No space left on device (os error 28)
"""
NO_PYTHON = """\
error: No interpreter found for Python 3.14 in search path

hint: A managed Python download is available for Python 3.14, but Python downloads are set to 'never'
"""


@pytest.mark.parametrize(
    ("said", "message", "hint", "code"),
    [
        (HASH, "six==1.17.0: locked is sha256 0721f391", "tampered with", ExitCode.FAILED),
        (HASH, "and 1 more, got 4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274", "", ExitCode.FAILED),
        (UNKNOWN, "no index has a package sixxxx-not-there", "requirements.in", ExitCode.USAGE),
        (VERSION, "no index has six==9.9.9", "lock another version", ExitCode.USAGE),
        (OFFLINE, "nvidia-nvtx-cu12 is not in the cache", "--wheelhouse", ExitCode.FAILED),
        (DNS, "the package index cannot be reached (", "--offline", ExitCode.FAILED),
        (PROXY, "the package index cannot be reached (", "proxy", ExitCode.FAILED),
        (NO_WHEEL, "there is no wheel of docopt==0.6.2", "nothing is compiled", ExitCode.USAGE),
        (FULL_CACHE, "the disk is full (1.5 GB free)", "what was downloaded is kept", ExitCode.FAILED),
        (FULL_VENV, "the disk is full (1.5 GB free)", "gpubox release collect", ExitCode.FAILED),
        (NO_PYTHON, "this box has no Python 3.14", "apt install python3.14", ExitCode.FAILED),
        ("error: something new", "uv failed", "what it says below", ExitCode.FAILED),
    ],
)
def test_what_uv_says_becomes_what_to_do(said: str, message: str, hint: str, code: ExitCode) -> None:
    error = explain_uv_failure("stack x", said, free_bytes=1_500_000_000)
    assert error.message.startswith("stack x: ")
    assert message in error.message
    assert hint in error.hint
    assert error.exit_code == code
    assert said.splitlines()[0] in error.detail
