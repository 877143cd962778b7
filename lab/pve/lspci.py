"""A stand-in for lspci over the recorded machine's devices. That machine had no lspci: what sysfs said is shown so.

Kept: -D, -n, -nn, -m, -mm, -v (nothing more is known), -d VENDOR:[DEVICE][:CLASS], -s. Names of devices are left out,
as lspci does without its table of names.
"""

from __future__ import annotations

import getopt
import sys

from . import machine

CLASSES = {"0300": "VGA compatible controller", "0302": "3D controller", "0600": "Host bridge", "0200": "Ethernet"}


def line(device: machine.PciDevice, *, domain: bool, numbers: int, machine_readable: bool) -> str:
    address = device.address if domain else device.address.removeprefix("0000:")
    kind = device.pci_class[:4]
    if machine_readable:
        return f'{address} "{kind}" "{device.vendor}" "{device.device}" "" ""'
    if numbers == 1:
        return f"{address} {kind}: {device.vendor}:{device.device}"
    name = f"{CLASSES.get(kind, 'Class')} [{kind}]" if numbers else CLASSES.get(kind, f"Class {kind}")
    ids = f" [{device.vendor}:{device.device}]" if numbers else ""
    vendor = "NVIDIA Corporation" if device.vendor == machine.NVIDIA else "Vendor"
    return f"{address} {name}: {vendor} Device{ids or ' ' + device.device}"


def matches(device: machine.PciDevice, wanted: str) -> bool:
    """-d's VENDOR:DEVICE:CLASS, each part hexadecimal or empty."""
    parts = [*wanted.lower().split(":"), "", ""][:3]
    have = (device.vendor, device.device, device.pci_class[:4])
    return all(want in ("", "*", value) for want, value in zip(parts, have, strict=True))


def main() -> None:
    try:
        options, rest = getopt.getopt(sys.argv[1:], "Dnmvd:s:kb")
    except getopt.GetoptError as error:
        sys.exit(f"lspci: invalid option -- '{error.opt}'\nTry `lspci --help' for more information.")
    if rest:
        sys.exit(f"lspci: unexpected argument {rest[0]}")
    letters = [name for name, _ in options]
    values = dict(options)
    for device in machine.pci_devices():
        slot = device.address.removeprefix("0000:")
        if not matches(device, values.get("-d", "")) or values.get("-s", slot).removeprefix("0000:") != slot:
            continue
        print(line(device, domain="-D" in letters, numbers=letters.count("-n"), machine_readable="-m" in letters))
