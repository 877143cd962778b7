"""A stand-in for lxc-pve-prestart-hook: LXC calls it before each start, also at a reboot from inside."""

from __future__ import annotations

import os
import sys

from . import lxc
from .errors import PveError


def main() -> None:
    try:
        lxc.prepare(os.environ["LXC_NAME"])
    except PveError as error:
        sys.exit(error.message)
