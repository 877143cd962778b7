"""Toolkits: names, versions, apt's files, what apt may not do, and the fingerprint of a repository's key."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.errors import InputError, ProofError, RefusedError
from gpubox.nvidia import repository, toolkit
from gpubox.nvidia.box_readings import BoxReadings, LoaderDirectory, Package
from gpubox.nvidia.openpgp import armored, fingerprints
from gpubox.nvidia.repository import Key
from gpubox.nvidia.toolkit import ToolkitSettings
from gpubox.settings import Settings, load_settings
from gpubox.specs.plan import plan_box
from gpubox.specs.stack import StackSpec, stack_spec

ROOT = Path(__file__).resolve().parents[2]
STACKS = [stack_spec(ROOT / "stacks" / name, "3.11", None) for name in ("cuda130-next", "cuda128")]
WANTED = {"cuda-toolkit-13-0": "13.0.1-1", "cuda-toolkit-12-8": "12.8.1-1"}
MIRROR = ToolkitSettings(repository="https://mirror.example/cuda/", key="keys/mirror.asc", fingerprint="A" * 40)
KEY = Key("KEY", ("A" * 40,))
DIRECTORY = ToolkitSettings(repository="/models/debs")
GOOD = BoxReadings(
    system="debian 12",
    container="lxc",
    cuda_packages=(
        Package("hold", "13.0.1-1", "cuda-toolkit-13-0"),
        Package("hold", "12.8.1-1", "cuda-toolkit-12-8"),
        Package("hold", "13.0.88-1", "cuda-nvcc-13-0"),
        Package("hold", "13.0.2.14-1", "libcublas-13-0"),
    ),
    toolkit_homes=("/usr/local/cuda-12.8", "/usr/local/cuda-13.0"),
)


def with_toolkit(spec: StackSpec, version: str) -> StackSpec:
    assert spec.build.cuda is not None
    cuda = spec.build.cuda.model_copy(update={"toolkit": version})
    return replace(spec, build=spec.build.model_copy(update={"cuda": cuda}))


def test_the_stacks_decide_names_and_versions() -> None:
    assert toolkit.wanted_packages(STACKS) == WANTED
    assert toolkit.home("cuda-toolkit-12-8") == "/usr/local/cuda-12.8"
    assert all(
        spec.build.cuda and toolkit.home(name) == spec.build.cuda.home
        for spec, name in zip(STACKS, WANTED, strict=True)
    )


def test_two_versions_of_one_cuda_cannot_stand_side_by_side() -> None:
    with pytest.raises(InputError, match=r"another stack here wants 13\.0\.1-1"):
        toolkit.wanted_packages([*STACKS, with_toolkit(STACKS[0], "13.0.2")])


def test_usr_local_cuda_is_never_used() -> None:
    """The packages move that link to whatever is newest; a release names its own toolkit."""
    data = {"stack": "cuda130-next", "standby_stacks": ["cuda128"], "server": "smollm2", "python": "3.11"}
    plan = plan_box(ROOT, Settings.model_validate(data))
    for release in plan.releases:
        text = b"".join(release.files.values()).decode()
        assert re.search(r"CUDA_HOME\W+/usr/local/cuda-\d+\.\d+", text)
        assert not re.search(r"/usr/local/cuda(?!-\d)", text)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"repository": "https://m/x/"}, "needs key"),
        ({"repository": "mirror"}, "pattern"),
        ({"repository": "/debs", "key": "k"}, "a directory of .debs has no key"),
        ({"repository": "https://m/", "key": "k", "suite": "stable"}, "components go with"),
        ({"repository": "https://m/", "key": "k", "components": ["main"]}, "components go with"),
        ({"repository": "https://m/", "key": "k", "fingerprint": "1234"}, "40 hex digits"),
        ({"repository": "https://m/", "key": "k", "version": "13.0.1"}, "unknown key"),
        ({"repository": "/debs", "versions": {"Bad Name": "1"}}, "pattern"),
    ],
)
def test_settings_that_cannot_be(data: dict[str, object], said: str) -> None:
    box = {"stack": "cuda128", "server": "smollm2", "toolkits": data}
    with pytest.raises(InputError, match=said):
        load_settings(box, "box1")


def test_a_fingerprint_is_written_as_gpg_prints_it() -> None:
    printed = "eb69 3b30 35cd 5710 e231  e123 a4b4 6996 3bf8 63cc"
    settings = ToolkitSettings(repository="https://m/", key="k", fingerprint=printed)
    assert settings.fingerprint == repository.SYSTEMS["debian 12"]


@pytest.mark.parametrize("system", ["debian 11", "ubuntu 26.04", "fedora 42", ""])
def test_other_systems_are_refused(system: str) -> None:
    with pytest.raises(RefusedError, match=r"supported: debian 12, debian 13, ubuntu 22\.04, ubuntu 24\.04"):
        repository.check_system(toolkit.PLACE, system)


def test_the_key_is_nvidias_for_the_system_unless_named() -> None:
    vendor = MIRROR.model_copy(update={"fingerprint": None})
    older, newer = repository.SYSTEMS["ubuntu 24.04"], repository.SYSTEMS["debian 13"]
    repository.check_key(toolkit.PLACE, vendor, (older,), "debian 12")
    repository.check_key(toolkit.PLACE, vendor, (newer,), "debian 13")
    repository.check_key(toolkit.PLACE, MIRROR, ("A" * 40,), "debian 12")
    for settings, found in ((vendor, (newer,)), (vendor, (older, newer)), (MIRROR, (older,))):
        with pytest.raises(InputError, match=r"holds .*, expected is"):
            repository.check_key(toolkit.PLACE, settings, found, "debian 12")


def test_apts_files() -> None:
    files = toolkit.apt_files(MIRROR, WANTED, KEY)
    assert files[KEY.path] == "KEY"
    assert files[toolkit.PLACE.sources].splitlines()[1:] == [
        "Types: deb",
        "URIs: https://mirror.example/cuda/",
        "Suites: /",
        "Architectures: amd64",
        f"Signed-By: {KEY.path}",
    ]
    assert "Package: cuda-toolkit-13-0\nPin: version 13.0.1-1\nPin-Priority: 1001\n" in files[toolkit.PLACE.preferences]
    local = toolkit.apt_files(DIRECTORY, WANTED, None)
    assert set(local) == {toolkit.PLACE.sources, toolkit.PLACE.preferences}
    assert "Trusted: yes" in local[toolkit.PLACE.sources]
    assert "Trusted" not in files[toolkit.PLACE.sources]


def test_parts_are_pinned_where_the_operator_names_them() -> None:
    settings = MIRROR.model_copy(update={"versions": {"cuda-nvcc-13-0": "13.0.88-1"}})
    assert toolkit.exact_versions(settings, WANTED) == {**WANTED, "cuda-nvcc-13-0": "13.0.88-1"}
    assert "Pin: version 13.0.88-1" in toolkit.apt_files(settings, WANTED, KEY)[toolkit.PLACE.preferences]
    assert toolkit.missing({"cuda-nvcc-13-0": "13.0.48-1"}, GOOD) == {"cuda-nvcc-13-0": "13.0.48-1"}


def test_what_is_missing_and_what_moves() -> None:
    assert toolkit.missing(WANTED, GOOD) == {}
    assert toolkit.unfrozen(WANTED, GOOD) == []
    moved = (*GOOD.cuda_packages[1:], Package("install", "13.0.2-1", "cuda-toolkit-13-0"))
    moved = (*moved, Package("install", "1", "libnpp-13-0"), Package("install", "1", "libicu-72-1"))
    seen = replace(GOOD, cuda_packages=moved)
    assert toolkit.missing(WANTED, seen) == {"cuda-toolkit-13-0": "13.0.1-1"}
    assert toolkit.unfrozen(WANTED, seen) == ["cuda-toolkit-13-0", "libnpp-13-0"]


@pytest.mark.parametrize(
    "package",
    ["libcuda1", "libnvidia-compute-580", "nvidia-driver-cuda", "cuda-drivers-580", "cuda-compat-13-0", "nvidia-open"],
)
def test_h7_a_driver_in_apts_plan_is_refused(package: str) -> None:
    assert toolkit.is_driver(package)
    plan = f"Inst cuda-toolkit-13-0 (13.0.1-1 x [amd64])\nInst {package} (580 x [amd64])\nConf {package} (580)\n"
    with pytest.raises(RefusedError, match=f"apt would install a driver: {package}; nothing was changed"):
        toolkit.check_simulation(plan)


@pytest.mark.parametrize(
    "package",
    ["cuda-nvcc-13-0", "cuda-driver-dev-13-0", "libcublas-13-0", "libnvjitlink-13-0", "nsight-compute-2025.3.1"],
)
def test_the_toolkits_own_packages_are_no_driver(package: str) -> None:
    assert not toolkit.is_driver(package)
    toolkit.check_simulation(f"Inst {package} (13.0.88-1 x [amd64])\n")


def test_kernel_packages_and_removals_in_apts_plan_are_refused() -> None:
    with pytest.raises(RefusedError, match="packages for a kernel: dkms"):
        toolkit.check_simulation("Inst dkms (3.0 x [all])\n")
    with pytest.raises(RefusedError, match="apt would remove: gcc"):
        toolkit.check_simulation("Remv gcc [12.2]\n")


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "The following packages have unmet dependencies:\n cuda-toolkit-13-0 : Depends: libcuda1 (>= 580) but it "
            "is not installable\nE: Unable to correct problems, you have held broken packages.\n",
            "wants driver packages, which are pinned away: libcuda1",
        ),
        (
            "E: Unable to satisfy dependencies. Reached two conflicting assignments:\n   1. cuda-toolkit-13-0:amd64 is "
            "selected for install\n   2. cuda-toolkit-13-0:amd64 Depends cuda-drivers\n      but none of the choices",
            "pinned away: cuda-drivers",
        ),
        (
            "E: Version '13.0.1-1' for 'cuda-toolkit-13-0' was not found\n",
            "does not have cuda-toolkit-13-0=13.0.1-1",
        ),
        ("E: Unable to locate package cuda-toolkit-12-8\n", "does not have cuda-toolkit-12-8=12.8.1-1"),
        (
            "W: GPG error: http://m/ InRelease: The following signatures couldn't be verified because the public key "
            "is not available: NO_PUBKEY 1234\nE: The repository 'http://m/ InRelease' is not signed.\n",
            "signature does not verify",
        ),
        (
            "E: Conflicting values set for option Signed-By regarding source https://m/debian12/ /: "
            "/usr/share/keyrings/cuda-archive-keyring.gpg != /etc/apt/keyrings/gpubox-863cc.asc\n"
            "E: The list of sources could not be read.\n",
            "apt has https://m/debian12/ twice, with two files for its key",
        ),
        ("E: Could not get lock /var/lib/dpkg/lock-frontend\n", "apt-get failed"),
    ],
)
def test_apts_failures_in_words(output: str, said: str) -> None:
    error = toolkit.explain(output, WANTED)
    assert said in error.message
    assert output.splitlines()[0].strip() in error.detail


@given(st.text())
def test_any_output_of_apt_is_explained(output: str) -> None:
    assert toolkit.explain(output, WANTED).message.startswith("toolkits: ")
    try:
        toolkit.check_simulation(output)
    except RefusedError:
        assert "Inst " in output or "Remv " in output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"toolkit_homes": ("/usr/local/cuda-13.0",)}, "/usr/local/cuda-12.8/bin/nvcc is missing"),
        ({"cuda_packages": GOOD.cuda_packages[1:]}, "cuda-toolkit-13-0 is not installed at version 13.0.1-1"),
        (
            {"driver_packages": (Package("hold", "590.48.01-1", "libcuda1"),)},
            "apt has installed driver packages: libcuda1",
        ),
        ({"kernel_packages": ("dkms",)}, "dkms"),
        ({"loader_directories": (LoaderDirectory("/etc/environment", "/usr/local/cuda-13.0/compat"),)}, "compat"),
    ],
)
def test_h7_what_the_proof_finds(change: dict[str, object], said: str) -> None:
    toolkit.check_proof(WANTED, WANTED, GOOD, None)
    with pytest.raises(ProofError, match=re.escape(said)):
        toolkit.check_proof(WANTED, WANTED, replace(GOOD, **change), None)  # type: ignore[arg-type]


# --- fingerprints, compared with GnuPG's ---

needs_gpg = pytest.mark.skipif(shutil.which("gpg") is None, reason="compares with GnuPG")


def gpg(home: Path, *arguments: str) -> bytes:
    command = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
    return subprocess.run([*command, *arguments], capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("gnupg")
    home.chmod(0o700)
    for name, kind in (("one@example", "rsa2048"), ("two@example", "ed25519")):
        gpg(home, "--quick-generate-key", name, kind, "sign", "never")
    yield home
    subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=True)


def known_fingerprints(home: Path, *names: str) -> list[str]:
    listed = gpg(home, "--with-colons", "--list-keys", *names).decode().splitlines()
    return [line.split(":")[9] for line in listed if line.startswith("fpr:")]


@needs_gpg
@pytest.mark.parametrize("options", [["--export"], ["--export", "--armor"]])
@pytest.mark.parametrize("names", [["one@example"], ["two@example"], ["one@example", "two@example"]])
def test_the_fingerprint_is_gnupgs(keyring: Path, options: list[str], names: list[str]) -> None:
    exported = gpg(keyring, *options, *names)
    assert fingerprints(exported, "key") == known_fingerprints(keyring, *names)
    text = armored(exported, "key")
    assert fingerprints(text.encode(), "key") == known_fingerprints(keyring, *names)
    assert gpg(keyring, "--dearmor", "--output", "-", "--yes", "--", str(_written(keyring, text))) == gpg(
        keyring, "--export", *names
    )


def _written(directory: Path, text: str) -> Path:
    path = directory / "armored.asc"
    path.write_text(text)
    return path


@needs_gpg
def test_a_damaged_key_is_an_input_error(keyring: Path) -> None:
    exported = gpg(keyring, "--export", "one@example")
    with pytest.raises(InputError, match="damaged"):
        fingerprints(exported[:-9], "key")


@given(st.binary(max_size=300))
def test_any_bytes_are_keys_or_an_input_error(data: bytes) -> None:
    for candidate in (data, b"\x98" + data, b"\xc6" + data, b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n" + data):
        try:
            found = fingerprints(candidate, "key")
        except InputError as error:
            assert str(error).startswith("key: ")
        else:
            assert all(re.fullmatch(r"[0-9A-F]{40}|[0-9A-F]{64}", one) for one in found)


def test_a_secret_key_or_a_web_page_is_no_key() -> None:
    for data in (b"", b"<html>404</html>", b"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nAAAA\n"):
        with pytest.raises(InputError, match="not an OpenPGP key"):
            fingerprints(data, "toolkits.key = 'x'")
