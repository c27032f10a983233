"""Which kernels pay as Numba code: one table, plain against numba, per kernel and size; the reason for each.

    python bench/kernels.py [--json PATH] [--dtype float32] [--repeat 7] [--only NAME] [--threads 2]

Times are the quickest of several samples after a warm-up that compiles, taken in turns: other work on the machine only
adds to them. Set one BLAS thread (OPENBLAS_NUM_THREADS=1). --threads measures the compiled code again on so many
threads.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx import optim
from fsdpx.core.array import arena, kernels, parallel, parse_dtype
from fsdpx.core.array.random import NumberRange, normal
from fsdpx.ext.fields import kernels as windows
from fsdpx.ext.fields.kernels import WindowStrides
from fsdpx.ext.meshes import kernels as segments
from fsdpx.optim import ShardSegment, ShardSegments

ROWS = {"many 64x32": (64, 32), "tiny 2048x256": (2048, 256), "small 2048x2048": (2048, 2048)}
HEADS = {"2x2x32x16": (2, 2, 32, 16), "tiny 8x4x256x64": (8, 4, 256, 64), "long 1x4x1024x64": (1, 4, 1024, 64)}
GRAPHS = {"5000 nodes, 30000 edges, 128 wide": (5000, 30000, 128), "8 wide": (5000, 30000, 8)}
IMAGES = {"cnn 64x64x32x32": (64, 64, 32, 32), "cnn 64x512x4x4": (64, 512, 4, 4)}

Case = tuple[str, str, Callable[[], Any]]


def elementwise(x: np.ndarray, dy: np.ndarray, size: str) -> Iterator[Case]:
    for approximate in ("none", "tanh"):
        mark = "" if approximate == "none" else " (tanh)"
        yield f"gelu{mark}", size, lambda a=approximate: kernels.gelu(np, x, a)
        yield f"gelu_backward{mark}", size, lambda a=approximate: kernels.gelu_backward(np, x, dy, a)
        yield (
            f"recompute_gelu_and_backward{mark}",
            size,
            lambda a=approximate: kernels.recompute_gelu_and_backward(np, x, dy.copy(), a),
        )
    yield "relu", size, lambda: kernels.relu(np, x)
    yield "relu_backward", size, lambda: kernels.relu_backward(np, x, dy)
    yield "sigmoid", size, lambda: kernels.sigmoid(np, x)
    yield "silu", size, lambda: kernels.silu(np, x)
    yield "silu_backward", size, lambda: kernels.silu_backward(np, x, dy)
    yield "leaky_relu", size, lambda: kernels.leaky_relu(np, x, 0.01)
    yield "leaky_relu_backward", size, lambda: kernels.leaky_relu_backward(np, x, dy, 0.01)
    yield "elu", size, lambda: kernels.elu(np, x, 1.0)
    yield "elu_backward", size, lambda: kernels.elu_backward(np, x, dy, 1.0)
    yield "softplus", size, lambda: kernels.softplus(np, x, 1.0, 20.0)
    yield "softplus_backward", size, lambda: kernels.softplus_backward(np, x, dy, 1.0, 20.0)
    yield "sigmoid_backward", size, lambda: kernels.sigmoid_backward(np, x, dy)
    yield "tanh_backward", size, lambda: kernels.tanh_backward(np, x, dy)
    yield "gated", size, lambda: kernels.gated(np, x, dy)
    yield "gated_backward", size, lambda: kernels.gated_backward(np, x, dy, x)
    turned, angles = x.reshape(-1, 8, 1, x.shape[1]), np.ones((8, x.shape[1] // 2), x.dtype)
    yield "rotate", size, lambda: kernels.rotate(np, turned, angles, angles)
    yield "normal", size, lambda: normal(0, "", 0, x.size)
    yield "squared_error", size, lambda: kernels.squared_error(np, x, dy)
    yield "squared_error_backward", size, lambda: kernels.squared_error_backward(np, x, dy, 1.0)
    yield "squared_error_gradient_and_sum", size, lambda: kernels.squared_error_gradient_and_sum(np, x, dy, 1.0)
    yield "huber_error", size, lambda: kernels.huber_error(np, x, dy, 1.0)
    yield "huber_error_backward", size, lambda: kernels.huber_error_backward(np, x, dy, 1.0, 1.0)
    yield "huber_error_gradient_and_sum", size, lambda: kernels.huber_error_gradient_and_sum(np, x, dy, 1.0, 1.0)
    yield "square_sum", size, lambda: kernels.square_sum(np, x.reshape(-1))
    yield "sum_squares_of_blocks", size, lambda: kernels.sum_squares_of_blocks(np, x.reshape(-1), 1024)
    yield "drop", size, lambda: kernels.drop(np, x, NumberRange(0, "a", 0, x.size), 0.1)
    keep = dy > 0
    yield "drop_backward", size, lambda: kernels.drop_backward(np, dy, keep, 0.1)


def sums(x: np.ndarray, dy: np.ndarray, size: str) -> Iterator[Case]:
    bias, into, h = np.zeros_like(x[0]), x.copy(), x.copy()
    yield "add", size, lambda: kernels.add(np, x, dy)
    yield "add_bias", size, lambda: kernels.add_bias(np, into, bias)
    yield "bias_gelu", size, lambda: kernels.bias_gelu(np, h, bias)
    yield "sum_rows", size, lambda: kernels.sum_rows(np, x, bias, False)
    flat, rounded = x.reshape(-1), kernels.cast_float_to_dtype(np, x.reshape(-1), parse_dtype("bf16"))
    yield "round_randomly", size, lambda: kernels.round_randomly(np, flat, rounded, NumberRange(0, "a", 0, x.size))
    if x.dtype == np.float32:
        narrow, slope = (kernels.cast_float_to_dtype(np, a, parse_dtype("bf16")) for a in (x, dy))
        yield "add (in bf16)", size, lambda: kernels.add(np, narrow, slope)
        yield "drop (in bf16)", size, lambda: kernels.drop(np, narrow, NumberRange(0, "a", 0, x.size), 0.1)
    for name in ("float16", "bf16") if x.dtype == np.float32 else ():
        half, wide = kernels.cast_float_to_dtype(np, x, parse_dtype(name)), x.copy()
        yield f"store (to {name})", size, lambda half=half: kernels.store(np, x, half)
        yield f"store (from {name})", size, lambda half=half, wide=wide: kernels.store(np, half, wide)
        yield f"add_widened ({name})", size, lambda half=half, wide=wide: kernels.add_widened(np, half, wide)


def updates(x: np.ndarray, dy: np.ndarray, size: str) -> Iterator[Case]:
    p, g = x.reshape(-1).copy(), dy.reshape(-1)
    segments = ShardSegments((ShardSegment("w", 0, p.size, 0, p.size),))
    for optimizer in (optim.AdamW(), optim.SGD(momentum=0.9), optim.Lion(), optim.LAMB()):
        slots = {name: np.zeros_like(p) for name in optimizer.slots}
        yield (
            f"update ({type(optimizer).__name__})",
            size,
            lambda o=optimizer, s=slots: o.update(np, p, g, s, lr=1e-3, step=9, segments=segments),
        )


def by_rows(x: np.ndarray, dy: np.ndarray, size: str) -> Iterator[Case]:
    y, weight, bias = kernels.softmax(np, x), x[0].copy(), x[1].copy()
    _, mean, rstd = kernels.layer_norm(np, x, weight, bias, 1e-5)
    gw, gb = np.zeros_like(weight), np.zeros_like(bias)
    yield "softmax", size, lambda: kernels.softmax(np, x)
    yield "softmax_backward", size, lambda: kernels.softmax_backward(np, y, dy)
    yield "layer_norm", size, lambda: kernels.layer_norm(np, x, weight, bias, 1e-5)
    yield (
        "layer_norm_backward_input",
        size,
        lambda: kernels.layer_norm_backward_input(np, x, weight, mean, rstd, dy),
    )
    yield (
        "layer_norm_backward_params",
        size,
        lambda: kernels.layer_norm_backward_params(np, x, mean, rstd, dy, gw, gb),
    )
    yield "rms_norm", size, lambda: kernels.rms_norm(np, x, weight, 1e-5)
    yield "rms_norm_backward_input", size, lambda: kernels.rms_norm_backward_input(np, x, weight, rstd, dy)
    yield "rms_norm_backward_params", size, lambda: kernels.rms_norm_backward_params(np, x, rstd, dy, gw)


def by_classes(x: np.ndarray, dy: np.ndarray, size: str) -> Iterator[Case]:
    target = np.arange(x.shape[0]) % x.shape[1]
    table, index = np.zeros((256, x.shape[1]), x.dtype), (np.arange(x.shape[0]) * 7) % 256
    _, _, lse = kernels.cross_entropy(np, x, target)
    yield "cross_entropy", size, lambda: kernels.cross_entropy(np, x, target)
    yield "cross_entropy_backward", size, lambda: kernels.cross_entropy_backward(np, x, target, lse, 1.0)
    yield "embedding_backward", size, lambda: kernels.embedding_backward(np, table, index, dy)


def heads(q: np.ndarray, k: np.ndarray, v: np.ndarray, size: str) -> Iterator[Case]:
    scale = q.shape[-1] ** -0.5
    o, lse = kernels.attention(np, q, k, v, True, scale)
    yield "attention", size, lambda: kernels.attention(np, q, k, v, True, scale)
    yield "attention_backward", size, lambda: kernels.attention_backward(np, q, k, v, o, lse, q, True, scale)
    few = k[:, :1], v[:, :1]
    segments = np.repeat(np.arange(q.shape[2]) // 16, q.shape[0]).reshape(q.shape[2], q.shape[0]).T
    for way, options in (("shared keys", (0, None)), ("window", (16, None)), ("segments", (0, segments))):
        yield f"attention ({way})", size, lambda o=options: kernels.attention(np, q, *few, True, scale, *o)


def images(x: np.ndarray, size: str) -> Iterator[Case]:
    channels = x.shape[1]
    weight = np.ones((channels, channels, 3, 3), x.dtype)
    strides, out = WindowStrides((3, 3), (1, 1), (1, 1), (-1, -1), 1), x.shape[2:]
    into = (weight.copy(), False)
    yield "correlate", size, lambda: windows.correlate(np, x, weight, None, strides, out)
    yield "correlate_backward_input", size, lambda: windows.correlate_backward_input(np, weight, x, strides, x.shape)
    yield "correlate_backward_params", size, lambda: windows.correlate_backward_params(np, x, x, strides, into, None)
    own, each_own = weight[:, :1], strides._replace(groups=channels)
    yield "correlate (depthwise)", size, lambda: windows.correlate(np, x, own, None, each_own, out)
    half, less = WindowStrides((2, 2), (2, 2), (1, 1), (0, 0), 1), tuple(n // 2 for n in out)
    y, winner = windows.max_pool(np, x, half, less)
    yield "max_pool", size, lambda: windows.max_pool(np, x, half, less)
    yield "max_pool_backward", size, lambda: windows.max_pool_backward(np, y, winner, half, x.shape)
    yield "avg_pool", size, lambda: windows.avg_pool(np, x, half, less, 4)
    yield "avg_pool_backward", size, lambda: windows.avg_pool_backward(np, y, half, x.shape, 4)
    table = windows.CellMatrix.from_entries(np.arange(2 * out[0]), np.arange(2 * out[0]) // 2, np.ones(2 * out[0]),
                                             (2 * out[0], out[0]))  # fmt: skip
    yield "multiply_along_dim", size, lambda: windows.multiply_along_dim(np, x, 2, table)
    field = np.ascontiguousarray(x)[..., None]
    modes = windows.fourier_along_dim(np, field, 3, out[1], "rfft")
    yield "fourier_along_dim (rfft)", size, lambda: windows.fourier_along_dim(np, field, 3, out[1], "rfft")
    yield "fourier_along_dim (fft)", size, lambda: windows.fourier_along_dim(np, modes, 2, out[0], "fft")
    rows, count = modes.reshape(-1, *modes.shape[2:]), out[0] // 2
    index = np.add.outer(np.arange(modes.shape[2]), np.arange(modes.shape[3])) % count
    ones = np.ones(index.shape, x.dtype)
    stencil = tuple(windows.ShiftedRange(1, n, out[0] - 2, n - 1.0, n > 0) for n in (0, 2))
    slopes, which = np.zeros(x.shape, x.dtype), (slice(None), slice(None), 0, stencil)
    yield "apply_stencil", size, lambda: windows.apply_stencil(np, slopes, field[..., 0], *which)
    yield "sum_squares_by_index", size, lambda: windows.sum_squares_by_index(np, rows, index, ones, count)
    a = np.ones(channels, x.dtype)
    yield "channel_sums", size, lambda: kernels.channel_sums(np, x)
    yield "channel_squares", size, lambda: kernels.channel_squares(np, x, a)
    yield "channel_affine", size, lambda: kernels.channel_affine(np, x, a, a, a)
    yield "channel_gradient_sums", size, lambda: kernels.channel_gradient_sums(np, x, x, a, a)
    yield "channel_norm_backward_input", size, lambda: kernels.channel_norm_backward_input(np, x, x, a, a, a, a)
    each, turned = np.ones(x.shape[:2], x.dtype), np.ascontiguousarray(x)
    yield "channels_last", size, lambda: kernels.channels_last(np, turned)
    _, mean, rstd = windows.group_norm(np, x, a, a, 8, 1e-5)
    yield "group_norm", size, lambda: windows.group_norm(np, x, a, a, 8, 1e-5)
    yield "group_norm_backward_input", size, lambda: windows.group_norm_backward_input(np, x, x, mean, rstd, a, 8)
    yield "channel_means_and_square_deviations", size, lambda: windows.channel_means_and_square_deviations(np, x)
    yield "group_norm_affine", size, lambda: windows.group_norm_affine(np, x, each, each, each)
    yield (
        "group_norm_gradient_sums_by_channel",
        size,
        lambda: windows.group_norm_gradient_sums_by_channel(np, x, x, each, each),
    )
    yield "group_norm_backward", size, lambda: windows.group_norm_backward(np, x, x, each, each, each, each)


def graphs(x: np.ndarray, edges: np.ndarray, size: str) -> Iterator[Case]:
    rng = np.random.default_rng(1)
    senders, receivers = rng.integers(0, x.shape[1], (2, edges.shape[1]))
    receivers.sort()
    order, offsets = np.argsort(senders), np.searchsorted(receivers, np.arange(x.shape[1] + 1))
    most = int(np.diff(offsets).max())
    y = segments.segment_softmax(np, edges, offsets, receivers, most)
    yield "add_gathered_row_pairs", size, lambda: segments.add_gathered_row_pairs(np, edges, x, senders, x, receivers)
    yield "segment_sum", size, lambda: segments.segment_sum(np, edges, offsets, None, most)
    yield "segment_sum (in another order)", size, lambda: segments.segment_sum(np, edges, offsets, order, most)
    yield "segment_max", size, lambda: segments.segment_max(np, edges, offsets, most)
    yield "segment_softmax", size, lambda: segments.segment_softmax(np, edges, offsets, receivers, most)
    index = offsets, receivers, most
    yield "segment_softmax_backward", size, lambda: segments.segment_softmax_backward(np, y, edges, *index)


def cases(dtype: str) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for size, shape in ROWS.items():
        x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
        for group in (elementwise, sums, by_rows, by_classes, updates):
            yield from group(x, dy, size)
    for size, shape in IMAGES.items():
        turned = rng.normal(size=(shape[0], *shape[2:], shape[1])).astype(dtype)  # as layers pass them on
        yield from images(turned.transpose(0, 3, 1, 2), size)
    for size, (nodes, edges, width) in GRAPHS.items():
        yield from graphs(*(rng.normal(size=(1, n, width)).astype(dtype) for n in (nodes, edges)), size)
    for size, (b, h, t, d) in HEADS.items():
        qkv = rng.normal(size=(b, t, 3, h, d)).astype(dtype)  # views of one product, as the layer passes them
        yield from heads(*(qkv[:, :, n].swapaxes(1, 2) for n in range(3)), size)


def microseconds(run: Callable[[], Any], repeat: int) -> float:
    """Time of one call, in the quickest of samples of at least 2 ms."""
    run()
    start = time.perf_counter()
    run()
    calls = max(1, int(2e-3 / max(time.perf_counter() - start, 1e-7)))
    samples = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        samples.append((time.perf_counter() - start) / calls)
    return min(samples) * 1e6


def in_turns(run: Callable[[], Any], repeat: int) -> list[float]:
    """Times of a call as plain and as compiled code, sampled in turns: other work disturbs both alike."""
    samples: dict[kernels.Mode, list[float]] = {"plain": [], "numba": []}
    for _ in range(repeat):
        for mode, taken in samples.items():
            with kernels.use_mode(mode):
                taken.append(microseconds(run, 1))
    return [min(taken) for taken in samples.values()]


def measure(dtype: str, repeat: int, only: str, threads: int) -> list[dict[str, Any]]:
    rows = []
    for name, size, run in cases(dtype):
        if only not in name:
            continue
        plain, numba = in_turns(run, repeat)
        several = _on(threads, run, repeat)
        known = name.partition(" ")[0]
        chosen = "numba" if known == "update" else kernels.get_implementation_name(known)
        times = {"plain_us": round(plain, 1), "numba_us": round(numba, 1)}
        row = {"kernel": name, "size": size, **times, "chosen": chosen}
        rows.append(row | {"threads": threads, "threads_us": round(several, 1)})
        speed = f"{plain / numba:8.2f} {several:11.1f} {numba / several:8.2f}"
        print(f"{name:28} {size:18} {plain:11.1f} {numba:11.1f} {speed}  {chosen}", flush=True)
    return rows


def _on(threads: int, run: Callable[[], Any], repeat: int) -> float:
    parallel.set_threads(threads)
    try:
        return microseconds(run, repeat)
    finally:
        parallel.set_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, help="write the table here too")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--threads", type=int, default=1, help="threads of the last measurement")
    options = parser.parse_args()
    arena.make_malloc_keep_freed_memory()
    heads = f"{'plain us':>11} {'numba us':>11} {'speed-up':>8} {'threads us':>11} {'speed-up':>8}"
    print(f"{'kernel':28} {'size':18} {heads}  chosen")
    rows = measure(options.dtype, options.repeat, options.only, options.threads)
    if options.json:
        about = {"dtype": options.dtype, "machine": platform.machine(), "numpy": np.__version__, "rows": rows}
        options.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
