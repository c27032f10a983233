"""The CUDA implementation of the core's `Device` interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from fsdpx.core.array.devices import Device, DeviceMap, get_device_of_array
from fsdpx.core.array.kernels import choice
from fsdpx.core.base.messages import format_ranks
from fsdpx.errors import DataError
from fsdpx.ext.gpu import gemm, kernels, streams, visible_devices
from fsdpx.ext.gpu.cupy_devices import get_current_gpu, get_gpu_number, import_cupy, list_gpu_pci_addresses

__all__ = ["CUDA"]


class CudaDevice(Device):
    """The device "cuda": NVIDIA GPUs, through CuPy. Each thread computes on the GPU that it has selected."""

    name, has_sum_kernels = "cuda", True

    @property
    def xp(self) -> Any:
        return import_cupy()

    def require_usable(self) -> None:
        list_gpu_pci_addresses()

    def require_valid_map(self, device_map: DeviceMap) -> None:
        """Accept any map because only the ranks on a host know its GPUs."""

    def select_for_rank(self, world: Any, device_map: DeviceMap) -> list[str]:
        shared = visible_devices.find_ranks_sharing_gpus(visible_devices.assign_and_select_gpus(world, device_map))
        return [f"{format_ranks(ranks)} share a GPU and take turns on it: start one rank per GPU" for ranks in shared]

    def as_array(self, value: Any) -> Any:
        return value

    def to_host(self, array: Any) -> np.ndarray:
        found: np.ndarray = array.get()
        return found

    def describe_location(self, array: Any) -> str:
        return f"on GPU {get_gpu_number(array)}"

    def require_arrays_on_one_device(self, arrays: Sequence[Any]) -> None:
        """Raise DataError unless all arrays are in host memory, from which they can be copied, or all are on this
        rank's GPU."""
        places = [get_device_of_array(array).describe_location(array) for array in arrays]
        own = f"on GPU {get_current_gpu()}"
        if len({*places}) > 1:
            raise DataError(f"the arrays of the batch are {', '.join(places)}: put all of them on the host, or {own}")
        if places[0] not in ("on the host", own):
            raise DataError(f"the batch is {places[0]}, but this rank computes {own}: put it there, or on the host")

    def use_device_of(self, array: Any) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = array.device
        return found

    def find_kernel(self, name: str, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        return None if choice.active_mode == "plain" else kernels.find_gpu_kernel(name, arguments)

    def try_multiply_matrices(self, a: Any, b: Any) -> Any | None:
        if gemm.can_cublas_multiply(a, b):
            out = import_cupy().empty((a.shape[0], b.shape[1]), dtype=a.dtype)
            gemm.run_gemm_into(out, a, b)
            return out
        if not (a.ndim == b.ndim == 3 and a.dtype == b.dtype and a.size and b.size):
            return None
        out = import_cupy().empty((b.shape[0], a.shape[1], b.shape[2]), dtype=a.dtype)
        gemm.run_batched_gemm_into(out, import_cupy().broadcast_to(a, (len(b), *a.shape[1:])), b)
        return out

    def try_multiply_matrices_into(self, out: Any, a: Any, b: Any, add: bool) -> bool:
        if able := gemm.can_cublas_multiply(a, b):
            gemm.run_gemm_into(out, a, b, add)
        return able

    def try_run_optimizer_kernel(self, name: str, arrays: tuple[Any, ...], numbers: tuple[Any, ...]) -> bool:
        return choice.active_mode != "plain" and kernels.try_run_optimizer_kernel(name, arrays, numbers)

    def synchronize(self) -> None:
        streams.synchronize()

    def make_copier(self, array: Any) -> streams.SideStream:
        return streams.get_copy_stream_after_current(array)

    def allocate_pinned(self, nbytes: int) -> np.ndarray:
        return streams.allocate_pinned(nbytes)


CUDA = CudaDevice()
