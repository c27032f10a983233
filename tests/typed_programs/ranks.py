"""Ranks, collectives and fields, as type checkers must see them."""

from typing import assert_type

import numpy as np

import fsdpx
from fsdpx import data, nn, optim


def add(comm: fsdpx.Communicator, more: int, word: str = "") -> float:
    return float(fsdpx.all_reduce(np.ones(3)).sum()) + comm.rank + more


assert_type(fsdpx.spawn(add, 4, 1), list[float])
assert_type(fsdpx.spawn(add, 4, 1, "word", timeout=5.0), list[float])
assert_type(fsdpx.spawn(lambda comm: comm.size, 2), list[int])
assert_type(fsdpx.launch(add, 1, ranks=2, logs="logs"), list[float])
assert_type(fsdpx.launch("train.py", "--steps", 10, ranks=2), None)

with fsdpx.init(backend="node") as comm:
    assert_type(comm, fsdpx.Communicator)
assert_type(fsdpx.rank(), int)
x = np.zeros((4, 4))
assert_type(fsdpx.all_reduce(x, "max"), np.ndarray)
assert_type(fsdpx.all_reduce(x, async_op=True).wait(), np.ndarray)
assert_type(fsdpx.all_gather(x), np.ndarray)
assert_type(fsdpx.reduce_scatter(x), np.ndarray)
assert_type(fsdpx.broadcast(x, root=1), np.ndarray)
assert_type(fsdpx.gather(x), np.ndarray | None)


def solve(comm: fsdpx.Communicator) -> np.ndarray:
    grid = fsdpx.Grid(comm, (16, 16), dims=(2, 2), layout="yxc", periods=(True, True))
    trainer = nn.FNO(1, 1, n_modes=(4, 4), width=8).as_distributed(
        loss=nn.RelativeL2(), optimizer=optim.AdamW(), domain=grid, comm=comm
    )
    samples = data.FieldDataset("run.h5", grid, ("u",))
    trainer.fit(data.DataLoader(samples, batch_size=4, comm=comm), epochs=1)
    return trainer.predict(np.zeros(grid.local_array_shape((1,))))


assert_type(fsdpx.spawn(solve, 4), list[np.ndarray])
