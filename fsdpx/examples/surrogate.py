"""Train a U-Net on the solver's ranks while the solver of `fsdpx.examples.channel` runs, and then let the solver use
the U-Net for its steps.

mpiexec -n 4 python -m fsdpx.examples.surrogate

No states are gathered for training: each rank passes its part of a state to the trainer, in the solver's layout. No GPU
is needed."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import fsdpx
from fsdpx import nn, optim
from fsdpx.examples._cli import positive_int, run_main
from fsdpx.examples.channel import STATES, cart, columns, make_initial_drops, rows, step_explicitly

ROLLOUT_STEPS = 2  # number of consecutive states that the network is trained to predict
REST, SCALE = np.array([1, 0, 0]), 10  # the state of water at rest, and a factor that scales waves to about 1
Array = np.ndarray


def make_network() -> nn.Layer:
    """Build the U-Net that maps a state to the next one. At walls, the U-Net pads with copies of the edge cells. Along
    the other dim, its padding is periodic."""
    around = ("replicate", "circular")
    return nn.Residual(nn.UNet(3, 3, width=12, depth=1, padding=around, norm=None, activation="tanh"))


def compute_waves(u: Array) -> Array:
    """Return the deviation of the state `u` from water at rest, scaled so that its values are about 1."""
    return (u - REST) * SCALE


def run_solver_and_train(trainer: fsdpx.Trainer, runs: int, steps: int) -> float:
    """Run the solver. After each new state, train on earlier states that are drawn at random. Return the last loss."""
    seen: list[tuple[Array, Array]] = []
    draw = np.random.default_rng(0)  # all ranks use the same seed, so that they draw the same states
    loss = np.inf
    for run in range(1, runs + 1):
        u = make_initial_drops(run)
        states = [compute_waves(u)]
        for _ in range(STATES):
            u = step_explicitly(u)
            states.append(compute_waves(u))
            if len(states) > ROLLOUT_STEPS:
                later = np.concatenate(states[-ROLLOUT_STEPS:], axis=-1)
                seen.append((states[-1 - ROLLOUT_STEPS], later))
                for _ in range(steps):
                    drawn = [seen[k] for k in draw.integers(len(seen), size=2)]
                    x, y = zip(*drawn, strict=True)
                    loss = trainer.step(np.stack(x), np.stack(y))
        if cart.rank == 0:
            print(f"run {run}: loss {loss:.3f}", flush=True)
    return loss


def compare_with_solver(trainer: fsdpx.Trainer) -> tuple[list[float], list[Array], list[float]]:
    """Compare the network with the solver in a run that is not in the training data.

    Returns the error of each state relative to the size of the waves, the last states of
    solver and network, and the time in seconds that each takes per state."""
    u = make_initial_drops(0)
    v, errors, seconds = compute_waves(u), list[float](), [0.0, 0.0]
    for k in range(STATES):
        begin = time.perf_counter()
        u = step_explicitly(u)
        middle = time.perf_counter()
        if k % ROLLOUT_STEPS == 0:  # predict the next ROLLOUT_STEPS states from the network's own last state
            ahead = np.split(np.asarray(trainer.predict(v)), ROLLOUT_STEPS, axis=-1)
        v = ahead[k % ROLLOUT_STEPS]
        end, w = time.perf_counter(), compute_waves(u)
        seconds = [seconds[0] + middle - begin, seconds[1] + end - middle]
        squares = [((v - w) ** 2).sum(), (w**2).sum()]
        apart, whole = cart.allreduce(np.array(squares, np.float64))
        errors.append(float(apart / whole) ** 0.5)
    return errors, [compute_waves(u), v], [total / STATES for total in seconds]


def main(argv: Sequence[str] | None = None) -> int:
    """Train the network, and print its errors and times. Return the exit status."""
    p = argparse.ArgumentParser(
        prog="python -m fsdpx.examples.surrogate", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--runs", type=positive_int, default=12, help="runs of the solver to learn from")
    p.add_argument("--steps", type=positive_int, default=2, help="steps of training after each state")
    p.add_argument("--pictures", type=Path, help="a folder for pictures; needs Matplotlib")
    args = p.parse_args(argv)
    fsdpx.init()
    grid = fsdpx.Grid(cart, (len(rows), len(columns)), layout="yxc")
    rate = optim.schedules.Cosine(8e-3, args.runs * (STATES - ROLLOUT_STEPS + 1) * args.steps)
    trainer = nn.Rollout(make_network(), ROLLOUT_STEPS).as_distributed(
        loss=nn.RelativeL2(), optimizer=optim.AdamW(lr=rate, weight_decay=0.0), domain=grid
    )
    run_solver_and_train(trainer, args.runs, args.steps)
    errors, ends, seconds = compare_with_solver(trainer)
    fields = [grid.all_gather(end) for end in ends]  # gathering is collective, although only rank 0 draws the fields
    trainer.close()
    if cart.rank == 0:
        shown = ", ".join(f"{errors[k - 1]:.1%} after {k}" for k in (1, 5, 10, 20))
        print(f"error of the network's own states: {shown}")
        print(f"a state takes the solver {1000 * seconds[0]:.1f} ms and the network {1000 * seconds[1]:.1f} ms")
        if args.pictures:
            from fsdpx.examples.pictures import write_figures

            write_figures(args.pictures, grid, fields, errors)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
