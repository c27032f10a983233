"""A custom layer in ten lines, in a model that trains on any number of ranks.

python -m fsdpx.examples.custom_layer
mpiexec -n 4 python -m fsdpx.examples.custom_layer"""

import argparse

import numpy as np

import fsdpx
from fsdpx import nn, optim


class LayerScale(nn.Layer):
    """Scales each feature by a learned gain: y = gain * x (Touvron et al. 2021)."""

    def __init__(self, features):
        self.features = features

    def specs(self):
        return {"gain": nn.ParameterSpec((self.features,), nn.init.constant(0.1))}

    def forward(self, env, p, x):
        return x * p["gain"], (x,)

    def backward_input(self, env, p, saved, dy):
        return dy * p["gain"], (*saved, dy)

    def backward_params(self, env, g, kept):
        x, dy = kept
        if "gain" in g:  # a frozen parameter has no gradient
            g["gain"] += (x * dy).reshape(-1, self.features).sum(axis=0)


def make_local_batch_of_step(step: int, samples: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's samples of the global batch of `step`: inputs x `(samples / ranks, 8)`, and for each sample
    the target sum(sin(x))."""
    x = np.random.default_rng(step).standard_normal((samples, 8)).astype(np.float32)
    mine = slice(fsdpx.rank(), None, fsdpx.world_size())
    return x[mine], np.sin(x).sum(axis=1, keepdims=True)[mine]


def main(steps: int = 60) -> list[float]:
    """Train the model, and return the loss of each step."""
    branch = nn.Residual(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), LayerScale(64)))
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), branch, nn.Linear(64, 1))
    trainer = model.as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(lr=1e-2), strategy="fsdp")
    losses = []
    for step in range(steps):
        losses.append(trainer.step(*make_local_batch_of_step(step)))
        if fsdpx.rank() == 0 and step % 10 == 9:
            print(f"step {step + 1:3d}  loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    p = argparse.ArgumentParser(
        prog="python -m fsdpx.examples.custom_layer", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--steps", type=int, default=60)
    main(p.parse_args().steps)
