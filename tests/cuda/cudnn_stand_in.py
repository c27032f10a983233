"""A stand-in for cuDNN's frontend: graphs of attention that read and write memory by address, sizes and strides, as
cuDNN does, computed on the host in float64. It takes the arguments of version 1.26 and refuses what cuDNN refuses."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import captures
import ml_dtypes
import numpy as np

__all__ = ["Cudnn"]

KINDS = {"BFLOAT16": ml_dtypes.bfloat16, "HALF": np.float16, "FLOAT": np.float32}


class cudnnGraphNotSupportedError(RuntimeError):  # noqa: N801
    pass


class Tensor:
    def __init__(self, dim: Any = (), stride: Any = (), data_type: str = "", uid: int = 0) -> None:
        self.dim, self.stride, self.data_type, self.uid, self.output = list(dim), list(stride), data_type, uid, False

    def set_output(self, output: bool) -> Tensor:
        self.output = output
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        assert type(dim) is list
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        assert type(stride) is list
        self.stride = stride
        return self

    def set_data_type(self, data_type: str) -> Tensor:
        self.data_type = data_type
        return self

    def set_uid(self, uid: int) -> Tensor:
        self.uid = uid
        return self

    def at(self, address: int) -> np.ndarray:
        """The memory, as NumPy sees it."""
        kind = np.dtype(KINDS[self.data_type])
        last = sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))
        memory = (ctypes.c_char * ((last + 1) * kind.itemsize)).from_address(address)
        return np.ndarray(self.dim, kind, memory, strides=[step * kind.itemsize for step in self.stride])


class Graph:
    """library: which it belongs to."""

    library: Any

    def __init__(
        self, io_data_type: str, intermediate_data_type: str, compute_data_type: str, handle: int | None = None,
        sm_version: int | None = None,
    ) -> None:  # fmt: skip
        assert intermediate_data_type == compute_data_type == "FLOAT"
        assert handle in self.library.handles, "graphs on a GPU belong to a handle"
        self.done: list[str] = []
        self.tensors: list[Tensor] = []

    def tensor(self, dim: list[int], stride: list[int], data_type: str, uid: int) -> Tensor:
        assert type(dim) is type(stride) is list
        self.tensors.append(Tensor(dim, stride, data_type, uid))
        return self.tensors[-1]

    def sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, attn_scale: float, generate_stats: bool,
        diagonal_band_left_bound: int | None = None, diagonal_band_right_bound: int | None = None,
    ) -> list[Tensor]:  # fmt: skip
        assert generate_stats
        self.mask = attn_scale, diagonal_band_left_bound, diagonal_band_right_bound
        return self._made(2)

    def sdpa_backward(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, dO: Tensor, stats: Tensor, attn_scale: float,
        use_deterministic_algorithm: bool, diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
    ) -> list[Tensor]:  # fmt: skip
        assert use_deterministic_algorithm
        self.mask = attn_scale, diagonal_band_left_bound, diagonal_band_right_bound
        return self._made(3)

    def _made(self, count: int) -> list[Tensor]:
        self.results = [Tensor() for _ in range(count)]
        self.tensors += self.results
        return self.results

    def _step(self, name: str) -> None:
        order = ["validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"]
        assert self.done == order[: len(self.done)]
        assert name == order[len(self.done)]
        self.done.append(name)

    def validate(self) -> None:
        self._step("validate")
        assert all(one.output and one.dim for one in self.results), "a result without sizes"
        assert len({one.uid for one in self.tensors}) == len(self.tensors), "two tensors of one number"
        q = self.tensors[0]
        if q.data_type not in ("HALF", "BFLOAT16") or q.dim[3] % 8 or q.dim[3] > 128:
            raise cudnnGraphNotSupportedError("16-bit formats and heads of 8 to 128 channels")
        for one in self.tensors:
            assert one.dim[3] == 1 or one.stride[3] == 1, "the last stride is 1"

    def build_operation_graph(self) -> None:
        self._step("build_operation_graph")

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A"]
        self._step("create_execution_plans")

    def check_support(self) -> None:
        self._step("check_support")
        if self.library.fails:
            raise RuntimeError(self.library.fails)
        if self.library.refuses:
            raise cudnnGraphNotSupportedError("No valid engine configs")

    def build_plans(self) -> None:
        self._step("build_plans")
        self.library.built += 1

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, addresses: dict[int, int], workspace: int, handle: int) -> None:
        assert self.done[-1] == "build_plans"
        assert workspace
        computing = sys.modules["cupy"].cuda.get_current_stream().ptr
        assert self.library.handles[handle] == computing, "not on the stream that computes"
        self.library.executed += 1
        assert addresses.keys() == {one.uid for one in self.tensors}
        assert all(address % 16 == 0 for address in addresses.values())
        if captures.capturing():
            captures.record(lambda: self._compute(addresses))
        else:
            self._compute(addresses)

    def _compute(self, addresses: dict[int, int]) -> None:
        arrays = [one.at(addresses[one.uid]) for one in sorted(self.tensors, key=lambda one: one.uid)]
        computed = (_forward if len(self.results) == 2 else _backward)(arrays, self.mask, self.library.off)
        for one, value in zip(self.results, computed, strict=True):
            one.at(addresses[one.uid])[...] = value


def _scores(q: np.ndarray, k: np.ndarray, mask: Any, off: int) -> np.ndarray:
    """off: by how many positions the left edge of a window is wrong."""
    scale, left, right = mask
    scores = np.einsum("bhtd,bhnd->bhtn", q, k) * scale
    row, column = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None]
    if right is not None:
        scores = np.where(column > row + right, -np.inf, scores)
    if left is not None:
        scores = np.where(column <= row - left - off, -np.inf, scores)
    return scores


def _wide(array: np.ndarray, heads: int) -> np.ndarray:
    return np.repeat(array.astype(np.float64), heads // array.shape[1], axis=1)


def _forward(arrays: list[np.ndarray], mask: Any, off: int) -> tuple[np.ndarray, ...]:
    q, k, v = (_wide(a, arrays[0].shape[1]) for a in arrays[:3])
    scores = _scores(q, k, mask, off)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    return p / total @ v, top + np.log(total)


def _backward(arrays: list[np.ndarray], mask: Any, off: int) -> tuple[np.ndarray, ...]:
    heads, groups = arrays[0].shape[1], arrays[1].shape[1]
    q, k, v, o, lse, do = (_wide(a, heads) for a in arrays[:6])
    p = np.exp(_scores(q, k, mask, off) - lse)
    ds = p * (do @ v.swapaxes(2, 3) - (do * o).sum(-1, keepdims=True)) * mask[0]
    dk, dv = ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do
    summed = (a.reshape(a.shape[0], groups, -1, *a.shape[2:]).sum(2) for a in (dk, dv))
    return (ds @ k, *summed)


class Cudnn(types.ModuleType):
    """The module. refuses: it has no plan for anything. fails: what it says instead of making one. off: see `_scores`.
    error: what it says when no library is found. built, executed: how many plans."""

    __version__ = "1.26.0"
    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError  # noqa: N815
    data_type = types.SimpleNamespace(**{name: name for name in KINDS})
    heur_mode = types.SimpleNamespace(A="A")

    def __init__(self, refuses: bool = False, fails: str = "", off: int = 0, error: str = "") -> None:
        super().__init__("cudnn")
        self.refuses, self.fails, self.off, self.error = refuses, fails, off, error
        self.built = self.executed = 0
        self.handles: dict[int, int | None] = {}
        self.pygraph = type("pygraph", (Graph,), {"library": self})

    def backend_version_string(self) -> str:
        if self.error:
            raise RuntimeError(self.error)
        return "9.19.0"

    def create_handle(self) -> int:
        self.handles[len(self.handles) + 1] = None
        return len(self.handles)

    def set_stream(self, handle: int, stream: int) -> None:
        assert handle in self.handles
        self.handles[handle] = stream
