"""Heat by Devito, and a network that learns its steps on the same ranks: mpiexec -n 4 python devito_heat.py heat"""

import os
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

os.environ.setdefault("DEVITO_MPI", "1")
from devito import Eq, Grid, Operator, TimeFunction, solve

import fsdpx
from fsdpx import nn, optim

CELLS, STEPS = (24, 20), 10


def main(comm, folder):
    """Ten steps; those of a job before are in `folder`, the state of the solver among them."""
    space = Grid(CELLS, extent=[n - 1 for n in CELLS], comm=comm)
    u = TimeFunction(name="u", grid=space, space_order=2)
    step = Operator(Eq(u.forward, solve(Eq(u.dt, u.laplace), u.forward)))
    mine = space.distributor.glb_slices.values()
    shape, offsets = [s.stop - s.start for s in mine], [s.start for s in mine]
    grid = fsdpx.Grid(space.comm, shape, offsets=offsets, layout="xy")
    net = nn.Conv2d(1, 1, 3, padding=1)
    trainer = net.as_distributed(
        loss=nn.RelativeL2(),
        optimizer=optim.AdamW(lr=1e-2),
        domain=grid,
        precision="float64",
    )
    old, new = (np.asarray(u.data[k]) for k in (0, 1))  # views of own cells
    if folder.is_dir():
        trainer.load(folder)
        old[...] = grid.take_local(np.load(folder.with_suffix(".npy")))
    else:
        x, y = np.mgrid[tuple(mine)]
        old[...] = np.exp(-((x - 8) ** 2 + (y - 11) ** 2) / 20)
    losses = []
    for _ in range(STEPS):
        step(time_m=0, time_M=0, dt=0.2)
        losses.append(trainer.step(old, new))
        old[...] = new
    trainer.save(folder)
    whole = grid.all_gather(old)
    if comm.rank == 0:
        np.save(folder.with_suffix(".npy"), whole)
        print(" ".join(f"{loss:.6f}" for loss in losses), flush=True)
    trainer.close()


if __name__ == "__main__":
    main(MPI.COMM_WORLD, Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoint"))
