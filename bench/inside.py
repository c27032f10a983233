"""One model's step taken apart in this process: every product, kernel and update clocked. A job of `breakdown.py`.

    python bench/inside.py small [--precision bf16] [--rounds 4] [--seconds 0.3]

Prints one line of JSON.
"""

import argparse
import functools
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from tiles import AGAIN, tiles
from workloads import MODELS, TIME, Model, batch, in_fsdpx

from fsdpx import optim
from fsdpx.array import blas, kernels
from fsdpx.array.blas import gemm, halves  # under these names products stay unclocked
from fsdpx.array.blas.halves import product
from fsdpx.array.kernels.compiled import words
from fsdpx.array.namespace import dtype

TILE = 64  # rows of a tile of attention

Product = tuple[Any, Any, Any]  # out, a, b of out = a @ b


def _of_gemm(out: Any, a: Any, b: Any, *_: Any) -> list[Product]:
    return [(out, a, b)]


def _of_affine(out: Any, x: Any, weight: Any, *_: Any) -> list[Product]:
    return [(out, x, weight.T)]


def _of_gradients(weight: Any, bias: Any, dy: Any, x: Any) -> list[Product]:
    return [(weight[0], dy.T, x)] if weight else []


def _of_backward(dx: Any, weight: Any, bias: Any, dy: Any, x: Any, by: Any) -> list[Product]:
    return [(dx, dy, by), *_of_gradients(weight, bias, dy, x)]


PRODUCTS = {
    "gemm": _of_gemm,
    "product": _of_gemm,
    "affine": _of_affine,
    "linear_gradients": _of_gradients,
    "linear_backward": _of_backward,
}
"""The functions of `fsdpx.array.blas` that multiply, `product` 16-bit numbers, and the products in their arguments."""


@dataclass
class Spent:
    calls: int = 0
    seconds: float = 0.0


@dataclass
class Clock:
    """Seconds of each clocked function, without those of the clocked functions that it calls; products by shape."""

    spent: dict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    first: dict[str, list[Product]] = field(default_factory=dict)
    inner: list[float] = field(default_factory=lambda: [0.0])
    on: bool = True

    def around(self, function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(function)
        def clocked(*arguments: Any, **options: Any) -> Any:
            if not self.on:
                return function(*arguments, **options)
            label = name(*arguments)
            self.inner.append(0.0)
            begin = perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                taken = perf_counter() - begin
                entry = self.spent[label]
                entry.calls += 1
                entry.seconds += taken - self.inner.pop()
                self.inner[-1] += taken

        return clocked

    def product(self, kind: str, *arguments: Any) -> str:
        """The label of a call that multiplies, by its first product; the arrays of the first such call are kept."""
        products = PRODUCTS[kind](*arguments)
        if not products:
            return kind
        _, a, b = products[0]
        label = f"{kind} {a.shape[0]} x {b.shape[1]} x {a.shape[1]}"
        self.first.setdefault(label, products)
        return label


def attach(clock: Clock, trainer: Any) -> None:
    """Clock products, kernels and the optimiser of a trainer, wherever their names were imported to."""
    for name in PRODUCTS:
        function = getattr(halves if name == "product" else blas, name)
        _replace(function, clock.around(function, functools.partial(clock.product, name)))
    for name in kernels.__all__:
        kernel = getattr(kernels, name)
        if callable(kernel) and name not in ("use", "chosen"):
            _replace(kernel, clock.around(kernel, lambda *_, name=name: name))
    kind = type(trainer.placement.optimizer)
    kind.update = clock.around(kind.update, lambda *_: "optimiser")


def _replace(function: Any, by: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fsdpx":
            for key, value in list(vars(module).items()):
                if value is function:
                    setattr(module, key, by)


def alone(products: list[Product], seconds: float) -> float:
    """Seconds of a call's products by themselves: medians of repetitions on copies."""
    copies = [[np.copy(array, order="K") for array in product] for product in products]
    multiply = product if copies[0][1].dtype.itemsize == 2 else gemm
    return sum(_repeated(lambda arrays=arrays: multiply(*arrays), seconds / len(copies)) for arrays in copies)


def tile(model: Model, seconds: float, bf16: bool) -> float:
    """FLOP/s of a tile of attention by itself."""
    width = model.width // model.heads
    q, k, s = (np.ones(shape, np.float32) for shape in ((TILE, width), (TIME, width), (TILE, TIME)))
    if bf16 and words.available():
        q, k = q.astype(dtype("bf16")), np.ones((width // 2, TIME), np.uint32)
        at = q.ctypes.data, 2 * width, 4, k.ctypes.data, 4 * TIME, s.ctypes.data, 4 * TIME, TILE, TIME, width // 2
        return AGAIN * 2 * TILE * TIME * width / _repeated(lambda: tiles(*at), seconds)
    return 2 * TILE * TIME * width / _repeated(lambda: gemm(s, q, k.T), seconds)


def _repeated(run: Callable[[], Any], seconds: float) -> float:
    run()
    taken: list[float] = []
    end = perf_counter() + seconds
    while len(taken) < 3 or perf_counter() < end:
        taken.append(_seconds(run))
    return float(np.median(taken))


def flops(model: Model, name: str) -> float:
    """Of one call of an attention kernel over the lower triangle: two products of time x time x width, or five."""
    products = {"attention": 2, "attention_backward": 5}.get(name, 0)
    return products * model.rows * TIME * TIME * model.width if model.heads else 0.0


def of_products(products: list[Product]) -> float:
    return sum(2.0 * a.shape[0] * a.shape[1] * b.shape[1] for _, a, b in products)


def breakdown(name: str, precision: str, rounds: int, seconds: float) -> dict[str, Any]:
    """The step of one model: rows by function, in seconds per step; in every round a bare step, a clocked one, and
    each product alone, for the machine may be faster in the next."""
    model = MODELS[name]
    layers, loss = in_fsdpx(model)
    trainer = layers.as_distributed(loss=loss, optimizer=optim.AdamW(lr=3e-4), strategy="ddp", precision=precision)
    x, y = batch(model)
    clock = Clock()
    attach(clock, trainer)
    for _ in range(2):
        trainer.step(x, y)
    clock.spent.clear()
    bare, clocked, speeds = [], [], defaultdict(list)
    for _ in range(rounds):
        clock.on = False
        bare.append(_seconds(lambda: trainer.step(x, y)))
        clock.on = True
        clocked.append(_seconds(lambda: trainer.step(x, y)))
        for label, products in clock.first.items():
            speeds[label].append(of_products(products) / alone(products, seconds / rounds))
        for label in ("attention", "attention_backward") if model.heads else ():
            speeds[label].append(tile(model, seconds / rounds, precision == "bf16"))
    work = {label: of_products(products) for label, products in clock.first.items()}
    work |= {label: flops(model, label) for label in clock.spent if label not in work}
    rows = [_row(label, spent, rounds, work[label], speeds) for label, spent in clock.spent.items()]
    step = float(np.mean(clocked))
    rest = step - sum(r["seconds"] for r in rows)
    rows.append({"part": "Python and NumPy between", "calls": 0, "seconds": rest})
    return {
        "model": name,
        "blas": blas.chosen() if precision == "float32" else halves.chosen(),
        "step": step,
        "bare": float(np.mean(bare)),
        "rows": sorted(rows, key=lambda r: -r["seconds"]),
    }


def _row(label: str, spent: Spent, rounds: int, work: float, speeds: dict[str, list[float]]) -> dict[str, Any]:
    """Per step: calls, seconds, and for products the floating-point operations and the seconds that they take alone."""
    calls = spent.calls / rounds
    row = {"part": label, "calls": calls, "seconds": spent.seconds / rounds}
    if label not in speeds:
        return row
    return row | {"flops": calls * work, "alone": calls * work / float(np.median(speeds[label]))}


def _seconds(run: Callable[[], Any]) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", choices=MODELS)
    p.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    p.add_argument("--rounds", type=int, default=4)
    p.add_argument("--seconds", type=float, default=0.3, help="of each product by itself")
    options = p.parse_args()
    print(json.dumps(breakdown(options.model, options.precision, options.rounds, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
