"""The driver's libraries inside a box: they must be of exactly the version of the kernel module that is loaded.

Not of its branch, not "the newest": a library that differs in the last number gets "API mismatch" from the module.
In a container the module is the node's. Pure rules over BoxReadings.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpubox.errors import InputError, ProofError, RefusedError
from gpubox.nvidia import driver_packages
from gpubox.nvidia.box_readings import BoxReadings, CudaAnswer
from gpubox.nvidia.driver import DriverSettings, numbers
from gpubox.nvidia.driver_packages import Found
from gpubox.nvidia.gpu_count import count_problem
from gpubox.specs.stack import StackSpec

# What cuInit returns, from cuda.h, where the operator can do something about it.
_CUDA_STATUS = {
    100: "no device: the device nodes of the GPUs are missing or may not be opened",
    802: "system not ready: the fabric manager of an NVSwitch machine does not run",
    803: "driver and library differ: another libcuda, or a compat directory, is found first",
    804: "a compat library was found, and this GPU does not allow it",
    999: "unknown error",
}


def check_stacks(driver: DriverSettings, stacks: Iterable[StackSpec]) -> None:
    """One driver serves every stack that is kept, standby ones too. Raises InputError for one that is too old."""
    for spec in stacks:
        cuda = spec.build.cuda
        if cuda is not None and numbers(driver.version) < numbers(cuda.min_driver):
            raise InputError(
                f"driver.version = {driver.version!r}: stack {spec.build.name!r} needs {cuda.min_driver} or newer",
                hint="a newer driver also runs older CUDA versions: take the one of the newest stack",
            )


def found(seen: BoxReadings) -> Found:
    return Found(seen.system, seen.driver_packages, seen.run_file, seen.libraries, modules=seen.bare_metal)


def check_module(driver: DriverSettings, seen: BoxReadings) -> None:
    """The kernel module that is loaded is the wanted one. Raises RefusedError: no other version is ever substituted."""
    if seen.loaded == driver.version:
        return
    where = "this machine" if seen.bare_metal else "the node of this container"
    if seen.loaded is None:
        raise RefusedError(
            f"driver.version = {driver.version!r}, but {where} has no NVIDIA driver loaded",
            hint="reboot or modprobe nvidia if it is installed; see dmesg | grep NVRM"
            if seen.bare_metal
            else "deploy the node first (group proxmox_nodes), or remove driver from this box's settings",
        )
    raise RefusedError(
        f"driver.version = {driver.version!r}, but {where} has {seen.loaded} loaded",
        hint="make them equal: set driver to the loaded one, or deploy and reboot the node "
        "with the wanted one. Libraries of another version do not work with it, not even of the same branch",
    )


def check_replaceable(driver: DriverSettings, seen: BoxReadings) -> None:
    """Only a container's libraries are replaced apart from a module. Raises RefusedError on bare metal."""
    if seen.bare_metal and not is_installed(driver, seen):
        raise RefusedError(
            f"module {seen.loaded} is loaded on this bare-metal machine, its libraries are "
            f"{', '.join(seen.libraries) or 'missing'}",
            hint=f"install driver {driver.version} as a whole, module and libraries, from one source",
        )


def is_installed(driver: DriverSettings, seen: BoxReadings) -> bool:
    """Libraries of exactly this version and of no other, and so their packages."""
    return seen.libraries == (driver.version,) and not driver_packages.problems(driver, found(seen))


def is_complete(driver: DriverSettings, seen: BoxReadings) -> bool:
    """Module and libraries are of this version."""
    return seen.loaded == driver.version and is_installed(driver, seen)


def loader_problems(seen: BoxReadings) -> list[str]:
    """What would make a program load another libcuda than the driver's."""
    problems = []
    files = sorted({library.file for library in seen.libcuda})
    if len(files) > 1:
        problems.append(f"more than one libcuda.so.1 is on the loader's path: {', '.join(files)}")
    for directory in seen.loader_directories:
        if "compat" in directory.path.split("/"):
            problems.append(
                f"{directory.origin} puts {directory.path} on the loader's path: "
                "its libcuda is for older drivers (error 803)"
            )
    return problems


def guest_problems(seen: BoxReadings) -> list[str]:
    """What has no place in a container, which has no kernel of its own."""
    if seen.bare_metal or not seen.kernel_packages:
        return []
    return [f"packages for a kernel are installed, and a container has none: {', '.join(seen.kernel_packages)}"]


def cuda_problems(seen: BoxReadings) -> list[str]:
    """CUDA starts for every user that was asked, and sees every GPU. nvidia-smi proves neither: it needs no uvm."""
    if not seen.cuda:
        return ["cuInit was not asked: no python3 here"]
    wanted = len(seen.gpus.gpu_nodes)
    refused = {user: answer for user, answer in seen.cuda.items() if answer.init != 0}
    if not refused:
        few = {user: answer.devices for user, answer in seen.cuda.items() if answer.devices != wanted}
        return [f"CUDA shows {count} GPUs to {user}, there are {wanted} device nodes" for user, count in few.items()]
    if "root" in seen.cuda and "root" not in refused:
        users = ", ".join(refused)
        return [f"CUDA starts for root and not for {users}: the device nodes need mode 0666 (container.devices_mode)"]
    user, answer = next(iter(refused.items()))
    return [f"cuInit fails for {user}: {_reason(answer, seen)}"]


def check_proof(driver: DriverSettings, seen: BoxReadings) -> None:
    """Everything holds that a server needs of the driver. Raises ProofError with all that does not."""
    problems = []
    if seen.loaded != driver.version:
        problems.append(f"module {seen.loaded or '(none)'} is loaded, {driver.version} is wanted")
    if seen.libraries != (driver.version,):
        there = ", ".join(seen.libraries) or "none"
        problems.append(f"the driver's libraries must be of {driver.version} and nothing else, found: {there}")
    problems += driver_packages.problems(driver, found(seen))
    problems += [*loader_problems(seen), *guest_problems(seen)]
    if counts := count_problem(seen.gpus):
        problems.append(str(counts))
    problems += cuda_problems(seen)
    raise_problems("the GPUs cannot be used here", problems)


def raise_problems(title: str, problems: list[str]) -> None:
    """Raises ProofError when there are problems: one in the first line, several below it."""
    if len(problems) == 1:
        raise ProofError(f"{title}: {problems[0]}")
    if problems:
        raise ProofError(f"{title}, for {len(problems)} reasons:", detail="\n".join(problems))


def _reason(answer: CudaAnswer, seen: BoxReadings) -> str:
    if answer.init is None:
        return answer.error
    text = f"{answer.init}, {_CUDA_STATUS.get(answer.init, 'see cuda.h')}"
    if answer.init == 999 and seen.gpus.listed:
        text += f"; nvidia-smi works, so it is uvm: {_uvm(seen)}"
    return text


def _uvm(seen: BoxReadings) -> str:
    if not seen.uvm_major:
        return "the node has not loaded nvidia_uvm"
    node = seen.gpus.nodes.get("/dev/nvidia-uvm")
    if node is None:
        return "/dev/nvidia-uvm is missing here: the node made it too late, or the container's configuration lacks it"
    if str(node.major) != seen.uvm_major:
        return (
            f"/dev/nvidia-uvm has major {node.major}, the kernel's is {seen.uvm_major} now: "
            "restart the container, and name no fixed number in its configuration"
        )
    return "/dev/nvidia-uvm is right, so the container may not open it: pass it as a devN entry, not as a mount"
