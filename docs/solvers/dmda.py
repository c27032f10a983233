"""Heat on PETSc's DMDA, and a network that learns its steps on the same ranks: mpiexec -n 4 python dmda.py heat"""

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI  # before petsc4py, which takes the same MPI
from petsc4py import PETSc

import fsdpx
from fsdpx import nn, optim

EAST, NORTH, STEPS = 24, 20, 10


def main(comm, folder):
    """Ten steps; those of a job before are in `folder`, the state of the solver among them."""
    box = {"stencil_width": 1, "stencil_type": "box"}  # a star has no corners
    da = PETSc.DMDA().create((EAST, NORTH), comm=comm, **box)
    (x0, x1), (y0, y1) = da.getRanges()
    (a, b), (c, d) = da.getGhostRanges()  # none at walls
    sides = ((y0 - c, d - y1), (x0 - a, b - x1))
    grid = fsdpx.Grid(da.comm, (y1 - y0, x1 - x0), offsets=(y0, x0), ghosts=sides, layout="yx")
    net = nn.Conv2d(1, 1, 3, padding=1, padding_mode="replicate")
    trainer = net.as_distributed(
        loss=nn.RelativeL2(),
        optimizer=optim.AdamW(lr=1e-2),
        domain=grid,
        precision="float64",
    )
    u, wide = da.createGlobalVec(), da.createLocalVec()
    own = u.array.reshape(grid.local_shape)  # a view: PETSc's x varies fastest
    if folder.is_dir():
        trainer.load(folder)
        own[...] = grid.take_local(np.load(folder.with_suffix(".npy")))
    else:
        y, x = np.mgrid[y0:y1, x0:x1]
        own[...] = np.exp(-((x - 8) ** 2 + (y - 11) ** 2) / 20)
    losses = []
    for _ in range(STEPS):
        da.globalToLocal(u, wide)
        before = wide.array.reshape(d - c, b - a)  # with ghost cells
        own[...] = heat(before, sides)
        losses.append(trainer.step(before, own))
    trainer.save(folder)
    whole = grid.all_gather(own)
    if comm.rank == 0:
        np.save(folder.with_suffix(".npy"), whole)
        print(" ".join(f"{loss:.6f}" for loss in losses), flush=True)
    trainer.close()


def heat(u, sides):
    """The next state of own cells. Walls let nothing through: beyond them it is as warm as before them."""
    u = np.pad(u, [(1 - low, 1 - high) for low, high in sides], mode="edge")
    beside = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]
    return u[1:-1, 1:-1] + 0.2 * (beside - 4 * u[1:-1, 1:-1])


if __name__ == "__main__":
    main(MPI.COMM_WORLD, Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoint"))
