"""The same training step without the program: a plain loop that gathers, computes, reduces and updates as it goes.

    python docs/tutorial/walk.py
    mpiexec -n 3 python docs/tutorial/walk.py

This is FSDP (ZeRO-3) of a chain of layers in about a hundred lines, on nothing but a Communicator, the layers and an
optimiser. The tests compare its parameters with those of `strategy="fsdp"`.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

import fsdpx
from fsdpx import nn, optim
from fsdpx.array.random import Random
from fsdpx.comm import alone


@dataclass
class Held:
    """What a rank keeps of one layer: elements [start, stop) of its parameters in one flat array of `size`."""

    fields: dict  # name -> (offset, shape)
    size: int
    start: int
    stop: int
    shard: np.ndarray
    slots: dict
    segments: optim.Segments


def hold(comm, path, layer, optimizer, seed):
    """Rank r of N holds [floor(n r / N), floor(n (r + 1) / N)) and computes the initial values of only that."""
    fields, size = {}, 0
    for name, spec in layer.specs().items():
        fields[name] = (size, spec.shape)
        size += spec.size
    start, stop = size * comm.rank // comm.size, size * (comm.rank + 1) // comm.size
    shard, segments = np.zeros(stop - start), []
    for name, (offset, shape) in fields.items():
        a, b = max(start, offset), min(stop, offset + prod(shape))  # what of this parameter is mine
        if a < b:
            init = layer.specs()[name].init
            shard[a - start : b - start] = init(seed, f"{path}.{name}", a - offset, b - offset, shape)
            segments.append(optim.Segment(f"{path}.{name}", a - start, b - start, a - offset, prod(shape)))
    slots = {name: np.zeros(stop - start) for name in optimizer.slots}
    return Held(fields, size, start, stop, shard, slots, optim.Segments(tuple(segments), comm.all_gather_plain))


def views(held, flat):
    """Name -> the parameter's elements of a flat array, in its shape."""
    return {name: flat[o : o + prod(shape)].reshape(shape) for name, (o, shape) in held.fields.items()}


def gather(comm, held):
    """GATHER: the full parameters of one layer, from the shards of all ranks."""
    full = np.empty(held.size)
    comm.all_gather(held.shard, full).wait()
    return views(held, full)


def step(comm, layers, helds, loss, optimizer, number, x, y):
    """One update on a global batch of which this rank has the samples x, y; returns the mean loss of all."""
    env = nn.Env(np, alone(), Random(0))
    kept = []
    for layer, held in zip(layers, helds, strict=True):
        p = gather(comm, held)  # alive for this layer only: freed when p is bound again
        x, saved = layer.forward(env, p, x)
        kept.append(saved)

    total, weight, saved = loss.forward(env, x, y)
    dy = loss.backward(env, saved, 1.0)  # of the sum, not of the mean: sums of parts add up exactly
    totals = np.array([total, weight])
    comm.all_reduce(totals).wait()

    parts = []
    for layer, held, saved in zip(reversed(layers), reversed(helds), reversed(kept), strict=True):
        p, grad = gather(comm, held), np.zeros(held.size)
        dy, rest = layer.backward_input(env, p, saved, dy)
        layer.backward_params(env, views(held, grad), rest)
        part = np.empty(held.stop - held.start)
        comm.reduce_scatter(grad, part).wait()  # REDUCE: the sum over all ranks, each keeps its shard of it
        parts.append(part)

    for held, part in zip(helds, reversed(parts), strict=True):  # UPDATE: on the shard alone; divides once, here
        optimizer.update(
            np, held.shard, part, held.slots,
            lr=optim.rate(optimizer, number), step=number, segments=held.segments, scale=1.0 / totals[1],
        )  # fmt: skip
    return totals[0] / totals[1]


def train(comm, layers, loss, optimizer, batches, seed=0):
    """Train on (x, y) global batches; the losses and all parameters, full, by dotted name."""
    helds = [hold(comm, str(i), layer, optimizer, seed) for i, layer in enumerate(layers)]
    losses = []
    for number, (x, y) in enumerate(batches, start=1):
        mine = slice(len(x) * comm.rank // comm.size, len(x) * (comm.rank + 1) // comm.size)
        losses.append(step(comm, layers, helds, loss, optimizer, number, x[mine], y[mine]))
    full = {f"{i}.{name}": a for i, held in enumerate(helds) for name, a in gather(comm, held).items()}
    return losses, full


def main():
    rng = np.random.default_rng(0)
    layers = [nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3)]
    batches = [(rng.standard_normal((13, 6)), rng.integers(0, 3, 13)) for _ in range(5)]
    losses, _ = train(fsdpx.init(), layers, nn.CrossEntropy(), optim.AdamW(lr=1e-2), batches)
    if fsdpx.rank() == 0:
        print(" ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
