"""A generative adversarial network (Goodfellow et al. 2014): the generator learns to draw points on a circle.

mpiexec -n 2 python -m fsdpx.examples.gan"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

import fsdpx
from fsdpx import nn, optim
from fsdpx.examples._cli import run_main

NOISE = 8


def make_mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Build an MLP with two hidden layers of 64 features."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs))


def sample_circle(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Return random points `(samples, 2)` near the unit circle."""
    angle = rng.uniform(0, 2 * np.pi, samples)
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1) + rng.normal(0, 0.02, (samples, 2))
    return points.astype(np.float32)


def compute_logit_gradient(logits: np.ndarray, real: bool, samples: int) -> np.ndarray:
    """Return the gradient of the binary cross-entropy with respect to the critic's logits. `real` says whether the
    samples are labeled as real. The loss is averaged over the `samples` samples of the global batch."""
    return (1 / (1 + np.exp(-logits)) - real) / samples


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train both networks. Return the mean distances of generated points from the circle, measured every 100 steps and
    at the end."""
    p = argparse.ArgumentParser(
        prog="python -m fsdpx.examples.gan", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--steps", type=int, default=600)
    p.add_argument("--batch", type=int, default=128, help="samples of the global batch")
    p.add_argument("--strategy", default="fsdp")
    args = p.parse_args(argv)
    comm = fsdpx.init()
    options = {"loss": nn.MSELoss(), "optimizer": optim.Adam(lr=2e-3, betas=(0.5, 0.9)), "strategy": args.strategy}
    generator = make_mlp(NOISE, 2).as_distributed(**options, seed=1)
    critic = make_mlp(2, 1).as_distributed(**options, seed=2)
    mine, misses = slice(comm.rank, None, comm.size), []
    for step in range(1, args.steps + 1):
        rng = np.random.default_rng(step)  # all ranks use the same seed, and each takes its own samples
        real, noise = sample_circle(rng, args.batch)[mine], rng.standard_normal((args.batch, NOISE), np.float32)[mine]
        fake = generator.forward(noise)
        for points, is_real in ((real, True), (fake, False)):
            critic.backward(compute_logit_gradient(critic.forward(points), is_real, args.batch))
        critic.update()
        # the generator's loss is the critic's loss for fake points labeled as real; `backward` returns dloss/dpoints
        dfake = critic.backward(compute_logit_gradient(critic.forward(fake), True, args.batch))
        critic.zero_grad()  # discard the gradients of the critic's own parameters
        generator.backward(dfake)
        generator.update()
        if step % 100 == 0 or step == args.steps:
            distance = np.abs(np.linalg.norm(generator.predict(noise), axis=1) - 1).sum()
            misses.append(float(fsdpx.all_reduce(np.array([distance]))[0]) / args.batch)
            if comm.rank == 0:
                print(f"step {step}  mean distance from the circle {misses[-1]:.3f}", flush=True)
    return misses


if __name__ == "__main__":
    sys.exit(run_main(main))
