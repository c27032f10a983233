"""Heat by py-pde, and a network that learns its steps on the same ranks: mpiexec -n 4 python pypde_heat.py heat"""

import sys
from pathlib import Path

import numpy as np
import pde
from mpi4py import MPI
from pde.grids._mesh import GridMesh

import fsdpx
from fsdpx import nn, optim

CELLS, STEPS, AROUND = (24, 20), 10, "auto_periodic_neumann"


def main(comm, folder):
    """Ten steps; those of a job before are in `folder`, the state of the solver among them."""
    space = pde.UnitGrid(CELLS, periodic=[False, True])
    mine = GridMesh.from_grid(space, -1).current_grid
    offsets = [round(low) for low, _ in mine.axes_bounds]  # of cells of size 1
    grid = fsdpx.Grid(comm, mine.shape, offsets=offsets, layout="xy")
    net = nn.Conv2d(1, 1, 3, padding=1, padding_mode=("replicate", "circular"))
    trainer = net.as_distributed(
        loss=nn.RelativeL2(),
        optimizer=optim.AdamW(lr=1e-2),
        domain=grid,
        precision="float64",
    )
    u = pde.ScalarField(mine)
    if folder.is_dir():
        trainer.load(folder)
        u.data = grid.take_local(np.load(folder.with_suffix(".npy")))
    else:
        x, y = mine.axes_coords
        u.data = np.exp(-((x[:, None] - 8) ** 2 + (y - 11) ** 2) / 20)
    losses = []
    for _ in range(STEPS):
        before = u.data.copy()
        u.data += 0.2 * u.laplace(AROUND).data
        losses.append(trainer.step(before, u.data))
    trainer.save(folder)
    whole = grid.all_gather(u.data)
    if comm.rank == 0:
        np.save(folder.with_suffix(".npy"), whole)
        print(" ".join(f"{loss:.6f}" for loss in losses), flush=True)
    trainer.close()


if __name__ == "__main__":
    main(MPI.COMM_WORLD, Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoint"))
