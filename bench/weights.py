"""make bench-weights: `gpubox weights verify --deep` beside `sha256sum` over the same files, in parallel, in one run.

Writes a model of random bytes into a scratch directory (--gigabytes, --files), alternates both programs, prints medians
and their ratio, and removes the directory. *cold*: the files' pages are dropped from memory before each run, so the
disk counts; *warm*: they are in memory, so hashing counts. The records go to a fresh directory each time: all is read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpubox.weights.hashing import default_jobs
from gpubox.weights.manifest import MANIFEST, model_files
from gpubox.weights.safetensors import TensorInfo, encode_header

CHUNK = 16 * 2**20
GOAL = 0.9
Arm = Callable[[Path, int], None]


def make_model(directory: Path, files: int, size: int) -> None:
    """A whole model: `files` shards of `size` bytes each, an index, config.json and a manifest by sha256sum."""
    weight_map = {}
    for number in range(1, files + 1):
        name, tensor = f"model-{number:05}-of-{files:05}.safetensors", f"layers.{number}.weight"
        weight_map[tensor] = name
        with (directory / name).open("wb") as stream:
            stream.write(encode_header({tensor: TensorInfo("U8", (size,), 0, size)}, {}))
            for at in range(0, size, CHUNK):
                stream.write(os.urandom(min(CHUNK, size - at)))
            stream.flush()
            os.fsync(stream.fileno())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text("{}")
    names = sorted(model_files(directory))
    done = subprocess.run(["sha256sum", *names], cwd=directory, capture_output=True, check=True)
    (directory / MANIFEST).write_bytes(done.stdout)


def drop_pages(directory: Path) -> None:
    for path in model_files(directory).values():
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ours(directory: Path, jobs: int) -> None:
    program = [sys.executable, "-c", "from gpubox.cli.main import main; main()", "weights", "verify", str(directory)]
    with tempfile.TemporaryDirectory(dir=directory.parent) as state:
        run([*program, "--deep", "--jobs", str(jobs), "--state", state])


def plain(program: str) -> Arm:
    """`program` over the same files, as many at once, each file to a process as one becomes free."""

    def act(directory: Path, jobs: int) -> None:
        run(["sh", "-c", f"cd {directory} && printf '%s\\0' * | xargs -0 -P {jobs} -n 1 {program}"])

    return act


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout}{done.stderr}")


def compare(directory: Path, size: int, jobs: int, repeats: int, *, cold: bool) -> dict[str, object]:
    """MB/s of each, medians of `repeats` alternating runs, and ours over theirs: above 1, ours is faster.

    openssl is there because it has the faster code: some distributions build their sha256sum with it.
    """
    arms: dict[str, Arm] = {"gpubox": ours, "sha256sum": plain("sha256sum"), "openssl": plain("openssl dgst -sha256")}
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(repeats):
        order = list(arms)[number % 3 :] + list(arms)[: number % 3]
        for name in order:
            if cold:
                drop_pages(directory)
            started = time.monotonic()
            arms[name](directory, jobs)
            taken[name].append(round(time.monotonic() - started, 2))
    median = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "mb_s": {name: round(size / 1e6 / value) for name, value in median.items()},
        "over_sha256sum": round(median["sha256sum"] / median["gpubox"], 2),
        "over_openssl": round(median["openssl"] / median["gpubox"], 2),
        "goal_over_sha256sum": GOAL,
        "seconds": taken,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path, help="an existing directory on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    size = int(options.gigabytes * 1e9 / options.files)
    directory = Path(tempfile.mkdtemp(prefix="bench-weights-", dir=options.scratch)) / "model"
    directory.mkdir()
    try:
        make_model(directory, options.files, size)
        found: dict[str, object] = {"jobs": options.jobs, "gigabytes": options.gigabytes}
        for title, cold in (("warm", False), ("cold", True)):
            found[title] = compare(directory, size * options.files, options.jobs, options.repeats, cold=cold)
            if not options.json:
                print(title, json.dumps(found[title]), flush=True)
        if options.json:
            print(json.dumps(found, indent=2))
    finally:
        shutil.rmtree(directory.parent)


if __name__ == "__main__":
    main()
