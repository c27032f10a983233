"""Heat equation in dolfinx, and a network that learns its steps on the same ranks: mpiexec -n 4 python dolfinx_heat.py
heat"""

import sys
from pathlib import Path

from mpi4py import MPI  # before dolfinx, which then uses the same MPI

# isort: split
import basix.ufl
import numpy as np
import ufl
from dolfinx import fem, la
from dolfinx.mesh import create_mesh

import fsdpx
from fsdpx import nn, optim

SQUARES, STEPS, DT = 16, 10, 1e-4


def read_mesh(comm):
    """Make the mesh from nodes and triangles on rank 0, as read from a file; dolfinx distributes them."""
    rng, at = np.random.default_rng(0), np.arange((SQUARES + 1) ** 2).reshape(SQUARES + 1, SQUARES + 1)
    points = np.stack(np.divmod(at, SQUARES + 1), axis=-1) / SQUARES
    points[1:-1, 1:-1] += rng.uniform(-0.2, 0.2, (SQUARES - 1, SQUARES - 1, 2)) / SQUARES
    corners = np.stack([at[:-1, :-1], at[1:, :-1], at[1:, 1:], at[:-1, 1:]], axis=-1).reshape(-1, 4)
    corners = np.where(rng.random((len(corners), 1)) < 0.5, corners, np.roll(corners, 1, axis=1))
    cells, points = corners[:, [0, 1, 2, 0, 2, 3]].reshape(-1, 3), points.reshape(-1, 2)
    rows = slice(None if comm.rank == 0 else 0)
    triangle = basix.ufl.element("Lagrange", "triangle", 1, shape=(2,))
    return create_mesh(comm, cells[rows], triangle, points[rows])


class Heat:
    """The solver: linear elements, a lumped mass matrix and explicit steps."""

    def __init__(self, space):
        self.u, v = fem.Function(space), ufl.TestFunction(space)
        self.flux = fem.form(ufl.inner(ufl.grad(self.u), ufl.grad(v)) * ufl.dx)
        self.mass = self.assemble(fem.form(v * ufl.dx))

    def assemble(self, form):
        total = fem.assemble_vector(form)
        total.scatter_reverse(la.InsertMode.add)
        total.scatter_forward()
        return total.array

    def step(self):
        self.u.x.array[:] -= DT * self.assemble(self.flux) / self.mass


def main(comm, folder):
    """Run ten steps. If `folder` has the state of an earlier job, continue from it."""
    mesh = read_mesh(comm)
    space = fem.functionspace(mesh, ("Lagrange", 1))
    heat, at = Heat(space), space.tabulate_dof_coordinates()[:, :2]
    numbers = np.empty(len(at), int)  # node numbers of the file, because dolfinx's depend on the ranks
    numbers[space.dofmap.list] = mesh.geometry.input_global_indices[mesh.geometry.dofmaps[0]]
    u = heat.u.x.array  # a view of owned values and ghosts
    graph = fsdpx.Partition.from_dolfinx(space, positions=at * SQUARES)
    net = nn.MeshGraphNet(1, 3, 1, hidden=16, message_passing_steps=2)
    trainer = net.as_distributed(
        loss=nn.MSELoss(weights=heat.mass[graph.owned_rows]),
        optimizer=optim.AdamW(lr=5e-3),
        domain=graph,
        precision="float64",
    )
    if folder.is_dir():
        trainer.load(folder)
        u[:] = np.load(folder.with_suffix(".npy"))[numbers]
    else:
        u[:] = np.exp(-20 * ((at - 0.3) ** 2).sum(axis=1))
    losses = []
    for _ in range(STEPS):
        before = u.copy()
        heat.step()
        losses.append(trainer.step(before[:, None], (u - before)[:, None] * 50))
    trainer.save(folder)
    whole = np.empty(graph.total_nodes)
    whole[graph.all_gather(numbers)] = graph.all_gather(u)
    guess = u.copy()
    for _ in range(5):  # the network makes the same step as the solver
        guess[graph.owned_rows] += trainer.predict(guess[:, None])[:, 0] / 50  # ghosts are not read
        heat.step()
    error = np.std(graph.all_gather(guess - u))
    if comm.rank == 0:
        np.save(folder.with_suffix(".npy"), whole)
        print(f"{graph}: five steps of the network are off by {error:.6f}")
        print(" ".join(f"{loss:.10f}" for loss in losses), flush=True)
    trainer.close()


if __name__ == "__main__":
    main(MPI.COMM_WORLD, Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoint"))
