"""A stand-in for `python -m sglang.launch_server`, for fault drills that must take seconds and fail on demand.

It keeps what a deployer can observe of SGLang 0.5.17 and computes nothing: refused while loading, 503 while warming up,
200 with an empty body when ready; the same JSON and server-sent events; on SIGTERM 503 at once, a drain without limit,
then SIGKILL of itself; exit status 2 for an unknown flag and 1 for a bad path or name. tests/unit/test_standin.py
compares the shapes with recordings of the real server. Times and faults come from the environment: see settings.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from gpubox_standin.app import Engine, build_app
from gpubox_standin.settings import Fault, from_environment

# Taken and not used: the rest of what a server profile may ask of the real engine.
IGNORED = (
    *("attention-backend", "chunked-prefill-size", "device", "dtype", "grammar-backend", "log-level"),
    *("max-running-requests", "max-total-tokens", "mem-fraction-static", "random-seed", "reasoning-parser"),
    *("sampling-backend", "tool-call-parser", "tp-size", "watchdog-timeout"),
)
IGNORED_SWITCHES = ("disable-cuda-graph", "disable-custom-all-reduce", "disable-overlap-schedule", "trust-remote-code")


def main() -> None:
    arguments = parse_arguments()
    settings = from_environment()
    if settings.fault is Fault.EXIT_AT_ONCE:
        log("RuntimeError: stand-in fault exit-at-once: the engine could not start")
        sys.exit(1)
    check_arguments(arguments)
    log("loading weights")
    time.sleep(settings.load_s)  # no signal handler yet: SIGTERM ends the process at once, as in the real engine
    listener = listen(arguments.host, arguments.port)
    if settings.fault is Fault.STUBBORN_WORKER:
        start_stubborn_worker(settings.worker_life_s)
    engine = Engine(
        settings=settings,
        model_path=arguments.model_path,
        served_model_name=arguments.served_model_name or arguments.model_path,
        host=arguments.host,
        port=arguments.port,
        context_length=context_length(arguments),
        api_key=arguments.api_key,
        metrics=arguments.enable_metrics,
    )
    asyncio.run(serve(engine, listener))


def parse_arguments() -> argparse.Namespace:
    """The flags that drills use, out of the real engine's several hundred; any other ends with exit status 2."""
    parser = argparse.ArgumentParser(prog="gpubox-standin")
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--api-key")
    parser.add_argument("--enable-metrics", action="store_true")
    for name in IGNORED:
        parser.add_argument(f"--{name}")
    for name in IGNORED_SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """The two mistakes the real engine reports before it loads; recorded in fail-colon.log and fail-nomodel.log."""
    if ":" in (arguments.served_model_name or ""):
        log("AssertionError: served_model_name cannot contain a colon (':') character.")
        sys.exit(1)
    if not (Path(arguments.model_path) / "config.json").is_file():
        log(f"OSError: Repo id must use alphanumeric chars, '-', '_' or '.'. [...]: '{arguments.model_path}'.")
        sys.exit(1)


def context_length(arguments: argparse.Namespace) -> int:
    config = json.loads((Path(arguments.model_path) / "config.json").read_text())
    return int(arguments.context_length or config.get("max_position_embeddings", 8192))


def listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        log(f"[Errno {error.errno}] error while attempting to bind on address ('{host}', {port}): {error.strerror}")
        sys.exit(1)
    listener.listen(2048)
    return listener


def start_stubborn_worker(life_s: float) -> None:
    """A child that leaves the session, is reparented, ignores polite signals and inherits the listening socket."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for polite in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(polite, signal.SIG_IGN)
    log(f"stubborn worker pid={os.getpid()}")
    time.sleep(life_s)
    os._exit(0)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: the drain below decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(engine: Engine, listener: socket.socket) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, engine.start_drain)
    server = Server(uvicorn.Config(build_app(engine), log_level="info"))
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        group.create_task(warm_up(engine))
        log(await reason_to_end(engine))
        os.kill(os.getpid(), signal.SIGKILL)  # the real engine ends so, also after a clean drain


async def reason_to_end(engine: Engine) -> str:
    settings = engine.settings
    while not engine.draining or engine.in_flight:
        await asyncio.sleep(settings.drain_s)
        if settings.fault is Fault.DIES_LATER and engine.ready_for() > settings.die_after_s:
            return "stand-in fault dies-later: a scheduler died"
    return "Gracefully exiting... Remaining number of requests 0."


async def warm_up(engine: Engine) -> None:
    await asyncio.sleep(engine.settings.warmup_s)
    if engine.settings.fault is not Fault.NEVER_READY:
        engine.set_ready()
        log("The server is fired up and ready to roll!")


def log(line: str) -> None:
    print(f"[{time.strftime('%F %T')}] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
