"""The GPUs visible to this process: their number, the GPU that a rank uses, and the GPU that holds an array."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fsdpx.core.array.devices import DeviceMap
from fsdpx.core.base import environment
from fsdpx.errors import ConfigError, install_hint

__all__ = [
    "choose_gpu_number",
    "get_current_gpu",
    "get_gpu_number",
    "import_cupy",
    "is_on_gpu",
    "list_gpu_pci_addresses",
    "select_gpu",
    "using_gpu_of_array",
]


def import_cupy() -> Any:
    """Import and return CuPy. Raise ConfigError if it is not installed."""
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"device 'cuda' needs CuPy, as the driver supports: {install_hint('cuda12', 'cuda13')}"
        ) from error
    return cupy


def list_gpu_pci_addresses() -> tuple[str, ...]:
    """Return the PCI addresses of all GPUs visible to this process. An address identifies a GPU on its host. Raises
    ConfigError if no GPU is visible."""
    library = import_cupy()
    runtime = library.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except Exception as error:  # CuPy raises its own exception types for driver errors
        why = " ".join(str(error).split())
        raise ConfigError(
            f"device 'cuda' needs a GPU, and CuPy {library.__version__} finds none ({why}){_describe_visible_gpus()}: "
            "see what nvidia-smi lists, or use device='cpu'"
        ) from error
    if not count:
        raise ConfigError(
            f"device 'cuda' needs a GPU, and this process sees none{_describe_visible_gpus()}: use device='cpu'"
        )
    return tuple(str(runtime.deviceGetPCIBusId(number)) for number in range(count))


def choose_gpu_number(local_rank: int, count: int, device_map: DeviceMap = None) -> int:
    """Return the index, from 0 to `count` - 1, of the GPU for the rank with number `local_rank` on its host.

    The index is taken from `device_map` or, if that is None, assigned round-robin. Raises ConfigError if `device_map`
    contains a GPU that does not exist."""
    if device_map is None:
        return local_rank % count
    named = dict(device_map) if isinstance(device_map, Mapping) else dict(enumerate(device_map))
    if local_rank not in named:
        raise ConfigError(f"device_map={device_map!r} has no GPU for local rank {local_rank}: name one for each")
    device = named[local_rank]
    if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < count:
        raise ConfigError(
            f"device_map={device_map!r}: local rank {local_rank} sees GPUs 0 to {count - 1}{_describe_visible_gpus()}, "
            f"not {device!r}"
        )
    return device


def select_gpu(number: int) -> None:
    """Make this thread allocate and compute on the GPU with index `number` among the visible GPUs."""
    import_cupy().cuda.Device(number).use()


def get_current_gpu() -> int:
    """Return the index, among the visible GPUs, of the GPU that this thread uses."""
    return int(import_cupy().cuda.Device().id)


def is_on_gpu(array: Any) -> bool:
    """Return whether an array is a CuPy array."""
    return type(array).__module__.partition(".")[0] == "cupy"


def get_gpu_number(array: Any) -> int | None:
    """Return the index of the GPU that holds an array, or None if the array is in host memory."""
    return int(array.device.id) if is_on_gpu(array) else None


def using_gpu_of_array(array: Any) -> AbstractContextManager[Any]:
    """Return a context in which this thread computes on the GPU that holds `array`. The context has no effect if
    `array` is in host memory.

    New threads need this context because they compute on GPU 0 by default."""
    return array.device if is_on_gpu(array) else nullcontext()


def _describe_visible_gpus() -> str:
    """If the environment restricts this process to certain GPUs, return a description of them. Otherwise, return "".
    """
    mask = environment.get_visible_gpus()
    return "" if mask is None else f", with CUDA_VISIBLE_DEVICES={mask}"
