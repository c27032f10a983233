"""A Fortran solver on all ranks but one, and a network on the last rank that learns the solver's step: mpiexec -n 3
python fortran_heat.py heat.so

Arrays are passed to Fortran by pointer, in Fortran's order of dims: a NumPy array of order "F" is u(x, y) in Fortran.
For C, use order "C" and the layout "yx". A Fortran routine that communicates takes the integer `comm.py2f()`. A Fortran
program that calls Python passes its integer to `MPI.Comm.f2py(integer)`, and a C program passes `MPI_Comm_c2f(comm)`.
"""

import ctypes
import sys

import numpy as np
from mpi4py import MPI

import fsdpx
from fsdpx import data, nn, optim

NX, NY, STEPS, FACTOR = 16, 12, 30, 0.2


def exchange_ghosts(comm, u):
    """Copy the edge cells of neighbors along y into the ghost cells. Along x, the walls reflect."""
    up = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL
    down = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    u[:, 0], u[:, -1] = u[:, 1], u[:, -2]  # at walls
    # in Fortran order, a column is contiguous
    comm.Sendrecv(u[:, -2], up, recvbuf=u[:, 0], source=down)
    comm.Sendrecv(u[:, 1], down, recvbuf=u[:, -1], source=up)
    u[0], u[-1] = u[1], u[-2]


def solve(comm, world, library):
    advance = ctypes.CDLL(library).advance
    advance.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double, ctypes.c_void_p]
    rows = np.array_split(np.arange(NY), comm.size)[comm.rank]
    u = np.zeros((NX + 2, len(rows) + 2), order="F")
    u[1:-1, 1:-1] = np.sin(np.arange(NX)[:, None]) * np.cos(rows) + 1
    grid = fsdpx.Grid(comm, (NX, len(rows)), dims=(1, comm.size), layout="xy", ghosts=1)
    with fsdpx.Bridge(world, solver=grid, mode="lockstep") as bridge:
        for step in range(STEPS):
            before = u[1:-1, 1:-1].copy()
            exchange_ghosts(comm, u)
            advance(NX, len(rows), FACTOR, u.ctypes.data)
            bridge.send(before, u, step=step)  # ghost cells are not sent
    return float(comm.allreduce(u[1:-1, 1:-1].sum()))


def train(comm, world):
    grid = fsdpx.Grid(comm, (NY, NX), dims=(1, 1), layout="yx")
    net = nn.Conv2d(1, 1, 3, padding=1, padding_mode="replicate")
    trainer = net.as_distributed(loss=nn.MSELoss(), optimizer=optim.Adam(lr=0.02), domain=grid)
    buffer, losses = data.ReplayBuffer(10, grid, "reservoir"), []
    with fsdpx.Bridge(world, trainer=grid, mode="lockstep") as bridge:
        for snapshot in bridge:
            buffer.add(*(field.astype(np.float32) for field in snapshot.fields))
            losses += [trainer.step(*buffer.sample(4).fields) for _ in range(10)]
    return losses[0], losses[-1]


def main():
    fsdpx.init()
    world = MPI.COMM_WORLD
    trains = world.rank == world.size - 1
    part = world.Split(int(trains))
    found = train(part, world) if trains else solve(part, world, sys.argv[1])
    first, last = world.bcast(found, world.size - 1)
    if world.rank == 0:
        print(f"heat {found:.4f}; loss {first:.2e} at first, {last:.2e} at last")


if __name__ == "__main__":
    main()
