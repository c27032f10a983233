"""How near are predictions to steps that are measured here: random conv nets and U-Nets, on one and two ranks.

    python bench/predictions.py [--count 40] [--seed 0] [--quick]

The machine is measured with as many ranks just before its steps. A step is the median of some; ranks share the cores.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from jobs import environ, finish, mpiexec, start
from records import arguments, lines, save

__all__ = ["Configuration", "drawn", "tables"]

RANKS = 1, 2
STRATEGIES = "ddp", "zero1", "zero2", "fsdp"
CELLS = {1: 1 << 15, 2: 1 << 13, 3: 1 << 12}
"""Cells of a batch for each dim of a field, about."""
SECONDS, STEPS = 2.0, 5
"""Steps are repeated for so long, and at least so often."""
WORK = (2e8, 2e10)
"""FLOP of forward on one rank: shorter steps are those of Python, longer ones of no user of two cores."""


@dataclass(frozen=True)
class Configuration:
    """A model of `kind` over fields, "chain", "depthwise" or "unet", and how it is trained."""

    kind: str
    dims: int
    width: int
    depth: int
    kernel: int
    norm: str | None
    activation: str
    cells: tuple[int, ...]
    samples: int
    ranks: int
    strategy: str
    precision: str | None
    microbatches: int
    recompute: str | None
    space: tuple[int, ...] | None

    @property
    def words(self) -> str:
        """For a table."""
        model = f"{self.kind}{self.dims}d w{self.width} d{self.depth} k{self.kernel} {self.norm} {self.activation}"
        field = f"{self.samples}x{'x'.join(map(str, self.cells))}"
        means = [self.strategy, self.precision or "float32", f"mb={self.microbatches}"]
        means += ["recompute"] * bool(self.recompute) + [f"domain={self.space}"] * bool(self.space)
        return f"{model} {field} {' '.join(means)}"


def drawn(numbers: random.Random, ranks: int) -> Configuration:
    """A random one."""
    dims, kind = numbers.choice((1, 2, 3)), numbers.choice(("chain", "unet", "depthwise"))
    width, depth = numbers.choice((4, 8, 16, 24, 32, 48)), numbers.choice((1, 2, 3))
    side = {1: (512, 1024, 2048), 2: (32, 48, 64), 3: (8, 16, 24)}[dims]
    cells = tuple(numbers.choice(side) for _ in range(dims))
    microbatches = numbers.choice((1, 1, 2))
    samples = max(round(numbers.choice((1, 2, 4)) * CELLS[dims] / prod(cells)), 1)
    samples = -(-samples // (ranks * microbatches)) * ranks * microbatches
    kernel = 3 if kind == "unet" else numbers.choice((1, 3, 3, 5, 7) if dims < 3 else (1, 3, 3, 5))
    space = numbers.choice((None, (2,) + (1,) * (dims - 1))) if ranks == 2 and microbatches == 1 else None
    return Configuration(
        kind, dims, width, depth, kernel, numbers.choice(("batch", "group", None)),
        numbers.choice(("relu", "gelu", "silu")), cells, samples, ranks, numbers.choice(STRATEGIES[: 4 * ranks - 3]),
        numbers.choice((None, "bf16")), microbatches, numbers.choice((None, None, "all")), space,
    )  # fmt: skip


def model_of(one: Configuration) -> Any:
    """The model: a U-Net, or a chain of convolutions with pools, some of them depthwise."""
    from fsdpx import nn

    if one.kind == "unet":
        return nn.UNet(3, 2, one.dims, one.width, one.depth, norm=one.norm, activation=one.activation)
    kind = getattr(nn, f"Conv{one.dims}d")
    activation = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}[one.activation]
    layers, channels, w = list[Any](), 3, one.width
    for level in range(one.depth):
        groups = channels if one.kind == "depthwise" and level else 1
        made = w if groups == 1 else channels
        layers.append(kind(channels, made, one.kernel, padding=one.kernel // 2, groups=groups))
        layers += [kind(channels, w, 1)] if groups > 1 else []
        layers += [] if one.norm is None else [nn.BatchNorm(w) if one.norm == "batch" else nn.GroupNorm(w // 4, w)]
        layers.append(activation())
        if level == 0 and one.depth > 2:
            layers.append(getattr(nn, f"MaxPool{one.dims}d" if one.width % 3 else f"AvgPool{one.dims}d")(2))
        channels, w = w, w * (1 + (one.depth == 3))
    return nn.Sequential(*layers, kind(channels, 2, 1))


def batch_of(one: Configuration) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes of the global batch."""
    pooled = 2 if one.kind != "unet" and one.depth > 2 else 1
    cells = tuple(n // pooled for n in one.cells)
    return ((one.samples, 3, *one.cells), "float32"), ((one.samples, 2, *cells), "float32")


def options_of(one: Configuration) -> dict[str, Any]:
    """What `predict` and `distribute` are asked for."""
    named = {name: getattr(one, name) for name in ("strategy", "precision", "microbatches", "recompute")}
    return named | ({} if one.space is None else {"domain": one.space})


def flops_of(one: Configuration) -> float:
    """FLOP of a forward of one rank, by a dry run."""
    from fsdpx.core.array.shapes import ShapeArray
    from fsdpx.core.array.shapes.flop_counter import counting_work
    from fsdpx.nn.layer_list import linearize
    from fsdpx.nn.shape_inference import output_shapes

    (shape, _), _ = batch_of(one)
    with counting_work() as work:
        output_shapes(linearize(model_of(one)), [ShapeArray(shape, "float32")])
    return work.flops / one.ranks


def predicted(one: Configuration, machine: Any) -> Any:
    """What the planner says of it."""
    from fsdpx import plan

    return plan.predict(model_of(one), batch_of(one), ranks=one.ranks, machine=machine, **options_of(one))


def main() -> int:
    if sys.argv[1:2] == ["job"]:
        return job(json.loads(sys.argv[2]))
    p = arguments(__doc__, rounds=1)
    p.add_argument("--count", type=int, default=40)
    p.add_argument("--seed", type=int, default=0)
    options = p.parse_args()
    count = 2 if options.quick else options.count
    found: dict[str, Any] = {"rows": [], "machines": {}}
    for ranks in RANKS:
        some = chosen(options.seed, count // len(RANKS), ranks)
        measure(options, found, ranks, some)
    for title, text in tables(found):
        print(f"{title}\n{text}\n", flush=True)
    return 0


def chosen(seed: int, count: int, ranks: int) -> list[Configuration]:
    """So many random ones whose work is within `WORK`, and whose fields can be cut."""
    numbers, some = random.Random(f"{seed} {ranks}"), list[Configuration]()
    while len(some) < count:
        one = drawn(numbers, ranks)
        pooled = one.kind != "unet" and one.depth > 2  # a plan cuts targets as it cuts inputs
        cut = one.space is None or (one.cells[0] % 2 ** (one.depth + 1) == 0 and not pooled)
        if cut and WORK[0] <= flops_of(one) <= WORK[1]:
            some.append(one)
    return some


def measure(options: argparse.Namespace, found: dict[str, Any], ranks: int, some: Sequence[Configuration]) -> None:
    """The machine, then the steps of some configurations on so many ranks."""
    here = [sys.executable] if ranks == 1 else mpiexec(ranks)
    for round in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "machine.toml")
            command = [*here, "-m", "fsdpx", "measure-machine", "--output", str(path)]
            began = time.perf_counter()
            subprocess.run(command, env=environ(cores() // ranks), check=True, capture_output=True)
            found["machines"][f"{ranks} ranks, round {round}"] = path.read_text()
            found["seconds of measuring"] = found.get("seconds of measuring", []) + [time.perf_counter() - began]
            for one in some:
                command = [*here, str(Path(__file__)), "job", json.dumps(asdict(one))]
                load = os.getloadavg()[0]
                seen = finish(start(command, environ(cores() // ranks)), patience=300)
                expected = predicted(one, path)
                row = {"words": one.words, "ranks": ranks, "round": round, "load": load, **seen}
                row |= {"predicted": expected.seconds, "parts": dict(expected.parts), "configuration": asdict(one)}
                found["rows"].append(row)
                ratio = expected.seconds / seen["seconds"] if "seconds" in seen else float("nan")
                print(f"{ratio:.2f}  {row['predicted']:.4f} of {seen.get('seconds', seen)}  {one.words}", flush=True)
                save("predictions", options, found)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def job(given: dict[str, Any]) -> int:
    """Steps of a configuration on these ranks; rank 0 prints the median and the least seconds."""
    import numpy as np

    import fsdpx
    from fsdpx import nn, optim

    one = Configuration(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    comm = fsdpx.init()
    numbers, arrays, choices = np.random.default_rng(comm.rank), [], options_of(one)
    if one.space is not None:
        cut = [n // width for n, width in zip(one.cells, one.space, strict=True)]
        choices["domain"] = fsdpx.Grid(comm, tuple(cut), dims=one.space, layout="c" + "zyx"[3 - one.dims :])
    for (samples, channels, *cells), dtype in batch_of(one):
        if one.space is None:
            shape = (samples // one.ranks, channels, *cells)
        else:
            shape = (samples, channels, *(n // width for n, width in zip(cells, one.space, strict=True)))
        arrays.append(numbers.standard_normal(shape, dtype))
    trainer = model_of(one).as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(lr=1e-4), tune=False, **choices)
    times: list[float] = []
    trainer.step(*arrays)
    trainer.step(*arrays)
    while (comm.all_gather_object(sum(times))[0] < SECONDS) or len(times) < STEPS:
        comm.barrier().wait()
        begin = time.perf_counter()
        trainer.step(*arrays)
        times.append(time.perf_counter() - begin)
    if comm.rank == 0:
        print(json.dumps({"seconds": statistics.median(times), "least": min(times), "steps": len(times)}), flush=True)
    return 0


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows, errors = [], []
    for row in found["rows"]:
        if "seconds" not in row:
            rows.append((row["words"], str(row["ranks"]), "", f"{row['predicted']:.4f}", row.get("failed", "failed")))
            continue
        error = row["predicted"] / row["seconds"] - 1
        errors.append(error)
        times = f"{row['seconds']:.4f}", f"{row['predicted']:.4f}"
        rows.append((row["words"], str(row["ranks"]), *times, f"{error:+.0%}"))
    each = [abs(e) for e in errors]
    ends = f"median error {statistics.median(each):.1%}, largest {max(each):.0%}, {len(each)} steps" if each else ""
    head = ("configuration", "ranks", "measured s", "predicted s", "error")
    return [(f"predictions: {ends}", lines(head, rows))]


if __name__ == "__main__":
    sys.exit(main())
