"""The solver of channel.py, which trains a network on its own ranks: mpiexec -n 4 python learn.py"""

import numpy as np
from mpi4py import MPI

import fsdpx
from fsdpx import nn, optim

ROWS, COLUMNS = 32, 48  # size in cells; walls at the first and last row, periodic columns
SMALL, DT, VISCOSITY = 10, 0.2, 0.12  # number of small steps from state to state, length of a small step, viscosity
STATES = 20  # number of states in a run of the solver

comm = MPI.COMM_WORLD
cart = comm.Create_cart(MPI.Compute_dims(comm.size, 2), periods=(False, True))
rows, columns = (
    np.array_split(np.arange(n), width)[at]
    for n, width, at in zip((ROWS, COLUMNS), cart.dims, cart.coords, strict=True)
)


def make_initial_drops(seed):
    """Return this rank's part of the initial state: water at rest, with two drops.

    Its shape is (rows, columns, 3). The last dim contains the height, the velocity along
    x and the velocity along y."""
    u = np.zeros((len(rows), len(columns), 3))
    draw = np.random.default_rng(seed)
    for y, x, size in draw.uniform((8, 0, 3), (ROWS - 8, COLUMNS, 5), (2, 3)):
        away = np.abs(columns - x)
        far = (rows[:, None] - y) ** 2 + np.minimum(away, COLUMNS - away) ** 2
        u[..., 0] += 0.3 * np.exp(-far / size**2)
    return u + (1, 0, 0)


def add_halo(u):
    """Return u, this rank's part of a state, with one halo cell on each side. Halo cells
    come from neighboring ranks; beyond a wall, they mirror the cells at the wall."""
    for dim, wall in enumerate([(1, 1, -1), (1, 1, 1)]):
        before, after = cart.Shift(dim, 1)
        u = np.moveaxis(u, dim, 0)
        low, high = u[:1] * wall, u[-1:] * wall
        cart.Sendrecv(u[-1:].copy(), after, recvbuf=low, source=before)
        cart.Sendrecv(u[:1].copy(), before, recvbuf=high, source=after)
        u = np.moveaxis(np.concatenate([low, u, high]), 0, dim)
    return u


def step_explicitly(u):
    """Return the state after SMALL explicit steps of the shallow water equations."""
    for _ in range(SMALL):
        w = add_halo(u)
        dx, dy = (w[1:-1, 2:] - w[1:-1, :-2]) / 2, (w[2:, 1:-1] - w[:-2, 1:-1]) / 2
        spread = w[1:-1, 2:] + w[1:-1, :-2] + w[2:, 1:-1] + w[:-2, 1:-1] - 4 * u
        spreading = u[..., 0] * (dx[..., 1] + dy[..., 2])
        slope = np.stack([spreading, dx[..., 0], dy[..., 0]], axis=-1)
        u = u + DT * (VISCOSITY * spread - slope - u[..., 1:2] * dx - u[..., 2:] * dy)
    return u


def main():
    u = make_initial_drops(0)
    grid = fsdpx.Grid(cart, u.shape[:2], layout="yxc")
    edges = ("replicate", "circular")
    net = nn.UNet(3, 3, width=12, depth=1, padding=edges, norm=None, activation="tanh")
    adam = optim.AdamW(lr=5e-3, weight_decay=0.0)
    net = nn.Residual(net)
    trainer = net.as_distributed(loss=nn.RelativeL2(), optimizer=adam, domain=grid)
    for _ in range(STATES):
        before, u = u, step_explicitly(u)
        loss = trainer.step(before - (1, 0, 0), u - (1, 0, 0))
    mean = cart.allreduce(u[..., 0].sum()) / (ROWS * COLUMNS)
    highest = cart.allreduce(u[..., 0].max(), MPI.MAX)
    if comm.rank == 0:
        print(f"{STATES} states: mean {mean:.4f}, highest {highest:.4f}, loss {loss:.2f}")


if __name__ == "__main__":
    main()
