#!/usr/bin/python3 -Es
"""A stand-in for nvidia-persistenced @VERSION@: a daemon that needs a loaded driver, and then only stays.

Kept: it forks into the background and writes /run/nvidia-persistenced/nvidia-persistenced.pid (Type=forking), --user,
--no-persistence-mode, --verbose, --uvm-persistence-mode; it fails without a driver or without device nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PID_FILE = Path("/run/nvidia-persistenced/nvidia-persistenced.pid")
TAKES_VALUE = ("-u", "--user", "-g", "--group", "--nvidia-cfg-path")
FLAGS = ("-V", "--verbose", "--persistence-mode", "--no-persistence-mode", "--uvm-persistence-mode")


def main() -> None:
    waiting = sys.argv[1:]
    while waiting:
        word = waiting.pop(0)
        if word in TAKES_VALUE:
            waiting = waiting[1:]
        elif word not in FLAGS and word.partition("=")[0] not in TAKES_VALUE:
            sys.exit(f'nvidia-persistenced: unrecognized option: "{word}"')
    if subprocess.run(["/usr/bin/nvidia-smi", "-L"], capture_output=True, check=False).returncode:
        sys.exit("nvidia-persistenced failed to initialize. Check syslog for more details.")
    PID_FILE.parent.mkdir(exist_ok=True)
    if os.fork():
        return
    os.setsid()
    PID_FILE.write_text(f"{os.getpid()}\n")
    with Path("/dev/null").open("r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    PID_FILE.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
