"""The driver's libraries in a box: exact versions, what hides them, and CUDA itself as the judge (H1, H2, H6, H7)."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from facts.gpus import SHELL
from facts.userland import script
from gpubox.errors import GpuboxError, InputError, ProofError, RefusedError
from gpubox.nvidia import cuda_probe, userland
from gpubox.nvidia.box_readings import BoxReadings, CudaAnswer, Library, LoaderDirectory, Package, read_box
from gpubox.nvidia.driver import RunFileDriver
from gpubox.nvidia.gpu_count import DeviceNode, Gpus
from gpubox.specs.stack import stack_spec
from tests.gpus import UVM_MAJOR, gpus_of

ROOT = Path(__file__).resolve().parents[2]
WANTED = RunFileDriver(version="590.48.01", run="/models/nvidia.run", sha256="a" * 64)
LIBCUDA = "/usr/lib/x86_64-linux-gnu/libcuda.so"
GOOD = BoxReadings(
    system="ubuntu 24.04",
    container="lxc",
    loaded="590.48.01",
    libraries=("590.48.01",),
    libcuda=(Library(f"{LIBCUDA}.1", f"{LIBCUDA}.590.48.01"),),
    loader_directories=(LoaderDirectory("/etc/ld.so.conf.d/libc.conf", "/usr/local/lib"),),
    gpus=gpus_of(["0000:41:00.0", "0000:c1:00.0"]),
    uvm_major=str(UVM_MAJOR),
    cuda={"gpubox": CudaAnswer(0, 2, "")},
)


def gpus(**changes: Any) -> dict[str, Any]:
    return {"gpus": replace(GOOD.gpus, **changes)}


def uvm_node(node: DeviceNode | None) -> dict[str, Any]:
    others = {path: number for path, number in GOOD.gpus.nodes.items() if path != "/dev/nvidia-uvm"}
    return gpus(nodes=others if node is None else {**others, "/dev/nvidia-uvm": node})


def proof_error(seen: BoxReadings) -> str:
    with pytest.raises(ProofError) as caught:
        userland.check_proof(WANTED, seen)
    return str(caught.value)


def test_a_good_box_proves() -> None:
    userland.check_module(WANTED, GOOD)
    userland.check_replaceable(WANTED, GOOD)
    userland.check_proof(WANTED, GOOD)


@pytest.mark.parametrize("loaded", ["590.48.02", "590.48", "590.48.010", "580.159.04"])
def test_h1_a_module_that_differs_in_the_last_number_is_refused_with_both_versions(loaded: str) -> None:
    seen = replace(GOOD, loaded=loaded)
    with pytest.raises(RefusedError) as caught:
        userland.check_module(WANTED, seen)
    assert "'590.48.01'" in caught.value.message
    assert f" {loaded} loaded" in caught.value.message
    assert f"module {loaded} is loaded, 590.48.01 is wanted" in proof_error(seen)


def test_no_module_names_the_node_or_the_machine() -> None:
    with pytest.raises(RefusedError, match="node of this container has no NVIDIA driver"):
        userland.check_module(WANTED, replace(GOOD, loaded=None))
    with pytest.raises(RefusedError, match="this machine has no NVIDIA driver"):
        userland.check_module(WANTED, replace(GOOD, loaded=None, container="none"))


@pytest.mark.parametrize("libraries", [(), ("590.48.02",), ("580.159.04", "590.48.01")])
def test_only_libraries_of_exactly_that_version_are_installed_ones(libraries: tuple[str, ...]) -> None:
    seen = replace(GOOD, libraries=libraries)
    assert not userland.is_installed(WANTED, seen)
    assert "must be of 590.48.01 and nothing else" in proof_error(seen)
    with pytest.raises(RefusedError, match="bare-metal"):
        userland.check_replaceable(WANTED, replace(seen, container="none"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"libcuda": (*GOOD.libcuda, Library("/opt/x/libcuda.so.1", "/opt/x/libcuda.so.580.1.1"))},
            "more than one libcuda.so.1 is on the loader's path: /opt/x/libcuda.so.580.1.1, " + LIBCUDA,
        ),
        (
            {"loader_directories": (LoaderDirectory("/etc/ld.so.conf.d/c.conf", "/usr/local/cuda-13.0/compat"),)},
            "/etc/ld.so.conf.d/c.conf puts /usr/local/cuda-13.0/compat",
        ),
        ({"kernel_packages": ("dkms", "linux-headers-6.8.0")}, "a container has none: dkms, linux-headers-6.8.0"),
        (gpus(listed=("00000000:41:00.0",)), "PCI 2, driver 2, device nodes 2, nvidia-smi 1"),
        (gpus(pci=("0000:41:00.0", "0000:c1:00.0", "0000:e1:00.0")), "PCI 3, driver 2, device nodes 2, nvidia-smi 2"),
        (gpus(nodes={}), "PCI 2, driver 2, device nodes 0, nvidia-smi 2"),
        (
            gpus(listed=None, smi_error="Failed to initialize NVML: Driver/library version mismatch"),
            "nvidia-smi no answer (Failed to initialize NVML: Driver/library version mismatch)",
        ),
        ({"cuda": {}}, "cuInit was not asked"),
        ({"cuda": {"gpubox": CudaAnswer(0, 1, "")}}, "CUDA shows 1 GPUs to gpubox, there are 2"),
        ({"cuda": {"gpubox": CudaAnswer(100, 0, ""), "root": CudaAnswer(0, 2, "")}}, "for root and not for gpubox"),
        ({"cuda": {"gpubox": CudaAnswer(803, 0, "")}}, "803, driver and library differ"),
        ({"cuda": {"gpubox": CudaAnswer(None, 0, "libcuda.so.1: cannot open")}}, "gpubox: libcuda.so.1: cannot open"),
    ],
)
def test_what_the_proof_finds(change: dict[str, object], said: str) -> None:
    assert said in proof_error(replace(GOOD, **change))  # type: ignore[arg-type]


def test_machines_without_a_gpu_do_not_prove() -> None:
    nothing = replace(GOOD, gpus=Gpus(pci=(), listed=()), cuda={"root": CudaAnswer(0, 0, "")})
    assert "there is no GPU: PCI 0, driver 0, device nodes 0, nvidia-smi 0" in proof_error(nothing)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (uvm_node(None), "/dev/nvidia-uvm is missing here"),
        (uvm_node(DeviceNode(511, 0)), "/dev/nvidia-uvm has major 511, the kernel's is 510 now: restart the container"),
        ({"uvm_major": ""}, "the node has not loaded nvidia_uvm"),
        ({}, "/dev/nvidia-uvm is right, so the container may not open it"),
    ],
)
def test_h2_999_with_a_healthy_nvidia_smi_is_uvm(change: dict[str, Any], said: str) -> None:
    broken = replace(GOOD, cuda={"gpubox": CudaAnswer(999, 0, ""), "root": CudaAnswer(999, 0, "")}, **change)
    error = proof_error(broken)
    assert f"999, unknown error; nvidia-smi works, so it is uvm: {said}" in error.replace("\n", " ")
    silent = replace(broken.gpus, listed=None, smi_error="nothing in 90 s")
    assert "so it is uvm" not in proof_error(replace(broken, gpus=silent))


def test_all_reasons_are_told_at_once() -> None:
    error = proof_error(replace(GOOD, loaded="580.1", libraries=("580.1",), cuda={}))
    assert "3 reasons" in error
    assert len(error.splitlines()) == 4


def test_a_driver_too_old_for_a_standby_stack() -> None:
    stacks = [stack_spec(ROOT / "stacks" / name, "3.11", None) for name in ("cuda130-next", "cuda128")]
    userland.check_stacks(WANTED, stacks)
    with pytest.raises(InputError, match="stack 'cuda130-next' needs 580 or newer"):
        userland.check_stacks(WANTED.model_copy(update={"version": "575.64.03"}), stacks)


GPU_KEYS = ["pci_read", "pci_gpu", "driver_gpu", "device_node", "smi_gpu", "smi_ok", "smi_error"]
BOX_KEYS = ["os", "driver", "driver_package", "libcuda", "loader_directory", "cuda", "cuda_package"]
line = st.text(alphabet=st.characters(blacklist_characters="\n"), max_size=40)
keys = st.sampled_from([*BOX_KEYS, *GPU_KEYS])


@given(st.dictionaries(keys, st.lists(line, max_size=4)))
def test_any_lines_are_readings_and_judged(lines: dict[str, list[str]]) -> None:
    seen = read_box(lines)
    with pytest.raises(GpuboxError):
        userland.check_proof(WANTED, seen)


@given(st.none() | st.booleans() | st.integers() | st.floats(), st.integers() | st.text(), line)
def test_any_json_of_the_probe_is_an_answer(init: object, devices: object, error: str) -> None:
    for said in (json.dumps({"init": init, "devices": devices, "error": error}), json.dumps(init), error):
        answer = read_box({"cuda": [f"gpubox {said}"]}).cuda["gpubox"]
        assert answer.init is None or isinstance(answer.init, int)


# --- the probe itself, against real shared libraries ---

LIBRARY = """
int cuInit(unsigned flags) {{ return flags == 0 ? {init} : 1; }}
int cuDeviceGetCount(int *count) {{ *count = 8; return 0; }}
"""


def probe(directory: Path) -> dict[str, object]:
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(directory)}
    done = subprocess.run(
        [sys.executable, "-I", "-c", Path(cuda_probe.__file__).read_text()],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(("init", "answer"), [(0, {"init": 0, "devices": 8}), (999, {"init": 999})])
def test_the_probe_asks_the_library(tmp_path: Path, init: int, answer: dict[str, int]) -> None:
    source = LIBRARY.format(init=init)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, input=source, text=True, check=True)
    assert probe(tmp_path) == answer


def test_the_probe_without_a_library(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    assert "libcuda.so.1" in str(probe(tmp_path)["error"])


# --- the script, run for real over a laid-out tree ---

STUBS = {
    "ldconfig": """
printf '\\tlibcuda.so.1 (libc6,x86-64) => %s/lib/libcuda.so.1\\n' "$GPUBOX_ROOT"
printf '\\tlibcuda.so.1 (libc6) => /usr/lib/i386-linux-gnu/libcuda.so.1\\n'
printf '\\tlibcuda.so (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so\\n'
""",
    "systemd-detect-virt": "echo lxc",
    "nvidia-smi": "echo 00000000:41:00.0; echo 00000000:C1:00.0",
    "getent": "exit 2",
    "python3": 'echo \'{"init": 0, "devices": 2}\'',
    "dpkg-query": """
case $* in
  *libnvidia*) echo 'installed install 580.159.04-0ubuntu1 libnvidia-compute-580'
               echo 'not-installed unknown  nvidia-driver'
               echo 'config-files deinstall 580.159.04-0ubuntu1 nvidia-utils-580'
               echo 'half-configured install 580.159.04-0ubuntu1 nvidia-dkms-580-open' ;;
  *dkms*) echo 'installed dkms' ;;
  *nsight*) echo 'installed hold 13.0.1-1 cuda-toolkit-13-0'; echo 'config-files install 1 cuda-old' ;;
esac
""",
}


def run_script(root: Path, *, ask: bool = True) -> BoxReadings:
    stubs = root / "stubs"
    stubs.mkdir(exist_ok=True)
    for name, body in STUBS.items():
        (stubs / name).write_text(f"#!/bin/sh\n{body}\n")
        (stubs / name).chmod(0o755)
    environment = {"PATH": f"{stubs}:/usr/sbin:/usr/bin:/sbin:/bin", "GPUBOX_ROOT": str(root)}
    command = ["sh", "-c", f"{SHELL}{script('gpubox', ask=ask)}true"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines: dict[str, list[str]] = {}
    for text in done.stdout.splitlines():
        key, _, value = text.partition(" ")
        lines.setdefault(key, []).append(value)
    assert done.stderr == ""
    return read_box(lines)


def lay_out(root: Path, files: dict[str, str]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)


def test_the_script_reads_a_machine(tmp_path: Path) -> None:
    gpus = {
        f"sys/bus/pci/devices/0000:{bus}:00.{function}/{name}": value + "\n"
        for bus in ("41", "c1")
        for function, kind in (("0", "0x030000"), ("1", "0x040300"))
        for name, value in (("vendor", "0x10de"), ("class", kind))
    }
    lay_out(
        tmp_path,
        gpus
        | {
            "etc/os-release": 'NAME="Ubuntu"\nID=ubuntu\nVERSION_ID="24.04"\n',
            "proc/driver/nvidia/version": next(
                iter(("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.148.08  Wed\n",))
            ),
            "proc/driver/nvidia/gpus/0000:41:00.0/information": "Model: \t NVIDIA\nDevice Minor: \t 3\n",
            "proc/driver/nvidia/gpus/0000:c1:00.0/information": "",
            "proc/devices": "Character devices:\n195 nvidia\n238 nvidia-uvm\n239 nvidia-uvm-other\n",
            "dev/nvidia3": "c3 3\n",
            "dev/nvidiactl": "c3 ff\n",
            "dev/nvidia-uvm": "ee 0\n",
            "lib/libcuda.so.570.148.08": "",
            "usr/lib/x86_64-linux-gnu/libcuda.so.570.148.08": "",
            "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.148.06": "",
            "usr/lib/x86_64-linux-gnu/libcuda.so.1": "",
            "etc/ld.so.conf": "include /etc/ld.so.conf.d/*.conf\n",
            "etc/ld.so.conf.d/cuda.conf": "# /commented/compat\n /usr/local/cuda-13.0/compat/ # note\n",
            "etc/environment": 'PATH="/usr/bin"\nexport LD_LIBRARY_PATH="/opt/other:relative:/opt/none"\n',
            "opt/other/libcuda.so.1": "",
            "usr/bin/nvidia-uninstall": "",
            "usr/local/cuda-13.0/bin/nvcc": "",
            "usr/local/cuda-12.8/README": "",
        },
    )
    (tmp_path / "lib/libcuda.so.1").symlink_to("libcuda.so.570.148.08")
    (tmp_path / "usr/local/cuda-13.0/bin/nvcc").chmod(0o755)
    seen = run_script(tmp_path)
    assert seen == BoxReadings(
        system="ubuntu 24.04",
        container="lxc",
        loaded="570.148.08",
        libraries=("570.148.06", "570.148.08"),
        libcuda=(
            Library(f"{tmp_path}/lib/libcuda.so.1", f"{tmp_path}/lib/libcuda.so.570.148.08"),
            Library(f"{tmp_path}/opt/other/libcuda.so.1", f"{tmp_path}/opt/other/libcuda.so.1"),
        ),
        loader_directories=(
            LoaderDirectory("/etc/ld.so.conf.d/cuda.conf", "/usr/local/cuda-13.0/compat"),
            LoaderDirectory("/etc/environment", "/opt/other"),
            LoaderDirectory("/etc/environment", "/opt/none"),
        ),
        driver_packages=(
            Package("install", "580.159.04-0ubuntu1", "libnvidia-compute-580"),
            Package("half-configured", "580.159.04-0ubuntu1", "nvidia-dkms-580-open"),
        ),
        run_file=True,
        kernel_packages=("dkms",),
        cuda_packages=(("hold", "13.0.1-1", "cuda-toolkit-13-0"),),  # type: ignore[arg-type]
        toolkit_homes=("/usr/local/cuda-13.0",),
        gpus=Gpus(
            pci=("0000:41:00.0", "0000:c1:00.0"),
            driver={"0000:41:00.0": 3, "0000:c1:00.0": None},
            nodes={
                "/dev/nvidia3": DeviceNode(195, 3),
                "/dev/nvidiactl": DeviceNode(195, 255),
                "/dev/nvidia-uvm": DeviceNode(238, 0),
            },
            listed=("00000000:41:00.0", "00000000:C1:00.0"),
        ),
        uvm_major="238",
        cuda={"root": CudaAnswer(0, 2, "")},
    )


def test_a_machine_without_a_driver_is_not_asked(tmp_path: Path) -> None:
    seen = run_script(tmp_path)
    assert (seen.loaded, seen.gpus, seen.cuda) == (None, Gpus(), {})


@pytest.mark.parametrize(
    ("paths", "driver"),
    [
        (["sys/module/nvidia/version", "dev/nvidiactl"], "/sys/module/nvidia"),
        (["sys/module/kvm/x", "proc/driver/nvidia/version", "dev/nvidiactl"], None),
        (["dev/nvidiactl"], "/dev/nvidiactl"),
    ],
)
def test_the_script_agrees_with_the_standin_about_what_a_driver_is(
    tmp_path: Path, paths: list[str], driver: str | None
) -> None:
    lay_out(tmp_path, dict.fromkeys(paths, "x\n"))
    command = f"{SHELL}{script('gpubox', ask=False)}true"
    done = subprocess.run(
        f"GPUBOX_ROOT={shlex.quote(str(tmp_path))}\n{command}", shell=True, capture_output=True, text=True, check=True
    )
    found = [text.partition(" ")[2] for text in done.stdout.splitlines() if text.startswith("kernel_driver ")]
    assert found == ([driver] if driver else [])
