"""Arrays as PyTorch's tensors and back, without copies."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from fsdpx.core.array.namespace import dtype as dtype_of

__all__ = ["array_of", "tensor_of"]

BFLOAT16 = torch.bfloat16


def tensor_of(array: Any, device: str = "meta") -> torch.Tensor:
    """The tensor that shares the memory of a NumPy or CuPy array; zeros on `device` for a shape-only one."""
    if getattr(array, "holds_no_data", False):
        return torch.zeros(array.shape, dtype=_kind(array.dtype), device=device)
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if array.dtype.name == "bfloat16":
        return tensor_of(array.view(np.int16)).view(BFLOAT16)
    if not array.flags.writeable or min(array.strides, default=0) < 0:  # neither is known to PyTorch
        array = array.copy()
    return torch.from_numpy(array)


def array_of(xp: Any, tensor: torch.Tensor) -> Any:
    """The array of `xp` that shares the memory of a tensor."""
    tensor = tensor.detach()
    if getattr(xp, "holds_no_data", False):
        return xp.empty(tuple(tensor.shape), dtype=_dtype(tensor.dtype))
    if xp is not np:
        return xp.from_dlpack(tensor)
    if tensor.dtype == BFLOAT16:
        return tensor.view(torch.int16).numpy().view(dtype_of("bf16"))
    return tensor.resolve_conj().resolve_neg().numpy()


@functools.cache
def _kind(dtype: np.dtype) -> torch.dtype:
    return BFLOAT16 if dtype.name == "bfloat16" else torch.from_numpy(np.empty(0, dtype)).dtype


@functools.cache
def _dtype(kind: torch.dtype) -> np.dtype:
    return dtype_of("bf16") if kind == BFLOAT16 else torch.empty(0, dtype=kind).numpy().dtype
