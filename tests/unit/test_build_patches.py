"""Patches on installed files: exact, inside site-packages, and never through a hard link."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpubox.build.patches import apply_patches, patched_files
from gpubox.errors import GpuboxError

FITS = "--- a/pkg/m.py\n+++ b/pkg/m.py\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
NEW = "--- /dev/null\n+++ b/pkg/new.py\n@@ -0,0 +1 @@\n+new\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Site-packages with a module that is hard-linked from a cache."""
    (tmp_path / "site" / "pkg").mkdir(parents=True)
    (tmp_path / "cached.py").write_text("one\ntwo\n")
    (tmp_path / "site" / "pkg" / "m.py").hardlink_to(tmp_path / "cached.py")
    return tmp_path / "site"


def apply(site: Path, *texts: str) -> None:
    patches = [site.parent / f"{number}.patch" for number in range(len(texts))]
    for path, text in zip(patches, texts, strict=True):
        path.write_text(text)
    apply_patches(patches, site)


def test_a_patch_leaves_the_cache_alone(site: Path) -> None:
    apply(site, FITS, NEW)
    assert (site / "pkg" / "m.py").read_text() == "one\n2\n"
    assert (site / "pkg" / "new.py").read_text() == "new\n"
    assert (site.parent / "cached.py").read_text() == "one\ntwo\n"
    assert sorted(path.name for path in (site / "pkg").iterdir()) == ["m.py", "new.py"]


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (FITS.replace("-two", "-three"), "0.patch: does not apply to the locked wheels"),
        (FITS.replace(" one", " uno"), "0.patch: does not apply"),  # fuzz would take it
        (FITS.replace("pkg/m.py", "pkg/absent.py"), "0.patch: does not apply"),
        (FITS.replace("pkg/m.py", "../../x"), r"0\.patch: changes '\.\./\.\./x'"),
        ("nothing\n", "no line starts with"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(site: Path, patch: str, says: str) -> None:
    with pytest.raises(GpuboxError, match=says):
        apply(site, patch)
    assert (site.parent / "cached.py").read_text() == "one\ntwo\n"


def test_files_of_a_git_diff() -> None:
    assert patched_files(FITS + NEW, "x") == ["pkg/m.py", "pkg/new.py"]
