#!/bin/bash
# Make .venv from requirements.lock, installing python3 and its venv module first where they are missing.
# Called by `make venv`; runs before anything of Python can.
set -euo pipefail
cd "$(dirname "$0")/.."

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -E "$@"; fi; }
usable() { "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
find_python() {
    local python
    for python in python3 python3.13 python3.12 python3.11; do
        if usable "$python"; then echo "$python"; return; fi
    done
    return 1
}

if ! python=$(find_python); then
    packages="python3 python3-venv"
    if command -v python3 >/dev/null && ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        packages="python3.11 python3.11-venv" # the default python3 is too old
    fi
    echo "this machine has no Python >= 3.11 that can make virtual environments, installing with apt-get: $packages"
    as_root apt-get -q update
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends ca-certificates $packages
    python=$(find_python)
fi

echo "making .venv with $("$python" --version) from requirements.lock"
started=$SECONDS
[ -x .venv/bin/python ] && usable .venv/bin/python || "$python" -m venv --clear .venv
.venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
touch .venv/stamp
echo ".venv is ready after $((SECONDS - started)) s"
