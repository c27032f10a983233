"""Memory of GPUs that processes of one host share (CUDA IPC): one exports it, others open it by a handle."""

from __future__ import annotations

from typing import Any, NamedTuple

from fsdpx.cuda.devices import cupy, current

__all__ = ["HANDLE_BYTES", "Slab", "export", "opened", "read", "write"]

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
TO_GPU, TO_HOST = 1, 2  # cudaMemcpyKind

_opened: dict[tuple[bytes, int], int] = {}


class Slab(NamedTuple):
    """Memory of a GPU that others may open by `handle`. address: where it lies for this process. memory: holds it."""

    handle: bytes
    address: int
    gpu: int
    memory: Any


def export(nbytes: int) -> Slab:
    """New memory on the current GPU. It is an allocation of its own: a handle of a block of CuPy's pool would be that
    of all that the pool has cut from one allocation. RuntimeError of CUDA where it does not share."""
    memory = cupy().cuda.Memory(nbytes)
    return Slab(bytes(cupy().cuda.runtime.ipcGetMemHandle(memory.ptr)), int(memory.ptr), current(), memory)


def opened(handle: bytes) -> int:
    """Where memory of another process lies for this one, on the current GPU. It stays open until the process ends:
    opening takes longer than most messages. RuntimeError of CUDA if it cannot be reached, or is this process's own."""
    key = handle, current()
    if key not in _opened:
        _opened[key] = int(cupy().cuda.runtime.ipcOpenMemHandle(handle, LAZY_PEER_ACCESS))
    return _opened[key]


def write(address: int, data: Any) -> None:
    """Bytes of the host to a GPU; they are there when this returns."""
    cupy().cuda.runtime.memcpy(address, data.ctypes.data, data.nbytes, TO_GPU)
    cupy().cuda.Device().synchronize()


def read(address: int, data: Any) -> None:
    """Bytes of a GPU to the host."""
    cupy().cuda.runtime.memcpy(data.ctypes.data, address, data.nbytes, TO_HOST)
