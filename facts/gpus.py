"""The part that the scripts of node, containers and box share: the GPUs on PCI, of the driver, in /dev, in nvidia-smi.

gpubox/nvidia/gpu_count.py reads its lines. PCI is read from sysfs, which needs no package and is seen in a container.
"""

from __future__ import annotations

# GPUBOX_ROOT: the root under which the tests lay out a machine's files; empty on a real one. There, a file that holds
# major and minor stands for a device node.
SHELL = r"""
R=${GPUBOX_ROOT:-}
say() { [ -n "$2" ] && echo "$1 $2"; }
each() { while read -r line; do say "$1" "$line"; done; }
# VGA (0300) and 3D controllers (0302); a card's audio and USB functions are no GPUs.
pci_gpus() {
  for d in "$R"/sys/bus/pci/devices/*; do
    { read -r v <"$d/vendor"; read -r c <"$d/class"; } 2>/dev/null || continue
    case $v$c in 0x10de0x0300* | 0x10de0x0302*) echo "${d##*/}" ;; esac
  done
}
# Below the root $1: path, and major and minor in hexadecimal. A link would be another device under a wrong name.
nvidia_nodes() {
  for f in "$1"/dev/nvidia*; do
    [ -L "$f" ] && continue
    if [ -c "$f" ]; then echo "${f#"$1"} $(stat -c '%t %T' "$f")"
    elif [ -n "$R" ] && [ -f "$f" ]; then echo "${f#"$1"} $(cat "$f")"; fi
  done
}
"""

COUNT = r"""
[ -d "$R/sys/bus/pci/devices" ] && echo "pci_read yes"
pci_gpus | each pci_gpu
for d in "$R"/proc/driver/nvidia/gpus/*; do
  [ -d "$d" ] && say driver_gpu "${d##*/} $(sed -n 's/^Device Minor:[[:space:]]*//p' "$d/information" 2>/dev/null)"
done
nvidia_nodes "$R" | each device_node
"""

# Last, and only with the module loaded: run as root it would load the module and make device nodes by itself, and so
# hide what the next boot will lack.
ASK_SMI = r"""
if [ -e "$R/proc/driver/nvidia/version" ]; then
  if ! command -v nvidia-smi >/dev/null; then say smi_error "it is not installed"
  elif smi=$(timeout 90 nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader 2>&1); then
    echo "smi_ok yes"; echo "$smi" | each smi_gpu
  else
    smi=$(echo "$smi" | grep -v '^ *$' | head -n 1); say smi_error "${smi:-nothing in 90 s}"
  fi
fi
"""
