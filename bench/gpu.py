"""How much faster is a step on one GPU than on the cores beside it? Prints one table, writes one JSON.

    python bench/gpu.py

One process; both devices take turns. Arrays are CuPy's (extra `cuda12`); a step ends when its loss is on the host.
"""

import statistics
import sys
import time
from typing import Any

from records import arguments, save
from workloads import MODELS, batch, in_fsdpx


def missing() -> str | None:
    """Why there is nothing to measure, or None."""
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "no GPU"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def steps(name: str, device: str, seconds: float) -> float:
    """Median seconds of a step."""
    from fsdpx import optim

    layers, loss = in_fsdpx(MODELS[name])
    trainer = layers.as_distributed(loss=loss, optimizer=optim.AdamW(lr=1e-4), strategy="ddp", device=device)
    x, y = batch(MODELS[name])
    taken, end = [], time.perf_counter() + seconds
    trainer.step(x, y)
    while time.perf_counter() < end or len(taken) < 3:
        begin = time.perf_counter()
        trainer.step(x, y)
        taken.append(time.perf_counter() - begin)
    trainer.close()
    return statistics.median(taken)


def main() -> int:
    options = arguments(__doc__, rounds=2).parse_args()
    if (why := missing()) is not None:
        print(f"nothing measured: {why}")
        return 0
    rates: dict[str, dict[str, Any]] = {}
    for name in ("tiny", "small"):
        found: dict[str, list[float]] = {"cpu": [], "cuda": []}
        for _ in range(options.rounds):
            for device, times in found.items():
                times.append(MODELS[name].per_step / steps(name, device, 1.0 if options.quick else 5.0))
        rates[name] = {device: statistics.median(times) for device, times in found.items()}
        print(f"{name:6} cpu {rates[name]['cpu']:>9,.0f} cuda {rates[name]['cuda']:>9,.0f} {MODELS[name].unit}")
    save("gpu", options, {"rates": rates})
    return 0


if __name__ == "__main__":
    sys.exit(main())
