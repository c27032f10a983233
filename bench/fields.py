"""How fast is training on fields that lie over ranks, prediction beside a solver, and a convolution, next to PyTorch?

    python bench/fields.py [--models unet3d unet2d fno2d] [--rounds 6] [--seconds 1] [--quick]

Training as in `side_by_side.py`: two ranks that hold halves of a sample take turns with one process of PyTorch with two
threads. Prediction: the ranks of a solver predict on their own parts, and gather them for PyTorch on one of them, in
turns. Convolutions: kernels by shape beside oneDNN's, one thread each, in turns.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import side_by_side
from jobs import Job, environ, finish, mpiexec, start
from records import lines

JOBS = [Job("torch", "single", 1, 2), Job("fsdpx-parts", "ddp", 2)]
SHAPES = ((8, 8, 64, 64, 64), (16, 16, 32, 32, 32), (64, 64, 8, 8, 8), (32, 32, 256, 256), (128, 128, 64, 64),
          (3, 16, 256, 256))  # fmt: skip
"""Channels in and out, and cells, of windows of 3 cells."""
SIDE, WIDTH, CALLS = 256, 16, 10
__all__ = ["tables"]


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    head = ["in", "out", "cells", *(f"{name} {unit}" for name in ("y", "dx", "dw") for unit in ("GFLOP/s", "ratio"))]
    rows = []
    for row in found["convolutions"]:
        speeds = [f"{value:.{n % 2 * 2}f}" for n, value in enumerate(row["speeds"])]
        rows.append([*map(str, row["shape"][:2]), " x ".join(map(str, row["shape"][2:])), *speeds])
    p = found["predict"]
    text = p.get("failed") or "{ours_ms:.1f} ms, gather + PyTorch + scatter {theirs_ms:.1f} ms: {ratio:.2f}".format(**p)
    return [*side_by_side.tables(found), ("convolutions", lines(head, rows)), ("predict", text)]


def in_turns(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, calls: int = 1) -> tuple[float, ...]:
    """Seconds of a call of both, the quickest, and the median of their ratios."""
    taken: list[list[float]] = []
    for call in (ours, theirs):
        call()
    for _ in range(rounds):
        turn = []
        for call in (ours, theirs):
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            turn.append((time.perf_counter() - begin) / calls)
        taken.append(turn)
    best = [min(column) for column in zip(*taken, strict=True)]
    return best[0], best[1], median(b / a for a, b in taken)


def convolutions(rounds: int) -> list[dict[str, Any]]:
    import torch

    from fsdpx.ext.fields import kernels as windows
    from fsdpx.ext.fields.kernels import WindowStrides

    torch.set_num_threads(1)
    found = []
    for inner, outer, *cells in SHAPES:
        dims, rng = len(cells), np.random.default_rng(0)
        one, strides = [1] * dims, WindowStrides((3,) * dims, (1,) * dims, (1,) * dims, (-1,) * dims, 1)
        x, dy = (np.moveaxis(rng.standard_normal((1, *cells, n), np.float32), -1, 1) for n in (inner, outer))
        w = rng.standard_normal((outer, inner, *(3,) * dims), np.float32)
        there, slope, weight = (torch.from_numpy(np.ascontiguousarray(a)) for a in (x, dy, w))

        def back(*wanted: bool, a: Any = (slope, there, weight), one: Any = one) -> Any:
            rest = one, one, one, False, [0] * len(one), 1, [*wanted, False]
            return torch.ops.aten.convolution_backward(*a, None, *rest)

        forward, into = torch.conv2d if dims == 2 else torch.conv3d, (w, False)
        pairs = (
            (partial(windows.correlate, np, x, w, None, strides, cells), partial(forward, there, weight, None, 1, 1)),
            (partial(windows.correlate_backward_input, np, w, dy, strides, x.shape), partial(back, True, False)),
            (partial(windows.correlate_backward_params, np, x, dy, strides, into, None), partial(back, False, True)),
        )
        flops, speeds = 2.0 * inner * outer * 3**dims * np.prod(cells), []
        for ours, theirs in pairs:
            seconds, _, ratio = in_turns(ours, theirs, rounds)
            speeds += [flops / seconds / 1e9, ratio]
        found.append({"shape": [inner, outer, *cells], "speeds": speeds})
    return found


def predict(rounds: int) -> None:
    """A rank of the solver."""
    import torch
    from mpi4py import MPI

    import fsdpx
    from fsdpx import nn

    comm = MPI.COMM_WORLD.Create_cart((MPI.COMM_WORLD.size, 1), periods=(False, True))
    u = np.random.default_rng(comm.rank).standard_normal((SIDE // comm.size, SIDE, 3), np.float32)
    grid = fsdpx.Grid(comm, u.shape[:2], layout="yxc")
    sizes, torch_net = ((3, WIDTH), (WIDTH, WIDTH), (WIDTH, 3)), torch.nn.Sequential()
    layers = [part for pair in sizes for part in (nn.Conv2d(*pair, 3, padding=1), nn.GELU())]
    for pair in sizes:
        torch_net.extend([torch.nn.Conv2d(*pair, 3, padding=1), torch.nn.GELU()])
    trainer = nn.Sequential(*layers[:-1]).as_distributed(domain=grid, strategy="ddp")
    whole = np.empty((SIDE, SIDE, 3), np.float32) if comm.rank == 0 else None
    v = np.empty_like(u)

    def gathered() -> None:
        comm.Gather(u, whole)
        if whole is not None:
            with torch.inference_mode():
                y = torch_net[:-1](torch.from_numpy(whole).permute(2, 0, 1)[None])[0].permute(1, 2, 0)
            np.copyto(whole, y.numpy())
        comm.Scatter(whole, v)

    ours, theirs, ratio = in_turns(lambda: trainer.predict(u), gathered, rounds, CALLS)
    if comm.rank == 0:
        print(json.dumps({"ours_ms": ours * 1e3, "theirs_ms": theirs * 1e3, "ratio": ratio}), flush=True)


def more(found: dict[str, Any]) -> str:
    found["convolutions"] = convolutions(found["rounds"])
    found["predict"] = finish(start([*mpiexec(2), __file__, "--rank", str(found["rounds"])], environ()), 120.0)
    return "\n\n".join(text for _, text in tables(found)[-2:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        predict(int(sys.argv[2]))
    else:
        sys.exit(side_by_side.compare(__doc__, "fields", JOBS, more, ("unet3d", "unet2d", "fno2d")))
