"""The version in /proc/driver/nvidia/version: open and closed modules, two and three numbers, and anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpubox.nvidia.driver import RunFileDriver, loaded_version

RECORDED = Path(__file__).parents[1] / "fixtures" / "driver"
RUN = {"version": "590.48.01", "run": "/models/NVIDIA-Linux-x86_64-590.48.01.run", "sha256": "a" * 64}
# First lines as public bug reports show them; the H200's own is recorded.
BANNERS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n": "535.183.01",
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  390.157  Wed Oct 12 09:19:07 UTC 2022\n": "390.157",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build  (builder@U22)\n": "590.48.01",
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95  Release Build  (root@host)\n": "580.95",
}
versions = st.builds(
    lambda parts: ".".join(f"{part:02}" for part in parts), st.lists(st.integers(0, 9999), min_size=2, max_size=3)
)


def test_the_recorded_banner_of_an_open_module() -> None:
    recorded = (RECORDED / "version-h200-open.txt").read_text()
    assert loaded_version(recorded) == "580.159.04"


@pytest.mark.parametrize(("banner", "version"), BANNERS.items())
def test_banners(banner: str, version: str) -> None:
    assert loaded_version(banner) == version
    assert loaded_version(banner + "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n") == version


@given(versions, st.sampled_from(["x86_64 Kernel Module", "Open Kernel Module for x86_64"]), st.text(max_size=30))
def test_any_version_in_either_form_is_read_whole(version: str, form: str, rest: str) -> None:
    assert loaded_version(f"NVRM version: NVIDIA UNIX {form}  {version}  {rest}") == version


@given(st.text())
def test_anything_else_is_no_driver(text: str) -> None:
    assert loaded_version(text) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", "590"),
        ("version", "590.48.01-1"),
        ("version", "latest"),
        ("run", "NVIDIA.run"),
        ("run", "http://mirror/NVIDIA.run"),
        ("run", "/models/driver.deb"),
        ("sha256", "A" * 64),
        ("sha256", ""),
    ],
)
def test_settings_are_exact(key: str, value: str) -> None:
    RunFileDriver.model_validate(RUN)
    with pytest.raises(ValidationError):
        RunFileDriver.model_validate({**RUN, key: value})
