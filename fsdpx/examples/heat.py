"""A solver for the heat equation with ghost cells and walls, and a network that learns the solver's steps on the same
ranks.

mpiexec -n 4 python -m fsdpx.examples.heat"""

import numpy as np
from mpi4py import MPI

import fsdpx
from fsdpx import nn, optim

ROWS, COLUMNS = 32, 48  # size of the plate in cells
SPREAD, STATES, RUNS = 0.2, 10, 40

comm = MPI.COMM_WORLD
cart = comm.Create_cart(MPI.Compute_dims(comm.size, 2))
rows, columns = (
    np.array_split(np.arange(n), width)[at]
    for n, width, at in zip((ROWS, COLUMNS), cart.dims, cart.coords, strict=True)
)


def make_random_plate(seed):
    """Return this rank's part of a plate with random temperatures, with one ghost cell
    on each side."""
    whole = np.random.default_rng(seed).random((ROWS, COLUMNS))
    return fill_halo(np.pad(whole[rows[:, None], columns], 1))


def fill_halo(u):
    """Fill the ghost cells with cells from the neighboring ranks. Beyond walls, fill them so that one wall has
    temperature 1 and the other walls are insulated."""
    for dim in range(2):
        before, after = cart.Shift(dim, 1)
        v = np.moveaxis(u, dim, 0)  # view of u with dim `dim` first; the exchange along dim 1 also fills the corners
        low, high = v[1].copy(), v[-2].copy()
        if dim == 1 and before == MPI.PROC_NULL:
            low = 2 - low  # then the mean of the ghost cell and the cell at the wall is 1
        cart.Sendrecv(v[-2].copy(), after, recvbuf=low, source=before)
        cart.Sendrecv(v[1].copy(), before, recvbuf=high, source=after)
        v[0], v[-1] = low, high
    return u


def step_explicitly(u):
    """Return the state after one explicit time step of the heat equation."""
    v, own = u.copy(), u[1:-1, 1:-1]
    v[1:-1, 1:-1] += SPREAD * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * own)
    return fill_halo(v)


def main():
    grid = fsdpx.Grid(cart, (len(rows), len(columns)), ghosts=1, layout="yx")
    net = nn.Residual(nn.Conv2d(1, 1, 3, padding=1))  # the ghost cells are used as padding
    rate = optim.schedules.Cosine(3e-2, RUNS * STATES)
    adam = optim.AdamW(lr=rate, weight_decay=0.0)
    trainer = net.as_distributed(loss=nn.MSELoss(), optimizer=adam, domain=grid)
    for run in range(RUNS):
        u = make_random_plate(run)
        for _ in range(STATES):
            before, u = u, step_explicitly(u)
            loss = trainer.step(before, u)
    u = v = make_random_plate(RUNS)  # a test run that is not in the training data
    for _ in range(STATES):
        u, v = step_explicitly(u), v.copy()
        v[1:-1, 1:-1] = trainer.predict(v)
        v = fill_halo(v)
    worst = comm.allreduce(float(np.abs(v - u).max()), MPI.MAX)
    trainer.close()
    if comm.rank == 0:
        own = f"after {STATES} states of its own the network is off by {worst:.3f}"
        print(f"loss {loss:.1e}, and {own}")


if __name__ == "__main__":
    main()
