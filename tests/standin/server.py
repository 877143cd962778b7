"""Run the stand-in engine from its source as a process of its own, for tests on this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from tests.standin.build import PROJECT

FAST = {"STANDIN_LOAD_S": "0", "STANDIN_WARMUP_S": "0", "STANDIN_HEALTH_S": "0", "STANDIN_DRAIN_S": "0.02"}


@dataclass(frozen=True)
class Standin:
    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_listening(self, deadline_s: float = 20.0) -> None:
        end = time.monotonic() + deadline_s
        while self.process.poll() is None and time.monotonic() < end:
            try:
                requests.get(f"{self.url}/health", timeout=5)
                return
            except requests.ConnectionError:
                time.sleep(0.02)
        raise AssertionError(f"the stand-in does not listen; its log:\n{self.log}")

    def wait_for_log(self, pattern: str, deadline_s: float = 20.0) -> re.Match[str]:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if found := re.search(pattern, self.log):
                return found
            time.sleep(0.02)
        raise AssertionError(f"the stand-in never logged {pattern!r}; its log:\n{self.log}")


@contextmanager
def run_standin(directory: Path, *arguments: str, **environment: str) -> Iterator[Standin]:
    """A stand-in on a free port with fast times unless `environment` says otherwise; killed at the end."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"max_position_embeddings": 8192}')
    port, log = free_port(), directory / "standin.log"
    command = [sys.executable, "-m", "gpubox_standin.launch_server", "--model-path", str(model), "--port", str(port)]
    command += ["--served-model-name", "smollm2", *arguments]
    path = {"PYTHONPATH": str(PROJECT / "src"), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=path | FAST | environment)
    try:
        yield Standin(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.kill()
        process.wait()
        for line in log.read_text().splitlines():
            if "stubborn worker pid=" in line:
                os.kill(int(line.rpartition("=")[2]), signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
