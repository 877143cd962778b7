"""Everything asked of a Proxmox VE node, in one remote command. gpubox/proxmox/node_readings.py reads it.

Apart from facts/containers.py, with which it shares facts/gpus.py: that is asked again after every `pct`, and this one
asks programs that take seconds (lspci -vvv, journalctl, dkms) and that no `pct` changes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pyinfra import host
from pyinfra.api import FactBase

from facts import gpus
from facts.per_host import PerHost
from facts.userland import DRIVER_SCRIPT
from gpubox.nvidia.driver_packages import FAMILY
from gpubox.proxmox.node import TOOLS, UNITS
from gpubox.proxmox.node_readings import NodeReadings, read_node
from gpubox.proxmox.settings import NodeSettings

STATE = "/var/lib/gpubox/node"  # stamps: what was applied last, written when it was applied

# GPUBOX_ROOT, say and each are those of facts.gpus.SHELL.
SCRIPT = (
    r"""
read1() { head -n 1 "$1" 2>/dev/null; }
have() { command -v "$1" >/dev/null 2>&1; }
say release "$(uname -r)"
[ -r "$R/etc/os-release" ] && say os "$(. "$R/etc/os-release" && echo "$ID $VERSION_ID")"
have id && [ "$(id -u)" != 0 ] && say user "$(id -un)"
have pveversion && say pve "$(pveversion 2>/dev/null | head -n 1)"
for f in "$R"/boot/vmlinuz-*; do [ -f "$f" ] && say kernel "${f##*/vmlinuz-}"; done
for f in "$R"/boot/initrd.img-*; do [ -f "$f" ] && say initrd "${f##*/initrd.img-}"; done
say pin "$(read1 "$R"/etc/kernel/proxmox-boot-pin)"
say next_boot_pin "$(read1 "$R"/etc/kernel/next-boot-pin)"
[ -f "$R"/etc/kernel/proxmox-boot-uuids ] && say esp_sync yes
boot=$(proxmox-boot-tool status 2>/dev/null | grep 'is configured with')
case $boot in *uefi*) say bootloader systemd-boot ;; esac
case $boot in "" | *grub*) say bootloader grub ;; esac
say command_line "$(read1 "$R"/proc/cmdline)"
say kernel_cmdline_file "$(read1 "$R"/etc/kernel/cmdline)"
status='${db:Status-Status} ${Package}\n'
set -f # these patterns are dpkg-query's
dpkg-query -W -f "$status" $TOOLS 'proxmox-default-headers' 'proxmox-headers-*' 'proxmox-kernel-*' 2>/dev/null |
  sed -n 's/^installed //p' | each package
set +f
"""
    + DRIVER_SCRIPT
    + r"""
have dkms && dkms status 2>/dev/null | each dkms
for k in $(ls "$R"/lib/modules 2>/dev/null); do
  v=$(modinfo -k "$k" -F version nvidia 2>/dev/null | head -n 1)
  [ -n "$v" ] && say module "$k $v $(modinfo -k "$k" -F license nvidia 2>/dev/null | head -n 1)"
done
sed -n 's/^\(nvidia[a-z_]*\|nouveau\|nova_core\) .*/\1/p' "$R"/proc/modules 2>/dev/null | each loaded
say banner "$(read1 "$R"/proc/driver/nvidia/version)"
say uvm_disable_hmm "$(read1 "$R"/sys/module/nvidia_uvm/parameters/uvm_disable_hmm)"
for d in /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib; do
  for f in "$R$d"/libcuda.so.*.*; do [ -f "$f" ] && echo "${f##*/libcuda.so.}"; done
done | sort -u | each libcuda
pci_gpus | while read -r address; do
  d=$R/sys/bus/pci/devices/$address bar=0
  while read -r first last flags; do
    size=$((last - first)); [ "$size" -gt 0 ] && [ $((size + 1)) -gt "$bar" ] && bar=$((size + 1))
  done 2>/dev/null <"$d/resource"
  id=$(read1 "$d/device"); w=$(read1 "$d/current_link_width"); m=$(read1 "$d/max_link_width")
  g=$(read1 "$d/iommu_group/type")
  say card "$address ${id#0x} ${w:-0} ${m:-0} $bar ${g:--}"
  say card_parents "$address $(readlink -f "$d" | tr / '\n' | grep '^[0-9a-f]*:[0-9a-f]*:[0-9a-f]*\.[0-7]$' |
    grep -vxF "$address" | tr '\n' ' ')"
done
for d in "$R"/sys/bus/pci/devices/*; do
  [ -f "$d/aer_dev_correctable" ] || continue
  echo "aer_read yes"
  total() { sed -n 's/^TOTAL_ERR_[A-Z]* //p' "$d/aer_dev_$1" 2>/dev/null; }
  c=$(total correctable); n=$(total nonfatal); f=$(total fatal)
  [ "${c:-0}${n:-0}${f:-0}" = 000 ] || say aer "${d##*/} ${c:-0} ${n:-0} ${f:-0}"
done
if have lspci && verbose=$(lspci -Dvvv 2>/dev/null); then
  echo "acs_read yes"
  echo "$verbose" | awk '/^[0-9a-f]/ { address = $1 } /ACSCtl:/ && /(ReqRedir|CmpltRedir)[+]/ { print address }' |
    each acs_redirecting
fi
have mokutil && case $(mokutil --sb-state 2>&1) in
  *"SecureBoot enabled"*) say secure_boot enabled ;;
  *"SecureBoot disabled"* | *"not supported"*) say secure_boot disabled ;;
esac
say root_fs "$(findmnt -no FSTYPE / 2>/dev/null | head -n 1)"
if have journalctl && log=$(journalctl -k -b --no-pager -q -o cat 2>/dev/null); then
  echo "kernel_log_read yes"
  echo "$log" | grep -e 'NVRM: Xid' -e 'NVRM: API mismatch' -e 'RmInitAdapter failed' \
    -e 'requires use of the NVIDIA open' -e 'NVRM: .*fallen off the bus' | tail -n 20 | each xid
fi
KERNEL=${KERNEL:-$(read1 "$R"/etc/kernel/proxmox-boot-pin)}
KERNEL=${KERNEL:-$(uname -r)}
for f in $FILES; do
  [ -f "$R$f" ] && say file "$(sha256sum "$R$f" | cut -d' ' -f1) $(stat -c '%a %U:%G' "$R$f") $f"
  case $f in /etc/modprobe.d/*)
    [ -f "$R$f" ] && [ "$R$f" -nt "$R/boot/initrd.img-$KERNEL" ] && stale=yes ;;
  esac
done
[ -n "$stale" ] && say initrd_stale yes
for f in "$R"/var/lib/gpubox/node/*.applied; do
  [ -f "$f" ] && n=${f##*/} && say stamp "${n%.applied} $(read1 "$f")"
done
if have systemctl; then
  for u in $UNITS; do
    [ "$(systemctl is-enabled "$u" 2>/dev/null)" = enabled ] && say unit_enabled "$u"
    [ "$(systemctl is-active "$u" 2>/dev/null)" = active ] && say unit_active "$u"
  done
  systemctl show -p NeedDaemonReload --value $UNITS 2>/dev/null | grep -q yes && say reload yes
fi
"""
)


class Node(FactBase[list[str]]):
    """The script's lines. `pyinfra INVENTORY --json fact facts.node.Node` prints them; read_node() reads them.

    files: paths to hash. kernel: the one whose initramfs is compared with those files; without it the pinned or the
    running one.
    """

    def command(self, files: Sequence[str] = (), kernel: str = "") -> str:
        values = {
            "TOOLS": " ".join(TOOLS),
            "DRIVER_PACKAGES": " ".join(FAMILY),
            "UNITS": " ".join(UNITS),
            "FILES": " ".join(files),
            "KERNEL": kernel,
        }
        assigned = "\n".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
        script = "\n".join([assigned, gpus.SHELL, SCRIPT, gpus.COUNT, gpus.ASK_SMI, "true"])
        return f"sh -c {shlex.quote(script)}"

    def process(self, output: list[str]) -> list[str]:
        return list(output)

    @staticmethod
    def default() -> list[str]:
        return []


def _read(question: tuple[tuple[str, ...], str]) -> NodeReadings:
    files, kernel = question
    return read_node(host.get_fact(Node, files=list(files), kernel=kernel))


_nodes = PerHost(_read)
node_readings = _nodes.answer


def look_at_node(files: Sequence[str], settings: NodeSettings) -> NodeReadings:
    """Say, once per host and run, what node_readings() shall look at; the first readings."""
    _nodes.ask((tuple(files), settings.kernel or ""))
    return node_readings()
