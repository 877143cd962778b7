"""Ask the driver's library itself: can a program start CUDA here, and on how many GPUs? Prints one line of JSON.

nvidia-smi works without the uvm device and CUDA does not, so nvidia-smi's good health proves nothing about CUDA. This
file is sent to a box as text and run by its system python3: the standard library only, nothing newer than Python 3.8.
"""

import ctypes
import json


def ask() -> "dict[str, object]":
    """`init`: what cuInit returned; `devices`: how many GPUs CUDA sees; `error`: there is no library to ask."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": str(error)}
    status = cuda.cuInit(0)
    if status != 0:
        return {"init": status}
    count = ctypes.c_int(0)
    status = cuda.cuDeviceGetCount(ctypes.byref(count))
    return {"init": status, "devices": count.value}


if __name__ == "__main__":
    print(json.dumps(ask()))
