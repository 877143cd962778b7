"""A box that has never had a network: tools, stacks and standby stacks from a wheelhouse alone, deployed and serving.

Real uv, pip, ssh, systemd and wheels; the engine is the stand-in, which an index of its own has (a directory).
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.settings import REPOSITORY
from roles.box import PACKAGES
from tests.lab.conftest import TestBoxes
from tests.lab.drills import Drill, DrillRepository

ARTEFACTS = """\
[[unproved]]
name = "gpubox-standin-engine"
version = "{version}"
file = "{file}"
index = "standin"
[[unproved.candidates]]
sha256 = "{sha256}"
source = "built by this test"
"""
STACKS = ("standin-a", "standin-b")
HOUSE = "srv/wheelhouse"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> DrillRepository:
    """The drills' repository, whose stacks say which index has their engine."""
    made = DrillRepository(tmp_path_factory.mktemp("air-gap"))
    page = made.root / "index" / "gpubox-standin-engine" / "index.html"
    page.parent.mkdir(parents=True)
    (page.parent / made.wheel.name).write_bytes(made.wheel.read_bytes())
    page.write_text(f'<a href="{made.wheel.name}">{made.wheel.name}</a>\n')
    for name in STACKS:
        lock = (made.root / "stacks" / name / "requirements.lock").read_text()
        text = ARTEFACTS.format(
            version=made.wheel.name.split("-")[1],
            file=made.wheel.name,
            sha256=lock.partition("gpubox-standin-engine==")[2].partition("sha256:")[2][:64],
        )
        (made.root / "stacks" / name / "artefacts.toml").write_text(text)
    return made


@pytest.fixture(scope="module")
def drill(lab: TestBoxes, repository: DrillRepository) -> Iterator[Drill]:
    """test2 with Debian's packages and a gathered wheelhouse, no wheel cache and, from then on, no network."""
    box = lab.up("test2")[0]
    box.run(f"apt-get update -q && apt-get install -yq --no-install-recommends {shlex.join(PACKAGES)}")
    for name in STACKS:
        assert gather(repository, box.rootfs / HOUSE, name)["left_out"] == []
    box.run("mkdir -p /srv/model && echo '{}' > /srv/model/config.json && rm -rf /opt/gpubox/cache/uv")
    box.cut_internet()
    yield Drill(box, repository)
    box.restore_network()


def gather(repository: DrillRepository, house: Path, stack: str) -> dict[str, object]:
    command = [sys.executable, "-m", "gpubox.devtools.wheelhouse", "gather", stack, "--dir", str(house), "--json"]
    command += [
        "--root",
        str(repository.root),
        "--python",
        "3.11",
        "--index",
        f"standin=file://{repository.root}/index",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_network_is_cut(drill: Drill) -> None:
    assert drill.box.run("apt-get update -o APT::Update::Error-Mode=any", check=False, timeout=120).returncode != 0


def test_a_box_without_a_network_is_deployed_from_a_wheelhouse(drill: Drill) -> None:
    done = drill.deploy(offline="true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert drill.serving() == drill.release(offline=True)
    assert len([name for name in drill.final_names() if name.startswith("stacks/")]) == len(STACKS)


def test_a_rollback_needs_neither_network_nor_wheelhouse(drill: Drill) -> None:
    drill.box.run(f"mv /{HOUSE} /{HOUSE}.gone")
    try:
        done = drill.repository.pyinfra([drill.box], "rollback.py", "-y", stack="standin-b", offline="true")
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        drill.box.run(f"mv /{HOUSE}.gone /{HOUSE}")
    assert "standin-b" in drill.serving()


def test_a_wheelhouse_that_lacks_a_file_is_said(drill: Drill, repository: DrillRepository) -> None:
    """The engine's wheel is damaged, and a stack that is not built yet needs it."""
    wheel = drill.box.rootfs / HOUSE / repository.wheel.name
    good = wheel.read_bytes()
    stack = drill.box.run("ls /opt/gpubox/stacks").stdout.split()[0]
    try:
        wheel.write_bytes(good + b"damaged")
        drill.box.run(f"mv /opt/gpubox/stacks/{stack} /opt/gpubox/stacks/.set-aside")
        command = f"gpubox stack build --offline --wheelhouse /{HOUSE} /opt/gpubox/incoming/{stack}"
        done = drill.box.run(command, check=False)
        assert done.returncode == 1
        assert "re-published upstream" in done.stderr
        wheel.write_bytes(good)
        drill.box.run(command)
    finally:
        wheel.write_bytes(good)
        drill.box.run("rm -rf /opt/gpubox/stacks/.set-aside")
