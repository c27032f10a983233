"""Matrices in 8 and 4 bits beside float32 and bf16: products of x (rows, n) and a matrix (n, n) in microseconds, and a
GPT of 25 million parameters that is evaluated, in milliseconds.

    python bench/packed.py [--rows 1 8 64 512 4096] [--sizes 512 2048] [--seconds 1] [--threads 1] [--quick]

The ways take turns and the fastest call counts. Up to 64 rows each product takes another matrix, of 64 MiB in all: in a
model, too, a matrix comes from memory, not from the cache. In brackets: how many times as fast as float32.
"""

import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
from records import arguments, lines, save

from fsdpx import Precision, nn, optim
from fsdpx.array import blas, parallel
from fsdpx.array.namespace import dtype
from fsdpx.array.nf4 import NF4
from fsdpx.array.packed import Packed, PackedInt8, Packing
from fsdpx.layout.packed import PackedRows
from fsdpx.nn import numeric

SINGLE, BF16 = np.dtype(np.float32), dtype("bf16")
FEW, MEMORY = 64, 64 << 20
WAYS: dict[str, tuple[Any, Callable[[np.ndarray], Any]]] = {
    "float32": (SINGLE, lambda w: w),
    "int8": (SINGLE, lambda w: packed(w, PackedInt8(None, SINGLE))),
    "int8, block 64": (SINGLE, lambda w: packed(w, PackedInt8(64, SINGLE))),
    "nf4": (SINGLE, lambda w: packed(w, NF4(SINGLE))),
    "bf16": (BF16, lambda w: w.astype(BF16)),
    "bf16, int8": (BF16, lambda w: packed(w, PackedInt8(None, BF16))),
}
"""Name -> the format of x, and the matrix as it is multiplied by."""


def packed(values: np.ndarray, packing: Packing) -> Packed:
    columns = values.shape[1]
    stored = np.zeros((len(values), packing.stride(columns)), np.uint8)
    PackedRows("", stored, columns, packing)[...] = values.reshape(-1)
    return Packed(stored.reshape(-1), (len(values), columns), packing)


def measured(rows: int, size: int, seconds: float) -> dict[str, float]:
    """Microseconds by way."""
    random = np.random.default_rng(0)
    count = max(MEMORY // (4 * size * size), 1) if rows <= FEW else 1
    matrices = [random.standard_normal((size, size), np.float32) for _ in range(count)]
    cases = {name: ([make(w) for w in matrices], np.ones((rows, size), of)) for name, (of, make) in WAYS.items()}
    best, end = dict.fromkeys(cases, float("inf")), 0.0
    while end == 0.0 or perf_counter() < end:
        for name, (some, x) in cases.items():
            begin = perf_counter()
            for w in some:
                numeric.affine(np, x, w, None)
            if end:  # the first round makes everything ready
                best[name] = min(best[name], (perf_counter() - begin) / count)
        end = end or perf_counter() + seconds
    return {name: 1e6 * time for name, time in best.items()}


FORMATS = {
    "float32": Precision(),
    "int8": Precision(frozen="int8"),
    "int8, block 64": Precision(frozen="int8", block=64),
    "nf4": Precision(frozen="nf4"),
    "bf16": Precision("bf16"),
    "bf16, int8": Precision("bf16", frozen="int8"),
}
BATCHES = ((1, 1), (8, 1), (8, 256))
"""(samples, tokens)."""


def evaluated(seconds: float) -> Iterator[tuple[str, dict[str, float]]]:
    """What is measured, and its figure by way: milliseconds of each batch, and MiB of parameters."""
    model = nn.GPT(vocab=256, d_model=512, n_layers=8, n_heads=8, seq_len=256)
    choices: dict[str, Any] = {
        "loss": nn.CrossEntropy(),
        "optimizer": optim.SGD(lr=0.1),
        "frozen": ["*"],
        "tune": False,
    }
    trainers = {name: model.as_distributed(**choices, precision=precision) for name, precision in FORMATS.items()}
    for shape in BATCHES:
        tokens = np.random.default_rng(0).integers(0, 256, shape)
        best, end = dict.fromkeys(trainers, float("inf")), 0.0
        while end == 0.0 or perf_counter() < end:
            for name, trainer in trainers.items():
                begin = perf_counter()
                trainer.evaluate(tokens, tokens)
                if end:
                    best[name] = min(best[name], perf_counter() - begin)
            end = end or perf_counter() + 3 * seconds
        yield f"{shape[0]} x {shape[1]} tokens, ms", {name: 1e3 * time for name, time in best.items()}
    yield "parameters, MiB", {name: t.report().memory["parameters"] / (1 << 20) for name, t in trainers.items()}


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    def cells(figures: dict[str, float]) -> list[str]:
        return [f"{x:,.{0 if x > 99 else 1}f} ({figures['float32'] / x:.1f})" for x in figures.values()]

    products = [[f"{n} x {n}", str(rows), *cells(figures)] for n, rows, figures in found["products"]]
    evaluate = [[what, *cells(figures)] for what, figures in found["evaluate"]]
    return [
        ("libraries", found["libraries"]),
        ("evaluate", lines(["evaluate", *WAYS], evaluate)),
        ("products", lines(["product, us", "rows", *WAYS], products)),
    ]


def main() -> int:
    p = arguments(__doc__, rounds=1)
    p.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64, 512, 4096])
    p.add_argument("--sizes", type=int, nargs="+", default=[512, 2048])
    p.add_argument("--seconds", type=float, default=1.0, help="of each product; an evaluation takes three times that")
    p.add_argument("--threads", type=int, default=1)
    options = p.parse_args()
    parallel.set_threads(options.threads)
    blas.threads(options.threads)
    sizes, rows, seconds = options.sizes, options.rows, options.seconds
    if options.quick:
        sizes, rows, seconds = sizes[:1], rows[:2], 0.05
    found = {
        "libraries": f"float32 by {blas.chosen()}, bf16 by {blas.halves.chosen()}, "
        f"int8 by {blas.integers.chosen() or 'widening'}",
        "products": [[size, count, measured(count, size, seconds)] for size in sizes for count in rows],
        "evaluate": list(evaluated(seconds)),
    }
    save("packed", options, found)
    print("\n\n".join(text for _, text in tables(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
