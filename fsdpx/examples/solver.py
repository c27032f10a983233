"""A solver and a trainer that run concurrently, on different ranks and with different partitions of the field.

mpiexec -n 4 python -m fsdpx.examples.solver --trainers 2

The solver advances the velocity of a fluid in many small steps, using Burgers' equation in two dimensions. Each solver
rank holds rows of the field. The training ranks hold columns. They receive snapshots, learn from them how the field
changes in a large step, and send weights back. They also steer the solver: when their loss is low enough, the solver
takes large steps with the network, and small steps only to check the network and to produce snapshots."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.base.option_names import Strategy
from fsdpx.errors import ConfigError
from fsdpx.examples._cli import run_main

SIDE = 32  # number of cells along each dim of the field
# number of small steps per large step, length of a small step in time, viscosity
SMALL, STEP, VISCOSITY = 4, 0.0025, 0.02
LARGE = 5  # number of large steps per round
SCALE = 20.0  # the network outputs the change over one large step, multiplied by this factor
GOOD = 3e-4  # the solver may use the network if its loss is below this value
# number of snapshots kept, snapshots per training step, and training steps per round
KNOWN, DRAWN, STEPS = 8, 2, 40
Array = np.ndarray


def make_network() -> nn.Layer:
    """Build the network that maps the field to its change in one large step. Each output cell depends on 5 x 5 cells
    of the periodic field."""
    return nn.Sequential(nn.Conv2d(2, 48, 5, padding=2, padding_mode="circular"), nn.Tanh(), nn.Conv2d(48, 2, 1))


class Solver:
    """Solves Burgers' equation on a periodic field with explicit time steps. Each rank of `comm`, an mpi4py
    communicator, holds some rows of the field."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.comm, self._largest = comm, MPI.MAX
        rows = np.array_split(np.arange(SIDE), comm.size)[comm.rank]
        y, x = np.meshgrid(2 * np.pi * rows / SIDE, 2 * np.pi * np.arange(SIDE) / SIDE, indexing="ij")
        # shape (2, rows, SIDE): velocity along x and y
        self.velocity = np.stack([0.4 + 0.5 * np.sin(x + y), 0.5 * np.cos(x - 2 * y)])
        self.exact = self.velocity.copy()  # the reference solution, always advanced in small steps
        self.small = 0  # number of small steps taken so far
        self.grid = fsdpx.Grid(comm, (len(rows), SIDE), dims=(comm.size, 1), layout="cyx")
        self.net = make_network().as_distributed(domain=self.grid)

    def advance_round(self, learned: bool) -> Array:
        """Advance the field by the large steps of one round. Return a snapshot of shape (4, rows, SIDE): the field
        before the first large step, followed by the scaled change of the field in this step."""
        for k in range(LARGE):
            before = self.velocity
            if learned and k > 0:
                self.velocity = before + np.asarray(self.net.predict(before)) / SCALE
            else:
                self.velocity, self.small = self._take_large_step_by_small_steps(before), self.small + SMALL
            if k == 0:
                snapshot = np.concatenate([before, SCALE * (self.velocity - before)])
            self.exact = self._take_large_step_by_small_steps(self.exact)
        return snapshot

    def all_reduce_error(self) -> float:
        """Return the largest difference from the reference field over all solver ranks. Collective over `comm`."""
        return float(self.comm.allreduce(np.abs(self.velocity - self.exact).max(), self._largest))

    def _take_large_step_by_small_steps(self, field: Array) -> Array:
        """Return the field after one large step, computed as SMALL explicit steps of du/dt = viscosity laplace(u) - (u
        . grad) u with central differences."""
        for _ in range(SMALL):
            wide = self._exchange_and_concatenate_halo_rows(field)
            above, below, left, right = wide[:, :-2], wide[:, 2:], np.roll(field, 1, 2), np.roll(field, -1, 2)
            carried = field[0] * (right - left) * (SIDE / 2) + field[1] * (below - above) * (SIDE / 2)
            spread = (above + below + left + right - 4 * field) * SIDE**2
            field = field + STEP * (VISCOSITY * spread - carried)
        return field

    def _exchange_and_concatenate_halo_rows(self, field: Array) -> Array:
        """Return this rank's rows with one halo row above and one below, received from the neighboring ranks.
        Collective over `comm`."""
        before, after = (self.comm.rank - 1) % self.comm.size, (self.comm.rank + 1) % self.comm.size
        above, below = np.empty((2, 1, SIDE)), np.empty((2, 1, SIDE))
        self.comm.Sendrecv(field[:, -1:].copy(), after, recvbuf=above, source=before)
        self.comm.Sendrecv(field[:, :1].copy(), before, recvbuf=below, source=after)
        return np.concatenate([above, field, below], axis=1)


def run_solver(comm: Any, world: Any, rounds: int) -> tuple[float, float]:
    """Run the solver. Return the largest difference from the reference field, and the ratio of the number of small
    steps that the solver took to the number that it would have taken without the network."""
    solver, learned = Solver(comm), False
    with fsdpx.Bridge(world, solver=solver.grid) as bridge:
        for _ in range(rounds):
            bridge.send(solver.advance_round(learned))
            weights = bridge.receive_weights()
            # never None, because the trainer keeps the bridge open until the solver closes it
            assert weights is not None
            learned = bool(weights.pop("loss") < GOOD)  # same value on all solver ranks
            solver.net.load_parameters(weights)
    return solver.all_reduce_error(), solver.small / (rounds * LARGE * SMALL)


def run_training(comm: Any, world: Any, strategy: Strategy) -> float:
    """Train on the solver's snapshots, and send weights to the solver after each snapshot. Return the last loss."""
    columns = len(np.array_split(np.arange(SIDE), comm.size)[comm.rank])
    grid = fsdpx.Grid(comm, (SIDE, columns), dims=(1, comm.size), layout="cyx")
    adam = optim.AdamW(lr=3e-3, weight_decay=0.0)
    trainer = make_network().as_distributed(loss=nn.MSELoss(), optimizer=adam, strategy=strategy, domain=grid)
    draw = np.random.default_rng(0)  # all ranks use the same seed, so that they draw the same snapshots
    known, loss = list[Array](), np.inf
    with fsdpx.Bridge(world, trainer=grid) as bridge:
        for snapshot in bridge:
            # meanwhile, the solver continues with the weights sent before this snapshot
            bridge.send_weights({**trainer.parameters(), "loss": np.float64(loss)})
            known = [*known, snapshot.fields[0].astype(np.float32)][-KNOWN:]
            for _ in range(STEPS):
                batch = np.stack([known[k] for k in draw.integers(len(known), size=DRAWN)])
                loss = trainer.step(batch[:, :2], batch[:, 2:])
    trainer.close()
    return float(loss)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m fsdpx.examples.solver", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--trainers", type=int, default=1, help="how many of the ranks train")
    p.add_argument("--rounds", type=int, default=24, help="exchanges of snapshots and weights")
    p.add_argument("--strategy", default="fsdp")
    args = p.parse_args(argv)
    everyone = fsdpx.init()  # connects all ranks, so that an error on one of them ends the job
    if not 1 <= args.trainers < everyone.size:
        raise ConfigError(
            f"--trainers {args.trainers} of {everyone.size} ranks: start 2 ranks or more, by mpiexec -n 2"
        )
    from mpi4py import MPI

    world, solvers = MPI.COMM_WORLD, everyone.size - args.trainers
    trains = everyone.rank >= solvers
    part = world.Split(int(trains))
    found = run_training(part, world, args.strategy) if trains else run_solver(part, world, args.rounds)
    loss, (apart, share) = world.bcast(found, solvers), world.bcast(found, 0)
    if everyone.rank == 0:
        print(
            f"{solvers} ranks solve, {args.trainers} train: loss {loss:.1e}, {share:.0%} of the small steps, "
            f"largest difference {apart:.4f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
