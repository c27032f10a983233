"""Heat equation on an unstructured mesh, and a network that learns its steps on the same ranks: mpiexec -n 4 python
mesh_heat.py

Linear finite elements on triangles: each rank has some triangles, and ranks share the nodes between them."""

import numpy as np
from mpi4py import MPI

import fsdpx
from fsdpx import nn, optim

SQUARES, STEPS, DT = 24, 60, 5e-5


def make_cells(rank, size):
    """Return this rank's triangles, as global numbers of their nodes, and the coordinates of all nodes."""
    at = np.arange((SQUARES + 1) ** 2).reshape(SQUARES + 1, SQUARES + 1)
    points = np.stack(np.divmod(at, SQUARES + 1), axis=-1) / SQUARES
    inside = SQUARES - 1, SQUARES - 1, 2
    points[1:-1, 1:-1] += np.random.default_rng(0).uniform(-0.2, 0.2, inside) / SQUARES
    points = points.reshape(-1, 2)
    a, b, c, d = at[:-1, :-1], at[1:, :-1], at[1:, 1:], at[:-1, 1:]
    cells = np.stack([a, b, c, a, c, d], axis=-1).reshape(-1, 3)
    part = (points[cells].mean(axis=1)[:, 0] * size).astype(int)
    return cells[part == rank], points


class Heat:
    """The solver. u has the values at the nodes of this rank's triangles, which may be shared with other ranks."""

    def __init__(self, comm):
        cells, points = make_cells(comm.rank, comm.size)
        self.comm, self.numbers, flat = comm, *np.unique(cells, return_inverse=True)
        self.cells, self.points = flat.reshape(-1, 3), points[self.numbers]
        everyone = comm.allgather(self.numbers)
        shared = [np.intersect1d(self.numbers, one) for one in everyone]
        shared[comm.rank] = shared[comm.rank][:0]
        self.shared = [np.searchsorted(self.numbers, one) for one in shared]
        corners = self.points[self.cells]
        self.side = corners[:, [2, 0, 1]] - corners[:, [1, 2, 0]]
        (x1, y1), (x2, y2) = self.side[:, 0].T, self.side[:, 1].T
        self.area = abs(x1 * y2 - x2 * y1) / 2
        self.mass = self.assemble(np.repeat(self.area[:, None] / 3, 3, axis=1))
        self.u = np.exp(-20 * ((self.points - 0.3) ** 2).sum(axis=1))

    def assemble(self, values):
        """Add values (cells, 3) at the nodes, over the triangles of all ranks."""
        total = np.bincount(self.cells.ravel(), values.ravel(), self.numbers.size)
        for rows, theirs in zip(self.shared, self.comm.alltoall([total[rows] for rows in self.shared]), strict=True):
            total[rows] += theirs
        return total

    def step(self):
        flux = (self.side * self.u[self.cells][..., None]).sum(axis=1, keepdims=True)
        slopes = (self.side * flux).sum(axis=-1) / (4 * self.area[:, None])
        self.u = self.u - DT * self.assemble(slopes) / self.mass


def main(comm):
    heat = Heat(comm)
    mesh = fsdpx.Partition.from_cells(comm, heat.cells, heat.numbers, positions=heat.points * SQUARES)
    net = nn.MeshGraphNet(1, 3, 1, hidden=16, message_passing_steps=2)
    trainer = net.as_distributed(
        loss=nn.MSELoss(weights=heat.mass[mesh.owned_rows]),
        optimizer=optim.AdamW(lr=5e-3),
        domain=mesh,
        precision="float64",
        strategy="ddp",
    )
    losses = []
    for _ in range(STEPS):
        before = heat.u
        heat.step()
        change = (heat.u - before)[:, None] * 50
        losses.append(trainer.step(before[:, None], change))
    guess = heat.u.copy()
    for _ in range(5):  # the network replaces the solver
        guess[mesh.owned_rows] += trainer.predict(guess[:, None])[:, 0] / 50
        mesh.update_ghosts(guess)
        heat.step()
    error = comm.allreduce(float(((guess - heat.u)[mesh.owned_rows] ** 2).sum()))
    if comm.rank == 0:
        print(f"{mesh}: loss {losses[0]:.6f} to {losses[-1]:.6f}, error of five steps {error**0.5:.6f}", flush=True)
    trainer.close()
    return heat, guess


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
