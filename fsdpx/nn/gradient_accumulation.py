"""Gradient accumulation: gradient arrays that are zeroed only when needed, and matrix products and sums that add to
them.

Products and sums of 16-bit arrays accumulate in float32. Matrix products in float32 and float64 call BLAS directly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fsdpx.core.array import blas, kernels
from fsdpx.core.array.devices import get_device_of_array
from fsdpx.core.array.shapes.array import call_without_metering_temporaries
from fsdpx.core.array.shapes.flop_counter import counting_as_one_matmul

__all__ = [
    "BLANK", "WRITTEN", "GradientEntries", "GradientEntry", "Gradients", "accumulation_dtype", "add_linear_gradients",
    "add_matmul_gradient", "add_sum_over_dims_into", "as_indices", "as_rows", "cast_input_to_dtype_of_readers",
    "choose_float_dtype", "get_gradient_and_whether_to_add", "has_integer_dtype", "linear_backward", "linear_forward",
    "matmul_in_dtype_of_first",
]  # fmt: skip

Array = Any

WRITTEN, BLANK = 0, 1


class GradientEntry:
    """The gradient array of one parameter, with a flag that says whether the array has been written since the last
    reset. Until the array has been written (`is_blank`), its content is undefined.

    The flag is one byte, `flags[at]`. The flags of all gradients in a buffer are contiguous, so that they can be
    checked and changed together."""

    __slots__ = ("array", "at", "flags")

    def __init__(self, array: Array, flags: bytearray, at: int) -> None:
        self.array, self.flags, self.at = array, flags, at

    @property
    def is_blank(self) -> bool:
        return self.flags[self.at] == BLANK

    def get_array_to_add_to(self) -> Array:
        """Return the gradient array, so that the caller can add to it in place. The array is zeroed first if nothing
        has been written to it since the last reset."""
        if self.flags[self.at] == BLANK:
            self.array[...] = 0
            self.flags[self.at] = WRITTEN
        return self.array


class GradientEntries(dict[str, GradientEntry]):
    """Mapping from parameter name to gradient, in the order of the flat buffer that contains all these gradients."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.flags = bytearray(len(arrays))
        super().__init__({name: GradientEntry(array, self.flags, i) for i, (name, array) in enumerate(arrays.items())})

    def mark_all_blank(self) -> None:
        """Mark all gradients as not yet written, so that the next value added to a gradient is added to zero."""
        self.flags[:] = bytes((BLANK,)) * len(self)

    def zero_unwritten(self) -> Sequence[str]:
        """Zero the gradients that no layer has written since the last reset, and return their names."""
        if BLANK not in self.flags:
            return ()
        blank = [name for name, entry in self.items() if entry.is_blank]
        for name in blank:
            self[name].get_array_to_add_to()
        return blank


class Gradients(Mapping[str, Array]):
    """Gradients by parameter name. Layers can add to a gradient with `g["weight"] += d`. The function
    `get_gradient_and_whether_to_add` is faster, because a layer can then overwrite an unwritten gradient instead of
    adding to zeros.

    Tied parameters share one `GradientEntry` under several names."""

    __slots__ = ("_branches", "entries")

    def __init__(self, entries: Mapping[str, GradientEntry]) -> None:
        self.entries = entries
        self._branches: tuple[Mapping[str, str], dict[str, Gradients]] | None = None

    def __getitem__(self, name: str) -> Array:
        return self.entries[name].get_array_to_add_to()

    def __setitem__(self, name: str, array: Array) -> None:
        """Complete `g[name] += d`. Python adds `d` to the gradient in place, and then calls this method with the
        gradient itself as `array`, so nothing remains to be done. Any other array is copied into the gradient."""
        entry = self.entries[name]
        if array is not entry.array:
            entry.array[...] = array
            entry.flags[entry.at] = WRITTEN

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def group_arrays_by_child(self, aliases: Mapping[str, str]) -> dict[str, Gradients]:
        """Group the gradients by child layer (the first part of their dotted names), like
        `fsdpx.nn.layer.group_arrays_by_child`. The result is cached.

        `aliases` maps the aliases of tied parameters to their canonical names."""
        if self._branches is None or self._branches[0] is not aliases:
            self._branches = (aliases, self._group_entries_by_layer(aliases))
        return self._branches[1]

    def _group_entries_by_layer(self, aliases: Mapping[str, str]) -> dict[str, Gradients]:
        known = {alias: self.entries[name] for alias, name in aliases.items() if name in self.entries}
        grouped: dict[str, dict[str, GradientEntry]] = {}
        for name, entry in {**self.entries, **known}.items():
            head, _, rest = name.partition(".")
            grouped.setdefault(head, {})[rest] = entry
        return {head: Gradients(entries) for head, entries in grouped.items()}


def get_gradient_and_whether_to_add(g: Mapping[str, Array], name: str) -> tuple[Array, bool] | None:
    """Return the gradient array of a parameter, and a bool: True if the caller must add to the array, False if the
    caller must overwrite it. Return None if the parameter is frozen.

    The gradient is marked as written, so the caller must write every element."""
    if type(g) is not Gradients:
        return (g[name], True) if name in g else None
    entry = g.entries.get(name)
    if entry is None:
        return None
    add, entry.flags[entry.at] = not entry.is_blank, WRITTEN
    return entry.array, add


def accumulation_dtype(dtype: Any) -> np.dtype:
    """Return the dtype in which to sum values of `dtype`: float32 for 16-bit floats, else `dtype` itself."""
    return np.dtype(np.float32) if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)


def has_integer_dtype(x: Any) -> bool:
    """Return whether an array has an integer or boolean dtype, and therefore no gradient."""
    return np.dtype(x.dtype).kind in "iub"


def as_indices(x: Any) -> Any:
    """Return an integer or boolean array as int32 or int64, the index dtypes that kernels accept."""
    return x if np.dtype(x.dtype) in (np.int32, np.int64) else x.astype(np.int64)


def cast_input_to_dtype_of_readers(array: Any, takes: str, dtype: Any) -> Any:
    """Return a model input in the dtype that its readers (the layers that take this input) expect.

    `takes` is a value of `Layer.takes` other than "passed". Only integer and boolean inputs are cast. `dtype` is the
    dtype in which the model computes. For "numbers", the array is cast to `dtype`. For "exact", it is cast to float32
    if `dtype` has 16 bits, else to `dtype`."""
    if not has_integer_dtype(array) or takes == "given":
        return array
    return as_indices(array) if takes == "indices" else array.astype(choose_float_dtype(takes, dtype))


def choose_float_dtype(takes: str, dtype: Any) -> np.dtype:
    """Return the float dtype to which an input is cast if the layers that read it declare the value `takes` (see
    `Layer.takes`). `dtype` is the dtype in which the model computes."""
    return accumulation_dtype(dtype) if takes == "exact" else np.dtype(dtype)


def as_rows(x: Any) -> Any:
    """Reshape an array `(..., n)` to a matrix `(rows, n)`, so that a matrix product needs one BLAS call instead of one
    per sample."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def matmul_in_dtype_of_first(xp: Any, a: Any, b: Any) -> Any:
    """Return `a @ b` in the dtype of `a`."""
    if _can_use_blas(xp, a, b) and a.ndim == b.ndim == 2:
        out = np.empty((a.shape[0], b.shape[1]), a.dtype)
        blas.gemm(out, a, b)
        return out
    if _can_use_half_blas(xp, a, b) and a.ndim == b.ndim == 2:
        out = np.empty((a.shape[0], b.shape[1]), a.dtype)
        blas.load_half_matmul().multiply_half_into(out, a, b)
        return out
    return batched_matmul_keeping_dtype(xp, a, b)


def batched_matmul_keeping_dtype(xp: Any, a: Any, b: Any) -> Any:
    """Return `a @ b` for stacks of matrices, in the dtype of `a`. Products of 16-bit arrays accumulate in float32."""
    if (found := get_device_of_array(a).try_multiply_matrices(a, b)) is not None:
        return found
    if np.dtype(a.dtype).itemsize != 2:
        return xp.matmul(a, b)
    with counting_as_one_matmul(a, b):
        return xp.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)


def linear_forward(xp: Any, x: Any, weight: Any, bias: Any | None) -> Any:
    """Return `x @ weight.T + bias` for x `(rows, n)`, in the dtype of `x`."""
    dtype = x.dtype
    if xp is np and dtype is weight.dtype and dtype.char in "fd":
        out = np.empty((x.shape[0], weight.shape[0]), dtype)
        blas.linear_forward(out, x, weight, bias)
        return out
    if _can_use_half_blas(xp, x, weight):
        out = np.empty((x.shape[0], weight.shape[0]), dtype)
        blas.load_half_matmul().multiply_half_into(out, x, weight.T, bias=bias)
        return out
    y = matmul_in_dtype_of_first(xp, x, weight.T)
    if bias is not None and get_device_of_array(y).has_sum_kernels:
        kernels.add_bias(xp, y, bias)
    elif bias is not None:
        y += bias
    return y


def add_linear_gradients(xp: Any, g: Mapping[str, Any], dy: Any, x: Any) -> None:
    """Add the parameter gradients of `linear_forward`: `dy.T @ x` to `g["weight"]`, and the column sums of dy to
    `g["bias"]`, for dy `(rows, m)` and x `(rows, n)`."""
    if _can_use_blas(xp, dy, x):
        blas.linear_backward_params(
            get_gradient_and_whether_to_add(g, "weight"), get_gradient_and_whether_to_add(g, "bias"), dy, x
        )
        return
    add_matmul_gradient(xp, g, "weight", dy.T, x)
    if (_can_use_half_blas(xp, dy, x) or get_device_of_array(dy).has_sum_kernels) and (
        into := get_gradient_and_whether_to_add(g, "bias")
    ):
        kernels.sum_rows(xp, dy, *into)
    elif "bias" in g:
        add_sum_over_dims_into(xp, g["bias"], dy, 0)


def linear_backward(xp: Any, g: Mapping[str, Any], weight: Any, dy: Any, x: Any) -> Any:
    """Return the gradient of the input x of `linear_forward`, and add the gradients of its weight and bias to `g`."""
    dtype = dy.dtype
    if xp is np and dtype is x.dtype and dtype.char in "fd":
        dx = np.empty(x.shape, dtype)
        blas.linear_backward(
            dx, get_gradient_and_whether_to_add(g, "weight"), get_gradient_and_whether_to_add(g, "bias"), dy, x, weight
        )
        return dx
    add_linear_gradients(xp, g, dy, x)
    return matmul_in_dtype_of_first(xp, dy, weight)


def add_matmul_gradient(xp: Any, g: Mapping[str, Any], name: str, a: Any, b: Any) -> None:
    """Add the matrix product `a @ b` to the gradient `name`, unless the parameter is frozen. Products of 16-bit arrays
    are accumulated in float32, and the result is rounded only once."""
    into = get_gradient_and_whether_to_add(g, name)
    if into is None:
        return
    out, add = into
    out = out if out.ndim == 2 else out.reshape(a.shape[0], b.shape[1])
    if _can_use_blas(xp, a, b):
        blas.gemm(out, a, b, add)
    elif _can_use_half_blas(xp, a, b):
        blas.load_half_matmul().multiply_half_into(out, a, b, add)
    elif not get_device_of_array(a).try_multiply_matrices_into(out, a, b, add):
        with counting_as_one_matmul(a, b):
            call_without_metering_temporaries(_matmul_into, xp, out, add, a, b)


def _matmul_into(xp: Any, out: Any, add: bool, a: Any, b: Any) -> None:
    dtype = accumulation_dtype(a.dtype)
    total = xp.matmul(a.astype(dtype, copy=False), b.astype(dtype, copy=False))
    if add:
        out += total
    else:
        out[...] = total


def add_sum_over_dims_into(xp: Any, out: Any, a: Any, dim: int | tuple[int, ...]) -> None:
    """Add `a.sum(dim)` to `out` in place. Sums of 16-bit arrays are accumulated in float32, and rounded to the dtype of
    `out` only once."""
    if (
        a.ndim > 2 and dim == (0, *range(2, a.ndim)) and get_device_of_array(a).has_sum_kernels
    ):  # if the device has a kernel for sums, one kernel call is faster than several array operations
        out += kernels.channel_sums(xp, a)
        return
    out += xp.sum(a, axis=dim, dtype=accumulation_dtype(a.dtype))


def _can_use_blas(xp: Any, a: Any, b: Any) -> bool:
    return xp is np and a.dtype is b.dtype and a.dtype.char in "fd"


def _can_use_half_blas(xp: Any, a: Any, b: Any) -> bool:
    return xp is np and a.dtype.itemsize == 2 and a.dtype == b.dtype
