"""Attention in one kernel, by cuDNN where it is installed (`pip install 'fsdpx[cudnn13]'`): for 16-bit formats.

cuDNN takes arrays by address and strides, and its plans depend on the GPU and on its version. So a plan is used only
after it has computed random numbers of just those shapes and strides right, forward and backward."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fsdpx.cuda.devices import cupy, current, is_on_gpu
from fsdpx.cuda.head_layout import merged, time_first

__all__ = ["AttentionCase", "CudnnLibrary", "described", "fused", "library"]

FORMATS = {"bfloat16": ("BFLOAT16", 2.0**-8), "float16": ("HALF", 2.0**-11)}
"""cuDNN's name of each format, and the distance of 1 from the next number."""
MOST_CHANNELS, CHANNELS = 128, 8
"""Of a head: the most there may be, and what their number must be a multiple of."""
ALIGNED = 16
"""Bytes: where rows begin."""
FEW = 16
"""Positions: a text that is generated one by one has another length at each step, and a plan is for one length."""
MOST_PLANS = 64
"""Cases that get a plan, which takes a moment to make and to prove; inputs of more lengths are computed without."""
ROUNDINGS = 4
"""By which a result may differ, each of the largest number of its array: probabilities and their gradients are rounded
to 16 bits before they are multiplied, and the result is rounded again. What is masked or read wrongly differs more."""
SPREAD = 4.0
"""Standard deviation of the scores in a proof: most weight lies on few positions, so that each of them shows."""
PERIOD = 1_000_003  # of the random numbers: a prime, which no stride divides
AT_ONCE = 1 << 24  # scores in the reference


class CudnnLibrary(NamedTuple):
    """module: cuDNN's frontend; None: it cannot be used. words: its version, or what is missing."""

    module: Any
    words: str


class AttentionCase(NamedTuple):
    """What a plan is made for. q, k: shapes, (B, H, T, D) and (B, G, S, D). strides: of q, k and v, in elements."""

    format: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    causal: bool
    scale: float
    window: int
    gpu: int


class Plans(NamedTuple):
    forward: CudnnPlan
    backward: CudnnPlan


_plans: dict[AttentionCase, Plans | None] = {}
_making = threading.Lock()
_handles = threading.local()


@functools.cache
def library() -> CudnnLibrary:
    """cuDNN with its frontend, if both can be loaded."""
    try:
        import cudnn

        version = cudnn.backend_version_string()
    except ImportError:
        return CudnnLibrary(None, "cuDNN's frontend is not installed: pip install 'fsdpx[cudnn12]' or 'fsdpx[cudnn13]'")
    except (OSError, RuntimeError) as error:  # the frontend looks for the library at the first call
        return CudnnLibrary(None, f"cuDNN's frontend finds no cuDNN ({error}): pip install nvidia-cudnn-cu12 or -cu13")
    return CudnnLibrary(cudnn, f"cuDNN {version}, frontend {cudnn.__version__}")


def fused(name: str, given: tuple[Any, ...]) -> Callable[..., Any] | None:
    """cuDNN's form of `attention` or `attention_backward` of `fsdpx.array.kernels` for these arguments, called with the
    namespace before them; None: it takes others only, or is not there, or computes them wrongly here."""
    q, k, v = given[:3]
    causal, scale, *rest = given[3 if name == "attention" else 6 :]
    window = rest[0] if rest else 0
    segments = rest[1] if rest[1:] else None
    if segments is not None or not all(_suits(a, q) for a in (q, k, v)) or q.shape[2] < FEW:
        return None
    if library().module is None:
        return None
    strides = tuple(tuple(n // a.itemsize for n in a.strides) for a in (q, k, v))
    case = AttentionCase(q.dtype.name, q.shape, k.shape, strides, bool(causal), float(scale), int(window), current())
    plans = _found(case)
    if plans is None:
        return None
    if name == "attention":
        return lambda xp, q, k, v, *_, **__: plans.forward(xp, q, k, v)
    return lambda xp, q, k, v, o, lse, do, *_, **__: plans.backward(xp, q, k, v, o, lse, do)


def _suits(a: Any, q: Any) -> bool:
    """Whether cuDNN reads an array as it lies."""
    if not is_on_gpu(a) or a.dtype != q.dtype or a.dtype.name not in FORMATS or a.ndim != 4 or not a.size:
        return False
    channels, rows = a.shape[3], a.strides[:3]
    apart = all(step > 0 and step % ALIGNED == 0 for step, n in zip(rows, a.shape, strict=False) if n > 1)
    fits = channels % CHANNELS == 0 and channels <= MOST_CHANNELS and a.shape[0] == q.shape[0]
    return fits and apart and a.strides[3] == a.itemsize and a.data.ptr % ALIGNED == 0 and q.shape[1] % a.shape[1] == 0


def _found(case: AttentionCase) -> Plans | None:
    """The plans of a case, made and proven when it is first seen; None, with a warning, if they are wrong."""
    with _making:
        if case not in _plans and len(_plans) < MOST_PLANS:
            _plans[case] = _proven(case)
        return _plans.get(case)


def _proven(case: AttentionCase) -> Plans | None:
    module, words = library()
    try:
        plans = Plans(CudnnPlan(module, case, False), CudnnPlan(module, case, True))
    except module.cudnnGraphNotSupportedError:
        return None
    except RuntimeError as error:  # as of a frontend for a later cuDNN
        what = f"cannot plan attention of {case.format} {case.q}, {case.k} ({error})"
    else:
        wrong = _differing(case, plans)
        if not wrong:
            return plans
        what = f"computes {' and '.join(wrong)} of attention wrongly for {case.format} {case.q}, {case.k}"
    warnings.warn(f"fsdpx: {words} {what}: it is not used for it on this GPU", RuntimeWarning, stacklevel=2)
    return None


# -- plans -----------------------------------------------------------------------------------------------------------


class CudnnPlan:
    """A direction of one case, ready to run on any arrays of its shapes and strides."""

    def __init__(self, module: Any, case: AttentionCase, backward: bool) -> None:
        self.graph = described(module, case, backward, handle=_handle(module, case.gpu))
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([module.heur_mode.A])
        self.graph.check_support()
        self.graph.build_plans()
        self.module, self.case, self.scratch = module, case, max(self.graph.get_workspace_size(), 1)

    def __call__(self, xp: Any, q: Any, k: Any, v: Any, *given: Any) -> Any:
        """o and lse; or, with o, lse and do given, the gradients of q, k and v as `attention_backward` has them."""
        if not given:
            o, lse = time_first(xp, q), xp.empty(q.shape[:3], dtype=np.float32)
            self._execute(xp, (q, k, v, o, lse))
            return o, lse
        d = merged(xp, q, k)
        o, lse, do = given
        self._execute(xp, (q, k, v, _lying_time_first(xp, o), lse, _lying_time_first(xp, do), d[0], d[1], d[2]))
        return d

    def _execute(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """On the stream that computes; the scratch goes back to its pool, which hands it on in the same order."""
        handle, scratch = _handle(self.module, self.case.gpu), xp.empty(self.scratch, dtype=np.uint8)
        self.module.set_stream(handle=handle, stream=xp.cuda.get_current_stream().ptr)
        addresses = {number: int(array.data.ptr) for number, array in enumerate(arrays, 1)}
        self.graph.execute(addresses, int(scratch.data.ptr), handle=handle)


def described(module: Any, case: AttentionCase, backward: bool, **where: Any) -> Any:
    """cuDNN's graph of attention, checked. Its tensors have the numbers 1, 2, ... of `CudnnPlan`'s arrays. where: the
    handle of a GPU, or `sm_version=90` for none."""
    kind, wide = getattr(module.data_type, FORMATS[case.format][0]), module.data_type.FLOAT
    graph = module.pygraph(io_data_type=kind, intermediate_data_type=wide, compute_data_type=wide, **where)
    (b, h, t, _), (_, g, n, _) = case.q, case.k
    like_q, like_k, rows = _dense(case.q), _dense(case.k), (h * t, t, 1, 1)

    def tensor(number: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        return graph.tensor(dim=list(shape), stride=list(strides), data_type=dtype, uid=number)

    shapes = (case.q, case.k, case.k)
    q, k, v = (tensor(i + 1, shapes[i], case.strides[i], kind) for i in range(3))
    mask = {"diagonal_band_right_bound": 0} if case.causal else {}
    if case.causal and case.window:
        mask["diagonal_band_left_bound"] = case.window
    if not backward:
        o, lse = graph.sdpa(q=q, k=k, v=v, attn_scale=case.scale, generate_stats=True, **mask)
        results = [(o, case.q, like_q, kind), (lse, (b, h, t, 1), rows, wide)]
    else:
        o, do = (tensor(number, case.q, like_q, kind) for number in (4, 6))
        stats = tensor(5, (b, h, t, 1), rows, wide)
        given = {"q": q, "k": k, "v": v, "o": o, "dO": do, "stats": stats}
        found = graph.sdpa_backward(**given, attn_scale=case.scale, use_deterministic_algorithm=True, **mask)
        side_by_side = _merged_strides(case.q) if (h, t) == (g, n) else None
        layouts = (side_by_side or like_q, side_by_side or like_k, side_by_side or like_k)
        results = [(d, shape, layout, kind) for d, shape, layout in zip(found, shapes, layouts, strict=True)]
    for number, (made, shape, strides, dtype) in enumerate(results, 7 if backward else 4):
        made.set_output(True).set_dim(list(shape)).set_stride(list(strides)).set_data_type(dtype).set_uid(number)
    graph.validate()
    return graph


def _handle(module: Any, gpu: int) -> int:
    """cuDNN's, for this thread on a GPU."""
    known = vars(_handles).setdefault("of", {})
    if gpu not in known:
        known[gpu] = module.create_handle()
    return int(known[gpu])


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of (B, H, T, D) that has time before heads in memory."""
    _, h, t, d = shape
    return t * h * d, d, h * d, 1


def _merged_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of one of three such arrays in one, (B, T, 3, H, D) in memory."""
    _, h, t, d = shape
    return t * 3 * h * d, d, 3 * h * d, 1


def _lying_time_first(xp: Any, a: Any) -> Any:
    """`a`, copied if it lies otherwise."""
    return xp.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)


# -- the proof -------------------------------------------------------------------------------------------------------


def _differing(case: AttentionCase, plans: Plans) -> list[str]:
    """Which results of random numbers differ from those of float32 by more than roundings, or are not numbers."""
    xp, eps = cupy(), FORMATS[case.format][1]
    q, k, v = (_noise(xp, case, i) for i in range(3))
    q[...] = q * (SPREAD / (case.scale * case.q[3] ** 0.5))
    do = time_first(xp, q)
    do[...] = _noise(xp, case, 0, seed=3)
    o, lse = plans.forward(xp, q, k, v)
    d = plans.backward(xp, q, k, v, o, lse, do)
    names = ("the output", "the logarithms of sums", "dq", "dk", "dv")
    most, error = np.zeros(len(names)), np.zeros(len(names))
    group = case.q[1] // case.k[1]
    for b, g in np.ndindex(case.k[0], case.k[1]):
        mine = slice(g * group, (g + 1) * group)
        want = _reference(xp, case, *(a.astype(np.float32) for a in (q[b, mine], k[b, g], v[b, g], do[b, mine])))
        got = o[b, mine], lse[b, mine], d[0][b, mine], d[1][b, g], d[2][b, g]
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            most[i] = max(most[i], float(abs(other).max()))
            off = float(abs(one.astype(np.float32) - other).max())
            error[i] = max(error[i], off if off == off else np.inf)
    return [name for name, far, size in zip(names, error, most, strict=True) if not far <= ROUNDINGS * eps * size]


def _noise(xp: Any, case: AttentionCase, which: int, seed: int | None = None) -> Any:
    """Normal numbers in an array of the shape and strides of q, k or v."""
    shape, strides = (case.q, case.k, case.k)[which], case.strides[which]
    size = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    numbers = np.random.default_rng(which if seed is None else seed).standard_normal(min(size, PERIOD), np.float32)
    flat = xp.tile(xp.asarray(numbers), -(-size // PERIOD))[:size].astype(case.format)
    return xp.lib.stride_tricks.as_strided(flat, shape, tuple(step * flat.itemsize for step in strides))


def _reference(xp: Any, case: AttentionCase, q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
    """o, lse, dq, dk and dv of the heads of one key, in float32: q, do (heads, T, D), k, v (S, D). The formulas are
    those of `fsdpx.array.kernels.attention`."""
    (heads, t), n = q.shape[:2], k.shape[0]
    o, dq, lse = xp.empty_like(q), xp.empty_like(q), xp.empty(q.shape[:2], dtype=q.dtype)
    dk, dv, step = xp.zeros_like(k), xp.zeros_like(v), max(AT_ONCE // (heads * n), 1)
    columns = xp.arange(n)[None, :]
    for start in range(0, t, step):
        at = (slice(None), slice(start, start + step))
        rows, scores = xp.arange(t)[at[1], None], (q[at] @ k.T) * np.float32(case.scale)
        if case.causal:
            hidden = columns > rows
            hidden = hidden | (columns <= rows - case.window) if case.window else hidden
            scores = xp.where(hidden[None], np.float32(-np.inf), scores)
        top = scores.max(axis=-1, keepdims=True)
        p = xp.exp(scores - top)
        total = p.sum(axis=-1, keepdims=True)
        p = p / total
        o[at], lse[at] = p @ v, (top + xp.log(total))[..., 0]
        ds = p * (do[at] @ v.T - (do[at] * o[at]).sum(axis=-1, keepdims=True)) * np.float32(case.scale)
        dq[at] = ds @ k
        dk += (ds.swapaxes(1, 2) @ q[at]).sum(axis=0)
        dv += (p.swapaxes(1, 2) @ do[at]).sum(axis=0)
    return o, lse, dq, dk, dv
