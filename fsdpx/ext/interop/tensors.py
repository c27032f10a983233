"""Zero-copy conversion between arrays and PyTorch tensors."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from fsdpx.core.array.namespace import parse_dtype

__all__ = ["to_array", "to_tensor"]

BFLOAT16 = torch.bfloat16


def to_tensor(array: Any, device: str = "meta") -> torch.Tensor:
    """Return a tensor that shares the memory of a NumPy or CuPy array, or a copy if PyTorch cannot share it.

    For a shape-only array, return a tensor of zeros on `device`."""
    if getattr(array, "holds_no_data", False):
        return torch.zeros(array.shape, dtype=_to_torch_dtype(array.dtype), device=device)
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if array.dtype.name == "bfloat16":
        return to_tensor(array.view(np.int16)).view(BFLOAT16)
    # PyTorch supports neither read-only arrays nor negative strides, so such arrays are copied
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    return torch.from_numpy(array)


def to_array(xp: Any, tensor: torch.Tensor) -> Any:
    """Return an array of `xp` that shares the memory of a tensor, or a shape-only array in a dry run."""
    tensor = tensor.detach()
    if getattr(xp, "holds_no_data", False):
        return xp.empty(tuple(tensor.shape), dtype=_to_numpy_dtype(tensor.dtype))
    if xp is not np:
        return xp.from_dlpack(tensor)
    if tensor.dtype == BFLOAT16:
        return tensor.view(torch.int16).numpy().view(parse_dtype("bf16"))
    return tensor.resolve_conj().resolve_neg().numpy()


@functools.cache
def _to_torch_dtype(dtype: np.dtype) -> torch.dtype:
    return BFLOAT16 if dtype.name == "bfloat16" else torch.from_numpy(np.empty(0, dtype)).dtype


@functools.cache
def _to_numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return parse_dtype("bf16") if dtype == BFLOAT16 else torch.empty(0, dtype=dtype).numpy().dtype
