"""Host memory bound to a NUMA node, for machines with fast memory beside large memory."""

import ctypes
import mmap
import os
import platform
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SYS_MBIND = {"x86_64": 237, "aarch64": 235}
MPOL_BIND = 2
MASK_BITS = 1024


def check_node(node: int) -> None:
    """ValueError unless this machine has memory of that number."""
    nodes = sorted(
        int(path.name.removeprefix("node"))
        for path in Path("/sys/devices/system/node").glob("node[0-9]*")
    )
    if node not in nodes or platform.machine() not in SYS_MBIND:
        raise ValueError(f"host_numa_node={node}: the NUMA nodes of this machine are {nodes}")


def bound(num_bytes: int, node: int) -> NDArray[np.uint8]:
    """Zeroed memory whose pages lie on one NUMA node."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    mask = (ctypes.c_ulong * (MASK_BITS // 64))()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    length = -(-array.size // mmap.PAGESIZE) * mmap.PAGESIZE
    failed = libc.syscall(
        SYS_MBIND[platform.machine()],
        ctypes.c_void_p(array.ctypes.data),
        ctypes.c_ulong(length),
        MPOL_BIND,
        mask,
        ctypes.c_ulong(MASK_BITS),
        0,
    )
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"memory can't be bound to NUMA node {node}: {os.strerror(code)}")
    return array[:num_bytes]
