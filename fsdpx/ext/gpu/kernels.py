"""CUDA kernels for CuPy arrays, compiled from `kernels.cu` and `attention.cu`.

They implement those kernels of `fsdpx.core.array.kernels` and `fsdpx.optim` that would take several passes over memory
if they were written as array operations. `find_gpu_kernel` selects the kernel for a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fsdpx.core.array.kernels.dropout import dropout_scale
from fsdpx.core.array.kernels.head_layout import empty_attention_gradients, empty_time_first
from fsdpx.ext.gpu.capture import get_active_capture
from fsdpx.ext.gpu.cupy_devices import import_cupy, is_on_gpu
from fsdpx.ext.gpu.gemm import run_batched_gemm_into, run_gemm_into

__all__ = ["GPU_KERNELS", "UPDATES", "find_gpu_kernel", "load_kernel_module", "try_run_optimizer_kernel"]

THREADS_PER_BLOCK = 256
MAX_BLOCKS = 1 << 16
"""Maximum number of blocks in an elementwise kernel. If there are more elements than threads, each thread processes
several."""
MAX_PARTS, MIN_PART_ROWS = 128, 64
"""Maximum number of parts when a sum over rows is split, and minimum number of rows in each part."""
BLOCK = 1 << 14
"""Number of elements in each partial sum of squares."""
SUM_LANES = 64
"""Number of threads that sum a block of `BLOCK` elements. The host sums in the same number of lanes, so results on GPU
and host are bit-identical."""
PART_ELEMENTS = 1 << 13
"""Minimum number of elements of a channel that one block sums."""
PACK_BYTES = 16
"""Number of bytes in a pack. Some kernels read or write one pack at a time."""
OPTIONS = ("--fmad=false", "--std=c++17")
"""Compiler options. Without fused multiply-adds, updates are bit-identical to updates on the host. For bfloat16, the
first option is omitted because no update is computed in bfloat16."""

Body = Callable[..., Any]


@functools.cache
def load_kernel_module(bits: int, gpu: int) -> Any:
    """Return the compiled module of kernels for `bits`-bit numbers (64, 32 or 16) on the current GPU. CuPy caches the
    module on disk."""
    return _build_module("kernels.cu", *OPTIONS[bits == 16 :], f"-DKIND={bits}")


@functools.cache
def load_attention_module(features: int, gpu: int) -> Any:
    """Return the compiled module of bfloat16 attention for heads with `features` features on the current GPU."""
    return _build_module("attention.cu", "--std=c++17", "--use_fast_math", f"-DHEAD={features}")


def _build_module(source: str, *options: str) -> Any:
    return import_cupy().RawModule(code=Path(__file__).with_name(source).read_text(), options=options)


class KernelLauncher:
    """Launches kernels for one number format. `wide` is the dtype of sums, and `pack` is the number of elements that a
    thread loads at once."""

    def __init__(self, kind: int) -> None:
        self.kind, self.xp = kind, import_cupy()
        self.wide = np.dtype(np.float64 if kind == 64 else np.float32)
        self.pack = PACK_BYTES * 8 // kind

    def __call__(self, name: str, grid: tuple[int, ...], *given: Any, threads: int = THREADS_PER_BLOCK) -> None:
        kernel = _load_kernel_function(load_kernel_module, self.kind, self.xp.cuda.Device().id, name)
        kernel(grid, (threads,), tuple(map(_convert_kernel_argument, given)))

    def launch_elements(self, name: str, n: int, *given: Any) -> None:
        """Launch a kernel that processes n elements, where each thread processes one element at a time."""
        self(name, (min(-(-n // THREADS_PER_BLOCK), MAX_BLOCKS),), *given)

    def launch_packs(self, name: str, n: int, *given: Any) -> None:
        """Launch a kernel that processes n elements. Each thread processes one pack (the elements that it loads at
        once) at a time."""
        self.launch_elements(name, -(-n // self.pack), *given)

    def launch_rows(self, name: str, rows: int, n: int, *given: Any) -> None:
        """Launch a kernel with one block per row of n elements, and one thread per pack (the elements that a thread
        loads at once) in the row."""
        self(name, (rows,), *given, threads=min(-(-n // (32 * self.pack)) * 32, THREADS_PER_BLOCK))

    def compute_partial_sums(self, name: str, rows: int, n: int, arrays: int, *given: Any) -> list[Any]:
        """Launch a kernel that computes partial sums over `rows` rows. Return its results, which are `arrays` arrays of
        shape (parts, n).

        In the kernel's signature, the result arrays lie between other arguments. `given` contains the arguments before
        the result arrays, followed by one tuple with the arguments after the result arrays."""
        count = max(min(rows // MIN_PART_ROWS, MAX_PARTS), 1)
        some = -(-rows // count)
        count = -(-rows // some)
        made = [self.xp.empty((count, n), dtype=self.wide) for _ in range(arrays)]
        self(name, (-(-n // THREADS_PER_BLOCK), count), *given[:-1], *made, rows, n, some, *given[-1])
        return made

    def sum_parts_into(self, parts: Any, out: Any, add: bool) -> None:
        """Sum `parts` over dim 0. Write the result to `out`, or add it to `out` if `add`."""
        name = "add_parts_wide" if out.dtype == self.wide else "add_parts"
        self.launch_elements(name, out.size, parts, out, parts.shape[0], out.size, add)


@functools.cache
def _load_kernel_function(source: Callable[[int, int], Any], variant: int, gpu: int, name: str) -> Any:
    return source(variant, gpu).get_function(f"fsdpx_{name}")


def _convert_kernel_argument(value: Any) -> Any:
    """Convert a Python number to the type that the kernels declare: bool to `int`, int to `number`, float to `double`.

    None becomes a null pointer, and arrays are returned unchanged."""
    kind: Any = type(value)
    return _convert_number(kind, value) if kind in SCALAR_CONVERSIONS else value


SCALAR_CONVERSIONS: dict[Any, Callable[[Any], Any]] = {
    type(None): lambda _: np.uint64(0), bool: np.int32, int: np.int64, float: np.float64,
}  # fmt: skip


@functools.lru_cache(1 << 12)
def _convert_number(kind: Any, value: Any) -> Any:
    return SCALAR_CONVERSIONS[kind](value)


@functools.cache
def get_kernel_bits(dtype: Any) -> int:
    """Return the number of bits of a dtype, 16, 32 or 64, which identifies its kernels. Return 0 if no kernel supports
    the dtype."""
    return {"float64": 64, "float32": 32, "bfloat16": 16}.get(np.dtype(dtype).name, 0)


GPU_KERNELS: dict[str, tuple[tuple[str, ...], Body]] = {}


def register_gpu_kernel(roles: str) -> Callable[[Body], Body]:
    """Return a decorator that registers a function as the GPU implementation of the kernel of the same name.

    `roles` specifies what the kernel accepts, with one word for each positional argument. For contiguous arrays, the
    words are `real` (the launcher's format), `wide` (the dtype of sums), `sum` (`real` or `wide`), `double` (float64),
    `index` (integers) and `mask` (bools). `view` is like `real`, but with any strides. `any` stands for an argument
    that is not an array, and `0` for one that must be 0 or None. A `?` after a word allows None."""

    def register(body: Body) -> Body:
        GPU_KERNELS[body.__name__] = (tuple(roles.split()), body)
        return body

    return register


def find_gpu_kernel(name: str, arguments: tuple[Any, ...]) -> Body | None:
    """Return the GPU implementation of the kernel `name` for these arguments, or None if there is none.

    The implementation is called with the array module, followed by the arguments. There is no implementation if the
    dtype of an array has no kernels, or if an array is empty or not contiguous."""
    return _find_kernel_for_dtypes(name, tuple(map(_describe_argument, arguments))) if name in GPU_KERNELS else None


Sign = tuple[np.dtype[Any], bool, bool] | Literal["", "0", "None"]
"""Properties of an argument that determine the choice of a kernel. For an array, these are its dtype, whether it is
contiguous, and whether it is empty. For any other argument, they state whether it is None or the number 0."""


def _describe_argument(value: Any) -> Sign:
    if is_on_gpu(value):
        return value.dtype, bool(value.flags.c_contiguous), not value.size
    return "None" if value is None else "0" if isinstance(value, (bool, int, float)) and not value else ""


@functools.lru_cache(1 << 12)  # cached because every step repeats the same lookups while the GPU waits
def _find_kernel_for_dtypes(name: str, signs: tuple[Sign, ...]) -> Body | None:
    roles, body = GPU_KERNELS[name]
    arrays = [sign for sign in signs if not isinstance(sign, str)]
    # bit width of the narrowest floating-point dtype of the arrays, or 0 if one of the dtypes has no kernels
    kind = min((get_kernel_bits(dtype) for dtype, _, _ in arrays if dtype.kind not in "biu"), default=0)
    wide = 64 if kind == 64 else 32
    if kind == 0 or any(empty for _, _, empty in arrays):
        return None
    if not all(_argument_fits_role(role, sign, kind, wide) for role, sign in zip(roles, signs, strict=False)):
        return None
    launch = KernelLauncher(kind)
    return lambda xp, *given, **options: body(launch, *given, **options)


def _argument_fits_role(role: str, sign: Sign, kind: int, wide: int) -> bool:
    if role == "0":
        return sign in ("0", "None")
    if sign == "None":
        return role.endswith("?")
    role = role.removesuffix("?")
    if isinstance(sign, str):
        return role == "any"
    dtype, contiguous, _ = sign
    if role in ("mask", "index"):
        formed = dtype.kind == ("b" if role == "mask" else "i")
    else:
        formed = get_kernel_bits(dtype) in {"any": (), "double": (64,), "wide": (wide,), "sum": (wide, kind)}.get(
            role, (kind,)
        )
    return formed and (role == "view" or contiguous)


@register_gpu_kernel("real real? real? any")
def layer_norm(launch: KernelLauncher, x: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    (rows, n), xp = x.shape, launch.xp
    y, mean, rstd = xp.empty_like(x), xp.empty(rows, dtype=launch.wide), xp.empty(rows, dtype=launch.wide)
    launch.launch_rows("norm", rows, n, x, weight, bias, y, mean, rstd, n, float(eps), True)
    return y, mean, rstd


@register_gpu_kernel("real real? wide wide real")
def layer_norm_backward_input(launch: KernelLauncher, x: Any, weight: Any, mean: Any, rstd: Any, dy: Any) -> Any:
    dx = launch.xp.empty_like(x)
    launch.launch_rows("norm_backward", *x.shape, x, weight, mean, rstd, dy, dx, x.shape[1], True)
    return dx


@register_gpu_kernel("real wide wide real sum? sum?")
def layer_norm_backward_params(launch: KernelLauncher, x: Any, mean: Any, rstd: Any, dy: Any, gw: Any, gb: Any) -> None:
    made = launch.compute_partial_sums("norm_columns", *x.shape, 2, x, mean, rstd, dy, (True,))
    for parts, out in zip(made, (gw, gb), strict=True):
        if out is not None:
            launch.sum_parts_into(parts, out, True)


@register_gpu_kernel("real real? any")
def rms_norm(launch: KernelLauncher, x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    (rows, n), xp = x.shape, launch.xp
    y, rstd = xp.empty_like(x), xp.empty(rows, dtype=launch.wide)
    launch.launch_rows("norm", rows, n, x, weight, None, y, None, rstd, n, float(eps), False)
    return y, rstd


@register_gpu_kernel("real real? wide real")
def rms_norm_backward_input(launch: KernelLauncher, x: Any, weight: Any, rstd: Any, dy: Any) -> Any:
    dx = launch.xp.empty_like(x)
    launch.launch_rows("norm_backward", *x.shape, x, weight, None, rstd, dy, dx, x.shape[1], False)
    return dx


@register_gpu_kernel("real wide real sum")
def rms_norm_backward_params(launch: KernelLauncher, x: Any, rstd: Any, dy: Any, gw: Any) -> None:
    launch.sum_parts_into(
        launch.compute_partial_sums("norm_columns", *x.shape, 2, x, None, rstd, dy, (False,))[0], gw, True
    )


@register_gpu_kernel("real any")
def gelu(launch: KernelLauncher, x: Any, approximate: str = "none") -> Any:
    y = launch.xp.empty_like(x)
    launch.launch_packs("gelu", x.size, x, y, x.size, approximate == "tanh")
    return y


@register_gpu_kernel("real real any")
def gelu_backward(launch: KernelLauncher, x: Any, dy: Any, approximate: str = "none") -> Any:
    dx = launch.xp.empty_like(x)
    launch.launch_packs("gelu_backward", x.size, x, dy, dx, x.size, approximate == "tanh")
    return dx


@register_gpu_kernel("real real any")
def recompute_gelu_and_backward(launch: KernelLauncher, x: Any, dy: Any, approximate: str = "none") -> Any:
    y = launch.xp.empty_like(x)
    launch.launch_packs("recompute_gelu_and_backward", x.size, x, dy, y, x.size, approximate == "tanh")
    return y


@register_gpu_kernel("real real? any")
def bias_gelu(launch: KernelLauncher, h: Any, bias: Any, approximate: str = "none") -> Any:
    y = launch.xp.empty_like(h)
    launch.launch_packs("bias_gelu", h.size, h, bias, y, h.size, h.shape[-1], approximate == "tanh")
    return y


@register_gpu_kernel("real")
def relu(launch: KernelLauncher, x: Any) -> Any:
    y = launch.xp.empty_like(x)
    launch.launch_packs("relu", x.size, x, y, x.size)
    return y


@register_gpu_kernel("real real")
def relu_backward(launch: KernelLauncher, y: Any, dy: Any) -> Any:
    dx = launch.xp.empty_like(dy)
    launch.launch_packs("relu_backward", dy.size, y, dy, dx, dy.size)
    return dx


@register_gpu_kernel("real real")
def add(launch: KernelLauncher, a: Any, b: Any) -> Any:
    y = launch.xp.empty_like(a)
    launch.launch_packs("add", a.size, a, b, y, a.size)
    return y


@register_gpu_kernel("real real")
def add_bias(launch: KernelLauncher, y: Any, bias: Any) -> None:
    launch.launch_packs("add_bias", y.size, y, bias, y.size, bias.size)


@register_gpu_kernel("real sum any")
def sum_rows(launch: KernelLauncher, rows: Any, out: Any, accumulate: bool = True) -> None:
    launch.sum_parts_into(
        launch.compute_partial_sums("columns", rows.shape[0], out.size, 1, rows, ())[0], out, bool(accumulate)
    )


@register_gpu_kernel("sum index real")
def embedding_backward(launch: KernelLauncher, gw: Any, index: Any, dy: Any) -> None:
    order = launch.xp.argsort(index, kind="stable").astype(np.int64, copy=False)
    rows = index[order].astype(np.int64, copy=False)
    count, n = dy.shape
    name = "embedding_wide" if gw.dtype == launch.wide else "embedding"
    launch(name, (count, -(-n // THREADS_PER_BLOCK)), order, rows, dy, gw, count, n)


@register_gpu_kernel("real")
def softmax(launch: KernelLauncher, x: Any) -> Any:
    y = launch.xp.empty_like(x)
    launch("softmax", (x.size // x.shape[-1],), x, y, x.shape[-1])
    return y


@register_gpu_kernel("real real")
def softmax_backward(launch: KernelLauncher, y: Any, dy: Any) -> Any:
    dx = launch.xp.empty_like(y)
    launch("softmax_backward", (y.size // y.shape[-1],), y, dy, dx, y.shape[-1])
    return dx


@register_gpu_kernel("real index any any")
def cross_entropy(
    launch: KernelLauncher, logits: Any, target: Any, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[float, float, Any]:
    (rows, n), xp = logits.shape, launch.xp
    wanted = target.astype(np.int64, copy=False)
    lse, each = xp.empty(rows, dtype=launch.wide), xp.empty(rows, dtype=np.float64)
    launch.launch_rows(
        "cross_entropy", rows, n, logits, wanted, lse, each, n, int(ignore_index), float(label_smoothing)
    )
    return float(each.sum()), float((wanted != ignore_index).sum()), lse


@register_gpu_kernel("real index wide any any any")
def cross_entropy_backward(
    launch: KernelLauncher, logits: Any, target: Any, lse: Any, seed: float, ignore_index: int = -100,
    label_smoothing: float = 0.0, classes: int = 0,
) -> Any:  # fmt: skip
    dx, wanted = launch.xp.empty_like(logits), target.astype(np.int64, copy=False)
    share = label_smoothing / max(classes, logits.shape[1])
    numbers = logits.shape[1], float(seed), int(ignore_index), 1 - float(label_smoothing), share
    launch.launch_rows("cross_entropy_backward", *logits.shape, logits, wanted, lse, dx, *numbers)
    return dx


WARPS, OWN, SUMS, MAX_HEAD_FEATURES, AMPERE = 4, 64, 8, 128, 80
"""Properties of `attention.cu`: number of warps per block, rows that a block owns, sums that a block computes, maximum
number of features per head, and the lowest compute capability that supports bfloat16 matrix products."""


@register_gpu_kernel("view view view any any any index?")
def attention(
    launch: KernelLauncher, q: Any, k: Any, v: Any, causal: bool, scale: float, window: int = 0, segments: Any = None
) -> tuple[Any, Any]:
    o, lse = empty_time_first(launch.xp, q), launch.xp.empty(q.shape[:3], dtype=launch.wide)
    given = causal, scale, window, _as_int64_segments(segments)
    if scale > 0 and _can_use_attention_kernel(launch, q, k, v, o):
        _launch_attention(
            "flash", -(-q.shape[2] // OWN) * lse.shape[0] * lse.shape[1], (q, k, v, o), (lse,), q, k, *given
        )
    else:
        _attention_of_each_sample_into(launch, q, k, v, o, lse, *given)
    return o, lse


@register_gpu_kernel("view view view view wide view any any any index?")
def attention_backward(
    launch: KernelLauncher, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, causal: bool, scale: float,
    window: int = 0, segments: Any = None,
) -> Any:  # fmt: skip
    made = empty_attention_gradients(launch.xp, q, k)
    given = causal, scale, window, _as_int64_segments(segments)
    if scale <= 0 or not _can_use_attention_kernel(launch, q, k, v, o, do, *made):
        _attention_backward_of_each_sample_into(launch, q, k, v, o, lse, do, made, *given)
        return made
    sums, (dq, dk, dv) = launch.xp.empty_like(lse), made
    (samples, heads, t, d), (_, shared, n, _) = q.shape, k.shape
    _launch_attention_kernel(
        "flash_sums", d, -(-lse.size // SUMS), *_iterate_addresses_and_strides(o, do), sums, heads, t, lse.size
    )
    _launch_attention("flash_queries", -(-t // OWN) * samples * heads, (q, k, v, do, dq), (lse, sums), q, k, *given)
    _launch_attention("flash_keys", -(-n // OWN) * samples * shared, (q, k, v, do, dk, dv), (lse, sums), q, k, *given)
    return made


def _can_use_attention_kernel(launch: KernelLauncher, *matrices: Any) -> bool:
    """Return whether `attention.cu` supports these arrays (B, H, T, D).

    The arrays must be bfloat16, their rows must consist of whole 16-byte packs, and their GPU must have matrix
    instructions for bfloat16."""
    if launch.kind != 16 or int(launch.xp.cuda.Device().compute_capability) < AMPERE:
        return False
    d = matrices[0].shape[3]
    packed = all(x.strides[3] == 2 and not any(n % 16 for n in (*x.strides[:3], x.data.ptr)) for x in matrices)
    return packed and d % 16 == 0 and d <= MAX_HEAD_FEATURES


def _launch_attention(
    name: str, blocks: int, matrices: tuple[Any, ...], rows: tuple[Any, ...], q: Any, k: Any, causal: bool,
    scale: float, window: int, segments: Any,
) -> None:  # fmt: skip
    (_, heads, t, d), (_, shared, n, _) = q.shape, k.shape
    mask = np.float32(scale), bool(causal), int(window), segments
    _launch_attention_kernel(
        name, d, blocks, *_iterate_addresses_and_strides(*matrices), *rows, heads, shared, t, n, *mask
    )


def _launch_attention_kernel(name: str, features: int, blocks: int, *given: Any) -> None:
    kernel = _load_kernel_function(load_attention_module, features, import_cupy().cuda.Device().id, name)
    kernel((blocks,), (32 * WARPS,), tuple(map(_convert_kernel_argument, given)))


def _iterate_addresses_and_strides(*matrices: Any) -> Iterator[Any]:
    """Yield the address of each array (B, H, T, D), and its strides between samples, heads and rows, in elements."""
    for x in matrices:
        yield np.uint64(x.data.ptr)
        yield from (stride // 2 for stride in x.strides[:3])


def _attention_of_each_sample_into(
    launch: KernelLauncher,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    causal: bool,
    scale: float,
    window: int,
    segments: Any,
) -> None:
    """Compute attention with cuBLAS, one sample at a time, so that memory holds the scores of only one sample.
    """
    xp, (b, h, t, _), (_, shared, n, _) = launch.xp, q.shape, k.shape
    scores, p = xp.empty((h, t, n), dtype=launch.wide), xp.empty((h, t, n), dtype=q.dtype)
    turns = _slice_heads_with_distinct_key_heads(h, shared)
    for i in range(b):
        for heads in turns:
            run_batched_gemm_into(scores[heads], q[i, heads], k[i].swapaxes(1, 2), scale)
        named = None if segments is None else segments[i]
        launch("attention_rows", (h * t,), scores, p, lse[i], named, t, n, bool(causal), int(window))
        for heads in turns:
            run_batched_gemm_into(o[i, heads], p[heads], v[i])


def _attention_backward_of_each_sample_into(
    launch: KernelLauncher, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, gradients: Any, causal: bool,
    scale: float, window: int, segments: Any,
) -> None:  # fmt: skip
    xp, (b, h, t, _), (_, shared, n, d) = launch.xp, q.shape, k.shape
    scores, dp = (xp.empty((h, t, n), dtype=launch.wide) for _ in range(2))
    p, ds = (xp.empty((h, t, n), dtype=q.dtype) for _ in range(2))
    turns = _slice_heads_with_distinct_key_heads(h, shared)
    # the gradient of a key head is summed over the query heads that share it
    sums = [xp.empty((n, shared, d), dtype=launch.wide) for _ in range(2)]
    for i in range(b):
        for heads in turns:
            run_batched_gemm_into(scores[heads], q[i, heads], k[i].swapaxes(1, 2), scale)
            run_batched_gemm_into(dp[heads], do[i, heads], v[i].swapaxes(1, 2))
        given = None if segments is None else segments[i], t, n, float(scale), bool(causal), int(window)
        along = xp.ascontiguousarray(xp.sum(do[i].astype(launch.wide) * o[i].astype(launch.wide), axis=-1))
        launch("attention_slopes", (h * t,), scores, dp, lse[i], along, p, ds, *given)
        dk, dv = (x.swapaxes(0, 1) for x in sums) if len(turns) > 1 else (gradients[1][i], gradients[2][i])
        for turn, heads in enumerate(turns):
            run_batched_gemm_into(gradients[0][i, heads], ds[heads], k[i])
            run_batched_gemm_into(dk, ds[heads].swapaxes(1, 2), q[i, heads], accumulate=turn > 0)
            run_batched_gemm_into(dv, p[heads].swapaxes(1, 2), do[i, heads], accumulate=turn > 0)
        for x, out in zip(sums if len(turns) > 1 else (), gradients[1:], strict=False):
            store(launch, x, out[i].swapaxes(0, 1))


def _slice_heads_with_distinct_key_heads(heads: int, shared: int) -> list[slice]:
    """Divide the query heads of grouped-query attention into slices so that no two query heads in a slice use the same
    key head.

    `shared` is the number of key heads."""
    group = heads // shared
    return [slice(first, None, group) for first in range(group)]


def _as_int64_segments(segments: Any) -> Any:
    """Return the segment numbers of packed documents as int64, which the kernels expect. None stays None."""
    return None if segments is None else segments.astype(np.int64, copy=False)


@register_gpu_kernel("sum sum")
def store(launch: KernelLauncher, x: Any, out: Any) -> None:
    if x.dtype == launch.wide:
        launch.launch_elements("narrow", x.size, x, out, x.size)
    else:
        launch.launch_elements("widen", x.size, x, out, x.size, False)


@register_gpu_kernel("real wide")
def add_widened(launch: KernelLauncher, x: Any, out: Any) -> None:
    launch.launch_elements("widen", x.size, x, out, x.size, True)


@register_gpu_kernel("real any")
def sum_squares_of_blocks(launch: KernelLauncher, flat: Any, grain: int) -> Any:
    out = launch.xp.empty(-(-flat.size // grain), dtype=np.float64)
    launch("sum_squares_of_blocks", (out.size,), flat, out, flat.size, int(grain), threads=SUM_LANES)
    return out


@register_gpu_kernel("real")
def square_sum(launch: KernelLauncher, flat: Any) -> float:
    sums, out = sum_squares_of_blocks(launch, flat, BLOCK), launch.xp.empty((), dtype=np.float64)
    launch("add_sums", (1,), sums, out, sums.size, threads=SUM_LANES)
    return float(out)


@register_gpu_kernel("real real")
def squared_error(launch: KernelLauncher, y: Any, target: Any) -> float:
    return square_sum(launch, (y - target).reshape(-1))


@register_gpu_kernel("real any any")
def drop(launch: KernelLauncher, x: Any, numbers: Any, p: float) -> tuple[Any, Any]:
    y, keep = launch.xp.empty_like(x), launch.xp.empty(x.shape, dtype=bool)
    capture = get_active_capture()
    # in a graph, the kernel reads the position of the random numbers from memory, because each step uses different
    # numbers
    at = None if capture is None else capture.make_random_position_on_device(numbers)
    given = x.size, at, int(numbers.start), *numbers.keys, np.float32(p), dropout_scale(p)
    launch.launch_elements("drop", -(-x.size // 4) + 1, x, y, keep, *given)
    return y, keep


@register_gpu_kernel("real mask any")
def drop_backward(launch: KernelLauncher, dy: Any, keep: Any, p: float) -> Any:
    dx = launch.xp.empty_like(dy)
    launch.launch_elements("drop_backward", dy.size, dy, keep, dx, dy.size, dropout_scale(p))
    return dx


MAX_COLUMN_ELEMENTS = 1 << 26
"""Maximum number of elements of an im2col matrix, whose columns are the windows of a convolution."""
LONG_SUM_ELEMENTS = 1 << 13
"""If a sum has at least this many terms, separate matrix products, which take microseconds, are faster than one batched
product, which takes milliseconds."""


@register_gpu_kernel("view real real? any any view?")
def correlate(launch: KernelLauncher, x: Any, weight: Any, bias: Any, strides: Any, sizes: Any, out: Any = None) -> Any:
    """Compute a convolution (cross-correlation) with im2col, which multiplies by the matrix of all windows (Chellapilla
    et al. 2006).

    If this matrix is too large, it is built for only some of the windows at a time."""
    made = (x.shape[0], weight.shape[0], *sizes)
    y = launch.xp.empty(made, dtype=x.dtype) if out is None else out
    flat, matrix = _view_by_group(y, strides[4]), _view_by_group(weight, strides[4], 0)
    for some, cells, columns in _iterate_im2col_matrices(launch, x, strides, tuple(sizes)):
        _multiply_groups_into(flat[some, ..., cells], matrix, columns, out is not None)
    if bias is not None:
        y += bias.reshape(-1, *(1,) * len(sizes))
    return y


@register_gpu_kernel("real view any any real?")
def correlate_backward_input(
    launch: KernelLauncher, weight: Any, dy: Any, strides: Any, shape: tuple[int, ...], bias: Any = None
) -> Any:
    flat, matrix = _view_by_group(dy, strides[4]), _view_by_group(weight, strides[4], 0).swapaxes(1, 2)
    alone = _is_pointwise(strides, shape[2:], dy.shape[2:])
    dx = launch.xp.empty(tuple(shape), dtype=dy.dtype if alone else launch.wide)
    if alone:
        _multiply_groups_into(_view_by_group(dx, strides[4]), matrix, flat)
    window = _get_window_table(launch, strides, shape[2:], dy.shape[2:])
    rest = math.prod(dy.shape[3:])
    for some, begin, rows in (
        () if alone else _iterate_output_slices_for_im2col(matrix.shape[1] * strides[4], tuple(dy.shape))
    ):
        into, slopes = dx[some], flat[some, ..., begin * rest : (begin + rows) * rest]
        columns = launch.xp.empty((*slopes.shape[:2], matrix.shape[1], slopes.shape[3]), dtype=launch.wide)
        _multiply_groups_into(columns, matrix, slopes)
        launch.launch_elements("window_cells", into.size, columns, into, window, begin, rows, into.size, begin > 0)
    if launch.kind == 16 and not alone:
        wide, dx = dx, launch.xp.empty(dx.shape, dtype=dy.dtype)
        launch.launch_elements("narrow", dx.size, wide, dx, dx.size)
    if bias is not None:
        dx += bias.reshape(-1, *(1,) * len(shape[2:]))
    return dx


@register_gpu_kernel("view view any any? any?")
def correlate_backward_params(launch: KernelLauncher, x: Any, dy: Any, strides: Any, weight: Any, bias: Any) -> None:
    if weight is not None:
        flat, parts = _view_by_group(dy, strides[4]), []
        for some, cells, columns in _iterate_im2col_matrices(launch, x, strides, tuple(dy.shape[2:])):
            parts.append(_sum_matmuls_over_samples(launch, flat[some, ..., cells], columns.swapaxes(2, 3)))
        _write_or_add_gradient(weight, sum(parts[1:], parts[0]).reshape(weight[0].shape))
    if bias is not None:
        _write_or_add_gradient(bias, _compute_channel_sums(launch, 1, launch.xp.ascontiguousarray(dy)))


def _sum_matmuls_over_samples(launch: KernelLauncher, a: Any, b: Any) -> Any:
    """Return a @ b, summed over samples, with shape (groups, m, n).

    For a single group, long sums are computed sample by sample because cuBLAS does not split a sum over several blocks
    in a batched product."""
    count, groups, m, k = a.shape
    alone = k >= LONG_SUM_ELEMENTS and groups == 1
    made = launch.xp.empty((1 if alone else count, groups, m, b.shape[3]), dtype=launch.wide)
    if not alone:
        _multiply_groups_into(made, a, b)
        return made.sum(axis=0) if count > 1 else made[0]
    for sample in range(count):
        run_gemm_into(made[0, 0], a[sample, 0], b[sample, 0], accumulate=sample > 0)
    return made[0]


def _write_or_add_gradient(into: Any, value: Any) -> None:
    out, add = into
    if add:
        out += value.astype(out.dtype, copy=False)
    else:
        out[...] = value


def _view_by_group(a: Any, groups: int, dim: int = 1) -> Any:
    """Return a view of `a` in which dim `dim` is split into groups. The shape is (samples, groups, channels per group,
    cells) or, for weights (`dim` 0), (groups, outputs, inputs)."""
    shape = *a.shape[:dim], groups, a.shape[dim] // groups, math.prod(a.shape[dim + 1 :])
    return a.reshape(shape)


def _iterate_output_slices_for_im2col(rows: int, result: tuple[int, ...]) -> Iterator[tuple[slice, int, int]]:
    """Yield slices of the output that are small enough for im2col, as (slice of samples, first index along the first
    cell dim, number of indices along this dim).

    The im2col matrix of each slice has `rows` rows, and at most `MAX_COLUMN_ELEMENTS` elements."""
    samples, _, high, *others = result
    line = rows * math.prod(others)
    if not line * high:
        return
    if (many := MAX_COLUMN_ELEMENTS // (line * high)) > 0:
        for first in range(0, samples, many):
            yield slice(first, first + many), 0, high
        return
    some = max(MAX_COLUMN_ELEMENTS // line, 1)
    for sample in range(samples):
        for begin in range(0, high, some):
            yield slice(sample, sample + 1), begin, min(some, high - begin)


def _is_pointwise(strides: Any, cells: Any, sizes: Any) -> bool:
    """Return whether a convolution needs no im2col. Its windows must have a single cell, and its output must have as
    many cells as its input."""
    return {*strides[0], *strides[1]} == {1} and not any(strides[3]) and tuple(cells) == tuple(sizes)


def _iterate_im2col_matrices(
    launch: KernelLauncher, x: Any, strides: Any, sizes: tuple[int, ...]
) -> Iterator[tuple[slice, slice, Any]]:
    """Yield (slice of samples, slice of output cells, im2col matrix of the inputs under the windows of these cells).

    The matrix is (samples, groups, inputs x window offsets, cells)."""
    x, groups, places = launch.xp.ascontiguousarray(x), strides[4], math.prod(strides[0])
    if _is_pointwise(strides, x.shape[2:], sizes):
        yield slice(None), slice(None), _view_by_group(x, groups)
        return
    window = _get_window_table(launch, strides, x.shape[2:], sizes)
    rest = math.prod(sizes[1:])
    for some, begin, rows in _iterate_output_slices_for_im2col(x.shape[1] * places, (len(x), 0, *sizes)):
        piece, cells = x[some], rows * rest
        shape = len(piece), groups, x.shape[1] // groups * places, cells
        columns, count = launch.xp.empty(shape, dtype=x.dtype), len(piece) * x.shape[1] * cells
        launch.launch_elements("window_columns", count, piece, columns, window, begin, rows, count)
        yield some, slice(begin * rest, begin * rest + cells), columns


def _multiply_groups_into(out: Any, a: Any, b: Any, accumulate: bool = False) -> None:
    """Compute out = a @ b for each sample and group, or add the product to out if `accumulate`. Operands may lack the
    sample dim."""
    a, b = (m if m.ndim == 4 else import_cupy().broadcast_to(m, (len(out), *m.shape)) for m in (a, b))
    if out.shape[1] == 1:
        run_batched_gemm_into(out[:, 0], a[:, 0], b[:, 0], accumulate=accumulate)
        return
    for sample in range(len(out)):
        run_batched_gemm_into(out[sample], a[sample], b[sample], accumulate=accumulate)


def _get_window_table(launch: KernelLauncher, strides: Any, cells: Any, sizes: Any) -> Any:
    """Return an array with the properties of a window, such as kernel size and stride, in the format that kernels read.
    `cells` is the number of input cells along each dim, and `sizes` is the number of outputs along each dim."""
    return _make_window_geometry_array(tuple(strides[:4]), tuple(cells), tuple(sizes), launch.xp.cuda.Device().id)


@functools.lru_cache(1 << 10)
def _make_window_geometry_array(
    strides: tuple[Any, ...], cells: tuple[int, ...], sizes: tuple[int, ...], gpu: int
) -> Any:
    """Return the properties of a window as an array on GPU `gpu`, with one row per property and three columns, one per
    spatial dim.

    Columns of missing dims get values that have no effect."""
    ones = 1, 1, 1, 0, 1, 1
    rows = [(*row, *(one,) * (3 - len(row))) for row, one in zip((*strides, cells, sizes), ones, strict=True)]
    return import_cupy().asarray(np.array(rows, np.int64))


@register_gpu_kernel("real any any")
def max_pool(launch: KernelLauncher, x: Any, strides: Any, sizes: Any) -> tuple[Any, Any]:
    winner = launch.xp.empty((*x.shape[:2], *sizes), dtype=np.int32)
    return _launch_pool(launch, x, winner, strides, sizes, 1), winner


@register_gpu_kernel("real any any any")
def avg_pool(launch: KernelLauncher, x: Any, strides: Any, sizes: Any, divisor: int) -> Any:
    return _launch_pool(launch, x, None, strides, sizes, divisor)


def _launch_pool(launch: KernelLauncher, x: Any, winner: Any, strides: Any, sizes: Any, divisor: int) -> Any:
    y = launch.xp.empty((*x.shape[:2], *sizes), dtype=x.dtype)
    launch.launch_elements(
        "pool", y.size, x, y, winner, _get_window_table(launch, strides, x.shape[2:], sizes), divisor, y.size
    )
    return y


@register_gpu_kernel("real index any any")
def max_pool_backward(launch: KernelLauncher, dy: Any, winner: Any, strides: Any, shape: tuple[int, ...]) -> Any:
    return _launch_pool_backward(launch, dy, winner, strides, shape, 1)


@register_gpu_kernel("real any any any")
def avg_pool_backward(launch: KernelLauncher, dy: Any, strides: Any, shape: tuple[int, ...], divisor: int) -> Any:
    return _launch_pool_backward(launch, dy, None, strides, shape, divisor)


def _launch_pool_backward(
    launch: KernelLauncher, dy: Any, winner: Any, strides: Any, shape: tuple[int, ...], divisor: int
) -> Any:
    dx = launch.xp.empty(tuple(shape), dtype=dy.dtype)
    window = _get_window_table(launch, strides, shape[2:], dy.shape[2:])
    launch.launch_elements("pool_backward", dx.size, dy, winner, dx, window, divisor, dx.size)
    return dx


@register_gpu_kernel("real")
def channel_sums(launch: KernelLauncher, x: Any) -> Any:
    return _compute_channel_sums(launch, 1, x)


@register_gpu_kernel("real double")
def channel_squares(launch: KernelLauncher, x: Any, mean: Any) -> Any:
    return _compute_channel_sums(launch, 1, x, None, mean)


@register_gpu_kernel("real real double double")
def channel_gradient_sums(launch: KernelLauncher, dy: Any, x: Any, mean: Any, rstd: Any) -> Any:
    return _compute_channel_sums(launch, 2, x, dy, mean, rstd)


def _compute_channel_sums(
    launch: KernelLauncher, sums: int, x: Any, dy: Any = None, mean: Any = None, rstd: Any = None
) -> Any:
    xp, channels = launch.xp, x.shape[1]
    count = x.size // channels
    some = max(-(-count // MAX_PARTS), PART_ELEMENTS)
    parts = xp.empty((-(-count // some), sums * channels), dtype=np.float64)
    launch("channel_parts", (channels, len(parts)), x, dy, mean, rstd, parts, channels, _count_cells(x), count, some)
    if len(parts) == 1:
        return parts[0]
    out = xp.empty(sums * channels, dtype=np.float64)
    launch.launch_elements("add_doubles", out.size, parts, out, len(parts), out.size)
    return out


@register_gpu_kernel("double double? real? wide? wide? any any any")
def batch_norm_scales_and_running_stats(
    launch: KernelLauncher, squares: Any, mean: Any, weight: Any, running_mean: Any, running_var: Any, count: float,
    eps: float, momentum: float,
) -> tuple[Any, Any]:  # fmt: skip
    rstd, scale = launch.xp.empty_like(squares), launch.xp.empty_like(squares)
    given, n = (squares, mean, weight, running_mean, running_var, rstd, scale), rstd.size
    launch.launch_elements(
        "batch_norm_scales_and_running_stats", n, *given, n, float(count), float(eps), float(momentum)
    )
    return rstd, scale


@register_gpu_kernel("double double real? any")
def batch_norm_backward_factors(
    launch: KernelLauncher, sums: Any, rstd: Any, weight: Any, count: float
) -> tuple[Any, Any, Any]:
    scale, along, across = (launch.xp.empty_like(rstd) for _ in range(3))
    launch.launch_elements(
        "batch_norm_backward_factors", rstd.size, sums, rstd, weight, scale, along, across, rstd.size, float(count)
    )
    return scale, along, across


@register_gpu_kernel("real double double double")
def channel_affine(launch: KernelLauncher, x: Any, mean: Any, scale: Any, shift: Any) -> Any:
    y = launch.xp.empty_like(x)
    launch.launch_elements("channel_affine", x.size, x, y, mean, scale, shift, x.size, x.shape[1], _count_cells(x))
    return y


@register_gpu_kernel("real real double double double double")
def channel_norm_backward_input(
    launch: KernelLauncher, dy: Any, x: Any, mean: Any, scale: Any, along: Any, across: Any
) -> Any:
    dx, channels = launch.xp.empty_like(dy), (mean, scale, along, across)
    launch.launch_elements(
        "channel_norm_backward_input", x.size, dy, x, dx, *channels, x.size, x.shape[1], _count_cells(x)
    )
    return dx


@register_gpu_kernel("real any any")
def multiply_along_dim(launch: KernelLauncher, x: Any, dim: int, matrix: Any) -> Any:
    y = launch.xp.empty((*x.shape[:dim], matrix.output_count, *x.shape[dim + 1 :]), dtype=x.dtype)
    entries = _get_sparse_matrix_on_gpu(launch, matrix)
    sizes = y.size, matrix.cells, matrix.output_count, math.prod(x.shape[dim + 1 :])
    launch.launch_elements("multiply_along_dim", y.size, x, y, *entries, *sizes)
    return y


MAX_MATRICES_ON_GPU = 1 << 9
_matrices_on_gpu: dict[tuple[int, Any, int], tuple[Any, tuple[Any, ...]]] = {}
"""Sparse matrices on GPUs, keyed by (id of an array of the matrix, dtype of the weights, GPU). The host matrices are
also kept so that their ids stay unique."""


def _get_sparse_matrix_on_gpu(launch: KernelLauncher, matrix: Any) -> tuple[Any, ...]:
    """Return the arrays of a sparse matrix on the current GPU. The arrays are kept on the GPU for later steps."""
    key = id(matrix.starts), launch.wide, launch.xp.cuda.Device().id
    _, entries = _matrices_on_gpu.get(key, (matrix, ()))
    if not entries:
        if len(_matrices_on_gpu) >= MAX_MATRICES_ON_GPU:
            _matrices_on_gpu.pop(next(iter(_matrices_on_gpu)), None)
        weights = launch.xp.asarray(matrix.weights.astype(launch.wide))
        entries = launch.xp.asarray(matrix.starts), launch.xp.asarray(matrix.sources), weights
        _matrices_on_gpu[key] = matrix, entries
    if (capture := get_active_capture()) is not None:
        capture.memory.keep(entries)
    return entries


@register_gpu_kernel("real")
def channel_means_and_square_deviations(launch: KernelLauncher, x: Any) -> Any:
    rows = x.reshape(1, -1, *x.shape[2:])  # each channel of each sample becomes a channel of its own
    mean = _compute_channel_sums(launch, 1, rows) / max(_count_cells(x), 1)
    squares = _compute_channel_sums(launch, 1, rows, None, mean)
    return launch.xp.stack([mean, squares]).reshape(2, *x.shape[:2])


@register_gpu_kernel("real double double double")
def group_norm_affine(launch: KernelLauncher, x: Any, mean: Any, scale: Any, shift: Any) -> Any:
    y = launch.xp.empty_like(x)
    launch.launch_elements("channel_affine", x.size, x, y, mean, scale, shift, x.size, mean.size, _count_cells(x))
    return y


@register_gpu_kernel("real real double double")
def group_norm_gradient_sums_by_channel(launch: KernelLauncher, dy: Any, x: Any, mean: Any, rstd: Any) -> Any:
    sums = _compute_channel_sums(launch, 2, x.reshape(1, -1, *x.shape[2:]), dy, mean, rstd)
    return sums.reshape(2, *x.shape[:2])


@register_gpu_kernel("real real double double double double")
def group_norm_backward(launch: KernelLauncher, dy: Any, x: Any, mean: Any, scale: Any, along: Any, across: Any) -> Any:
    dx, values = launch.xp.empty_like(dy), (mean, scale, along, across)
    launch.launch_elements("group_norm_backward", x.size, dy, x, dx, *values, x.size, mean.size, _count_cells(x))
    return dx


def _count_cells(x: Any) -> int:
    return math.prod(x.shape[2:])


UPDATES = ("sgd", "momentum", "adam", "lion", "update_moments", "compute_direction", "step_along_direction")


def try_run_optimizer_kernel(name: str, arrays: tuple[Any, ...], numbers: tuple[Any, ...]) -> bool:
    """Run the GPU version of the optimizer update `name` of `fsdpx.optim` on 1-D arrays of one dtype.

    Return True on success. If there is no kernel for these arguments, do nothing and return False."""
    kinds = {get_kernel_bits(array.dtype) for array in arrays}
    (kind, *others) = kinds
    if name not in UPDATES or others or kind not in (32, 64) or not all(a.flags.c_contiguous for a in arrays):
        return False
    launch, n = KernelLauncher(kind), arrays[0].size
    launch.launch_elements(name, n, *arrays, n, *map(launch.wide.type, numbers))
    return True
