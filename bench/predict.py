"""How long does a small network take to answer a solver, beside NumPy's own products? One table and a JSON file.

    python bench/predict.py [--rounds 15] [--quick]

Both compute the same layers on the same rows, in turns; each figure is the best of all rounds.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from records import arguments, lines, save

from fsdpx import nn

ROWS, CALLS = (1, 16, 576), 200


def microseconds(call: Callable[[Any], Any], x: Any, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call(x)
    return (time.perf_counter() - begin) / calls * 1e6


def main() -> None:
    options = arguments(__doc__, 15).parse_args()
    trainer = nn.Chain(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).as_distributed()
    p = trainer.parameters()

    def products(x: Any) -> Any:
        for layer in ("0", "2"):
            x = np.tanh(x @ p[f"{layer}.weight"].T + p[f"{layer}.bias"])
        return x @ p["4.weight"].T + p["4.bias"]

    calls, rounds = (20, 2) if options.quick else (CALLS, options.rounds)
    found = []
    for rows in ROWS:
        x = np.random.default_rng(0).standard_normal((rows, 16), np.float32)
        np.testing.assert_allclose(trainer.predict(x), products(x), rtol=1e-4, atol=1e-5)
        turns = [(microseconds(trainer.predict, x, calls), microseconds(products, x, calls)) for _ in range(rounds)]
        ours, theirs = (min(column) for column in zip(*turns, strict=True))
        found.append({"rows": rows, "predict_us": ours, "numpy_us": theirs, "ratio": ours / theirs})
    table = [[str(f["rows"]), *(f"{f[name]:.1f}" for name in ("predict_us", "numpy_us", "ratio"))] for f in found]
    print(lines(["rows", "predict us", "NumPy us", "ratio"], table))
    save("predict", options, {"rows": found})


if __name__ == "__main__":
    main()
