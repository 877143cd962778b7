"""The part of facts/box.py's script on driver, GPUs and toolkits. gpubox/nvidia/box_readings.py reads its lines."""

from __future__ import annotations

import shlex
from pathlib import Path

from facts import gpus
from gpubox.nvidia import cuda_probe
from gpubox.nvidia.driver_packages import FAMILY

PROBE = Path(cuda_probe.__file__).read_text(encoding="utf-8")

# What has installed a driver: apt, in whatever state it left a package, or a .run file. Of nodes and boxes.
DRIVER_SCRIPT = r"""
set -f # these patterns are dpkg-query's
dpkg-query -W -f '${db:Status-Status} ${db:Status-Want} ${Version} ${Package}\n' $DRIVER_PACKAGES 2>/dev/null |
  sed -n -e 's/^installed //p' -e 's/^\(unpacked\|half-[a-z]*\|triggers-[a-z]*\) [a-z]* /\1 /p' | each driver_package
set +f
[ -e "$R/usr/bin/nvidia-uninstall" ] && say run_file yes
"""

SCRIPT = r"""
[ -r "$R/etc/os-release" ] && say os "$(. "$R/etc/os-release" && echo "$ID $VERSION_ID")"
say driver "$(head -n 1 "$R/proc/driver/nvidia/version" 2>/dev/null)"
say container "$(systemd-detect-virt --container 2>/dev/null || true)"
if [ -d "$R/sys/module/nvidia" ]; then say kernel_driver /sys/module/nvidia
elif [ ! -d "$R/sys/module" ]; then
  for f in /proc/driver/nvidia/version /dev/nvidiactl; do [ -e "$R$f" ] && say kernel_driver "$f"; done
fi
set -f # these patterns are dpkg-query's
installed() { dpkg-query -W -f '${db:Status-Status} '"$1"'\n' $2 2>/dev/null | sed -n 's/^installed //p'; }
installed '${Package}' 'dkms linux-image-* linux-headers-* linux-modules-* proxmox-kernel-* proxmox-headers-*' |
  each kernel_package
installed '${db:Status-Want} ${Version} ${Package}' 'cuda-* nsight-* gds-tools-* lib*-1[0-9]-[0-9]' | each cuda_package
set +f
for f in "$R"/usr/local/cuda-*/bin/nvcc; do [ -x "$f" ] && f=${f%/bin/nvcc} && say toolkit_home "${f#"$R"}"; done
for d in /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib; do
  for f in "$R$d"/libcuda.so.*.* "$R$d"/libnvidia-ml.so.*.*; do [ -f "$f" ] && say driver_library "${f##*.so.}"; done
done
found() { say libcuda "$1 $(readlink -f "$1")"; }
ldconfig -p 2>/dev/null | sed -n 's/^[[:space:]]*libcuda\.so\.1 (libc6,x86-64[^)]*) => //p' |
  while read -r f; do found "$f"; done
for f in "$R"/etc/ld.so.conf "$R"/etc/ld.so.conf.d/*.conf; do
  [ -r "$f" ] && sed -n 's/^[[:space:]]*\(\/[^#[:space:]]*\).*/\1/p' "$f" |
    while read -r d; do say loader_directory "${f#"$R"} ${d%/}"; done
done
f=/etc/environment
sed -n 's/^[[:space:]]*\(export[[:space:]]*\)\{0,1\}LD_LIBRARY_PATH=//p' "$R$f" 2>/dev/null | tr -d '"'\' | tr : '\n' |
  while read -r d; do
    case $d in /*) say loader_directory "$f ${d%/}"; [ -e "$R$d/libcuda.so.1" ] && found "$R$d/libcuda.so.1" ;; esac
  done
say uvm_major "$(sed -n 's/^ *\([0-9]*\) nvidia-uvm$/\1/p' "$R/proc/devices" 2>/dev/null)"
"""

# Only where a driver is wanted and loaded. The probe is asked as the service's user, since device nodes may be root's
# alone, and without this session's environment, which the service does not have.
ASK = r"""
if [ -e "$R/proc/driver/nvidia/version" ]; then
  probe() {
    u=$1; shift
    said=$("$@" env -i "PATH=$PATH" timeout 60 python3 -c "$PROBE" 2>&1 | tail -n 1)
    say cuda "$u ${said:-no answer in 60 s}"
  }
  if command -v python3 >/dev/null; then
    as=root
    getent passwd "$SERVICE_USER" >/dev/null && as=$SERVICE_USER
    probe "$as" setpriv --reuid "$as" --regid "$(id -g "$as")" --init-groups
    case $said in *'"devices"'*) ;; *) [ "$as" = root ] || probe root env ;; esac
  fi
fi
"""


def script(service_user: str, *, ask: bool) -> str:
    """POSIX sh that prints `key value` lines, by the functions of facts.gpus.SHELL. `ask`: also nvidia-smi and CUDA."""
    values = {"DRIVER_PACKAGES": " ".join(FAMILY), "SERVICE_USER": service_user, "PROBE": PROBE if ask else ""}
    assigned = "\n".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
    parts = [assigned, SCRIPT, DRIVER_SCRIPT, gpus.COUNT, *([gpus.ASK_SMI, ASK] if ask else [])]
    return "\n".join(parts)
