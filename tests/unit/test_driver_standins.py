"""The stand-ins of a node's machine and of NVIDIA's programs against recordings of real machines, and sources."""

from __future__ import annotations

import errno
import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from lab import driver_run
from lab.pve import boot_tool, dkms, kmod, lspci, machine

VERSION = "590.48.01"
RECORDINGS = Path(driver_run.__file__).parent / "pve/recordings"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two H200 and two kernels, in a directory."""
    monkeypatch.setattr(machine, "RECORDINGS", RECORDINGS / "h200-x2")
    for name in ("BOOT", "MODULES", "STATE", "PINNED", "PINNED_ONCE", "KERNEL", "LOST"):
        monkeypatch.setattr(machine, name, tmp_path / name.lower())
    monkeypatch.setattr(dkms, "TREE", tmp_path / "dkms")
    monkeypatch.setattr(dkms, "SOURCES", tmp_path / "src")
    machine.BOOT.mkdir()
    for kernel in ("6.8.12-9-pve", "6.8.12-10-pve"):
        (machine.BOOT / f"vmlinuz-{kernel}").touch()
        (machine.MODULES / kernel / "build").mkdir(parents=True)
    machine.KERNEL.write_text("6.8.12-10-pve\n")
    return tmp_path


def test_kernels_are_listed_as_proxmox_boot_tool_does(host: Path, monkeypatch, capsys) -> None:
    """The lines are those of a real node's terminal, published by its owner (PVE 8.1, GPU passthrough notes)."""
    machine.PINNED.write_text("6.8.12-9-pve\n")
    monkeypatch.setattr(boot_tool.sys, "argv", ["proxmox-boot-tool", "kernel", "list"])
    boot_tool.main()
    assert capsys.readouterr().out == (
        "Manually selected kernels:\nNone.\n\nAutomatically selected kernels:\n6.8.12-9-pve\n6.8.12-10-pve\n\n"
        "Pinned kernel:\n6.8.12-9-pve\n"
    )


def test_the_next_boot_takes_the_pinned_kernel_or_the_newest(host: Path) -> None:
    assert machine.next_kernel() == "6.8.12-10-pve"
    machine.PINNED.write_text("6.8.12-9-pve\n")
    assert machine.next_kernel() == "6.8.12-9-pve"
    machine.PINNED.write_text("6.8.12-1-pve\n")  # not installed
    assert machine.next_kernel() == "6.8.12-10-pve"
    machine.PINNED_ONCE.write_text("6.8.12-9-pve\n")
    assert machine.next_kernel() == "6.8.12-9-pve"


def test_lspci_shows_the_recorded_gpus(host: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(lspci.sys, "argv", ["lspci", "-Dnmm", "-d", "10de:"])
    lspci.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(' "')[0] for line in lines] == ["0000:00:06.0", "0000:00:07.0"]
    assert all(re.match(r'\S+ "0302" "10de" "2335"', line) for line in lines)


def add_driver(host: Path, version: str = VERSION) -> None:
    source = host / f"src/nvidia-{version}"
    source.mkdir(parents=True)
    (source / "dkms.conf").touch()
    (source / "module-type").write_text("open\n")


def test_dkms_adds_builds_and_removes(host: Path, capsys) -> None:
    add_driver(host)
    dkms.run(["add", "-m", "nvidia", "-v", VERSION])
    dkms.run(["status"])
    dkms.run(["install", f"nvidia/{VERSION}", "-k", "6.8.12-10-pve"])
    dkms.run(["build", "-m", "nvidia", "-v", VERSION, "-k", "6.8.12-9-pve"])
    dkms.run(["status"])
    assert capsys.readouterr().out == (
        f"nvidia/{VERSION}: added\n"
        f"nvidia/{VERSION}, 6.8.12-10-pve, x86_64: installed\nnvidia/{VERSION}, 6.8.12-9-pve, x86_64: built\n"
    )
    assert machine.module_info("6.8.12-10-pve")["license"] == "Dual MIT/GPL"
    dkms.run(["remove", "-m", "nvidia", "-v", VERSION, "--all"])
    dkms.run(["status"])
    assert capsys.readouterr().out == ""
    assert machine.module_info("6.8.12-10-pve") == {}


def test_dkms_fails_without_headers_and_on_a_kernel_that_is_too_new(host: Path) -> None:
    add_driver(host)
    with pytest.raises(dkms.Failure, match=r"Your kernel headers for kernel 6\.8\.12-8-pve cannot be found"):
        dkms.run(["install", "-m", "nvidia", "-v", VERSION, "-k", "6.8.12-8-pve"])
    (machine.MODULES / "7.0.2-6-pve/build").mkdir(parents=True)
    with pytest.raises(dkms.Failure, match=r"Bad return status for module build on kernel: 7\.0\.2-6-pve") as failed:
        dkms.run(["install", "-m", "nvidia", "-v", VERSION, "-k", "7.0.2-6-pve"])
    assert failed.value.status == 10


def test_a_module_that_was_not_built_is_not_loaded(host: Path) -> None:
    with pytest.raises(LookupError, match=r"Module nvidia not found in directory .*6\.8\.12-10-pve"):
        kmod.load("nvidia")


def driver_program(name: str) -> ModuleType:
    """A program of the .run file, with its version filled in, as a module."""
    file = driver_run.SOURCE / f"{name}.py"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__file__"] = str(file)
    exec(compile(file.read_text().replace("@VERSION@", VERSION), file, "exec"), module.__dict__)
    return module


Smi = Callable[..., tuple[str, int]]


@pytest.fixture
def smi(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[ModuleType, Smi]:
    """nvidia-smi with a driver of its version, both GPUs, and plain files for their nodes."""
    module = driver_program("nvidia_smi")
    proc, dev = tmp_path / "proc", tmp_path / "dev"
    (proc / "gpubox-lab").mkdir(parents=True)
    dev.mkdir()
    for file in (RECORDINGS / "h200-x2").iterdir():
        (proc / "gpubox-lab" / file.name).write_bytes(file.read_bytes())
    banner = (RECORDINGS / "h200-x2/proc-driver-nvidia-version.txt").read_text().splitlines()[1]
    for minor, address in enumerate(("0000:00:06.0", "0000:00:07.0")):
        (proc / f"nvidia/gpus/{address}").mkdir(parents=True)
        (proc / f"nvidia/gpus/{address}/information").write_text(f"Device Minor: \t {minor}\n")
        (dev / f"nvidia{minor}").touch()
    (proc / "nvidia/version").write_text(banner.replace("580.159.04", VERSION) + "\n")
    (dev / "nvidiactl").touch()
    module.PROC, module.DEV, module.MODPROBE = proc, dev, tmp_path / "none"

    def ask(*arguments: str) -> tuple[str, int]:
        try:
            return module.run(list(arguments)), 0
        except module.Failure as failure:
            return failure.text, failure.status

    return module, ask


RECORDED = [
    *("nvidia-smi-L.txt", "nvidia-smi-query.csv", "nvidia-smi-query-nounits.csv", "nvidia-smi-pcie-q.csv"),
    *("nvidia-smi-query-badfield.csv", "nvidia-smi-compute-apps.csv", "nvidia-smi-topo-m.txt", "nvidia-smi-nvlink.txt"),
    *("nvidia-smi-topo-p2p-r.txt", "nvidia-smi-topo-p2p-bad.txt", "nvidia-smi-no-gpu.txt", "nvidia-smi-q.xml"),
    "nvidia-smi-version.txt",
]


@pytest.mark.parametrize("name", RECORDED)
def test_nvidia_smi_prints_what_was_recorded(smi: tuple[ModuleType, Smi], name: str) -> None:
    """The same command gives the same output and status; only the driver's version differs."""
    lines = (RECORDINGS / "h200-x2" / name).read_text().splitlines(keepends=True)
    arguments = lines[0].removeprefix("$ nvidia-smi ").split()
    text, status = smi[1](*arguments)
    expected = "".join(lines[1:-1]).replace("580.159.04", VERSION).replace("580.159", "590.48")
    assert (text, f"[rc={status}]") == (expected, lines[-1].strip())


def test_nvidia_smi_without_a_driver_with_another_and_without_nodes(smi: tuple[ModuleType, Smi]) -> None:
    module, ask = smi
    (module.DEV / "nvidia0").unlink()
    assert ask("-L") == ("GPU 0: NVIDIA H200 (UUID: GPU-00000000-0000-4000-8000-000000000001)\n", 0)
    (module.DEV / "nvidia1").unlink()
    assert ask("-L") == ("No devices were found\n", 6)
    module.openable = lambda node: errno.EPERM if node.name == "nvidiactl" else 0
    assert ask("-L") == ("Failed to initialize NVML: Unknown Error\n", 255)
    version = module.PROC / "nvidia/version"
    version.write_text(version.read_text().replace(VERSION, "580.159.04"))
    mismatch = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 590.48\n"
    assert ask("-L") == (mismatch, 18)
    version.unlink()
    text, status = ask("-L")
    assert status == 9
    assert text.startswith("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")


def test_what_was_not_recorded_is_no_answer(smi: tuple[ModuleType, Smi]) -> None:
    assert smi[1]("dmon")[1] == 64


def test_nvidia_modprobe_reads_its_options_as_the_source_does(capsys) -> None:
    module = driver_program("nvidia_modprobe")
    assert module.parse(["-c", "255", "-c0", "--create-nvidia-device-file=1", "-m"]) == ([255, 0, 1], [], {"m"})
    assert module.parse(["-u", "-c", "0"]) == ([0], [], {"u"})
    assert module.parse(["-f", "/x"]) == ([], ["/x"], set())
    for wrong in (["-x"], ["-c", "many"], ["word"]):
        with pytest.raises(SystemExit) as ended:
            module.parse(wrong)
        assert ended.value.code == 1
    assert "Invalid commandline, please run `nvidia-modprobe --help`" in capsys.readouterr().err


def test_the_installer_takes_the_real_ones_options_and_no_others() -> None:
    module = driver_program("install")
    host = ["--silent", "--dkms", "-M", "open", "--disable-nouveau", "--rebuild-initramfs"]
    host.append("--no-install-compat32-libs")
    assert module.parse([*host, "--log-file-name", "/x", "--kernel-name=K"]) == {
        **{"silent": "1", "dkms": "1", "kernel-module-type": "open", "disable-nouveau": "1", "rebuild-initramfs": "1"},
        **{"install-compat32-libs": "0", "log-file-name": "/x", "kernel-name": "K"},
    }
    box = ["--silent", "--no-kernel-modules", "--no-nvidia-modprobe", "--no-systemd", "--no-install-compat32-libs"]
    assert module.parse(box)["systemd"] == "0"
    with pytest.raises(module.Refused, match='unrecognized option: "--no-such"'):
        module.parse(["--no-such"])
    with pytest.raises(module.Refused, match='invalid option: "-Q"'):
        module.parse(["-Q"])


def test_the_run_file_is_the_same_at_every_time_and_runs(tmp_path: Path) -> None:
    file = tmp_path / driver_run.file_name()
    file.write_bytes(driver_run.content())
    assert driver_run.content() == file.read_bytes()
    assert driver_run.sha256("580.95.05") != driver_run.sha256()
    done = subprocess.run(["sh", file, "--version"], capture_output=True, text=True, check=True)
    assert f"nvidia-installer:  version {VERSION}" in done.stdout
    ask = ["sh", file, "--print-recommended-kernel-module-type"]
    done = subprocess.run(ask, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("open\n")
    done = subprocess.run(["sh", file, "--bogus"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, 'nvidia-installer: unrecognized option: "--bogus"\n')


def test_the_stand_in_libcuda_compiles_and_finds_no_driver_here(tmp_path: Path) -> None:
    """cuInit of a machine without /proc/driver/nvidia: 100, CUDA_ERROR_NO_DEVICE."""
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver")
    source = (driver_run.SOURCE / "libcuda.c").read_text().replace("@VERSION@", VERSION).replace("@CUDA@", "13010")
    (tmp_path / "libcuda.c").write_text(source)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, tmp_path / "libcuda.c"], check=True)
    ask = f"import ctypes; print(ctypes.CDLL('{library}').cuInit(0))"
    done = subprocess.run(["python3", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout == "100\n"
