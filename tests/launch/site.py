"""A field of PETSc's, trained on the ranks and the communicator that have it: what `.ci/site` starts.

Arguments: modules that must be imported beside fsdpx. Prints the losses, which are those of any number of ranks."""

import importlib
import sys

import numpy as np
from petsc4py import PETSc

from fsdpx import nn, optim

for name in sys.argv[1:]:
    importlib.import_module(name)

ROWS, COLUMNS = 12, 8
periodic = PETSc.DMDA.BoundaryType.PERIODIC
da = PETSc.DMDA().create((ROWS, COLUMNS), dof=1, stencil_width=1, boundary_type=(periodic, periodic))
(low, high), (left, right) = da.getRanges()
i, j = np.meshgrid(np.arange(low, high), np.arange(left, right), indexing="ij")
u = da.createGlobalVector()
da.getVecArray(u)[:] = np.sin(2 * np.pi * i / ROWS) + np.cos(2 * np.pi * j / COLUMNS)
samples = np.asarray(da.getVecArray(u)[:]).reshape(-1, 1)
target = (samples**2).reshape(-1, 1)

model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
trainer = model.as_distributed(
    loss=nn.MSELoss(), optimizer=optim.AdamW(lr=1e-2), precision="float64", seed=0, comm=da.comm.tompi4py()
)
losses = [float(trainer.step(samples, target)) for _ in range(5)]
trainer.close()
assert losses[-1] < losses[0]
if da.comm.rank == 0:
    print(f"{da.comm.size} ranks with {', '.join(sys.argv[1:])}: {' '.join(f'{loss:.10f}' for loss in losses)}")
