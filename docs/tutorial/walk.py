"""The same training step without the program.

A plain loop gathers, computes, reduces and updates as it goes:

    python docs/tutorial/walk.py
    mpiexec -n 3 python docs/tutorial/walk.py

This is FSDP (ZeRO-3) of a chain of layers in about a hundred lines. It needs nothing
but a Communicator, the layers and an optimizer. The tests compare its parameters with
those of `strategy="fsdp"`.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.array.random import Random
from fsdpx.core.comm import make_single_rank_axes


@dataclass
class Held:
    """What a rank keeps of a layer: elements [start, stop) of its flat parameters."""

    fields: dict  # name -> (offset, shape)
    size: int
    start: int
    stop: int
    shard: np.ndarray
    slots: dict
    segments: optim.ShardSegments


def hold(comm, path, layer, optimizer, seed):
    """Rank r of N makes and holds [floor(n r / N), floor(n (r + 1) / N))."""
    fields, size = {}, 0
    for name, spec in layer.specs().items():
        fields[name] = (size, spec.shape)
        size += spec.size
    start, stop = size * comm.rank // comm.size, size * (comm.rank + 1) // comm.size
    shard, segments = np.zeros(stop - start), []
    for name, (offset, shape) in fields.items():
        a, b = max(start, offset), min(stop, offset + prod(shape))  # what of it is mine
        if a < b:
            init, full = layer.specs()[name].init, f"{path}.{name}"
            here = a - start, b - start
            shard[slice(*here)] = init(seed, full, a - offset, b - offset, shape)
            segments.append(optim.ShardSegment(full, *here, a - offset, prod(shape)))
    slots = {name: np.zeros(stop - start) for name in optimizer.slots}
    segments = optim.ShardSegments(tuple(segments), comm.all_gather_value)
    return Held(fields, size, start, stop, shard, slots, segments)


def views(held, flat):
    """Name -> the parameter's elements of a flat array, in its shape."""
    places = held.fields.items()
    return {name: flat[o : o + prod(s)].reshape(s) for name, (o, s) in places}


def gather(comm, held):
    """GATHER: the full parameters of one layer, from the shards of all ranks."""
    full = np.empty(held.size)
    comm.all_gather(held.shard, full).wait()
    return views(held, full)


def step(comm, layers, helds, loss, optimizer, number, x, y):
    """One update on a global batch, of which this rank has x and y; the mean loss."""
    env = nn.LayerContext(np, make_single_rank_axes(), Random(0))
    kept = []
    for layer, held in zip(layers, helds, strict=True):
        p = gather(comm, held)  # alive for this layer only: freed when p is bound again
        x, saved = layer.forward(env, p, x)
        kept.append(saved)

    total, weight, saved = loss.forward(env, x, y)
    dy = loss.backward(env, saved, 1.0)  # of the sum: parts add up exactly
    totals = np.array([total, weight])
    comm.all_reduce(totals).wait()

    parts = []
    for layer, held, saved in reversed(list(zip(layers, helds, kept, strict=True))):
        p, grad = gather(comm, held), np.zeros(held.size)
        dy, rest = layer.backward_input(env, p, saved, dy)
        layer.backward_params(env, views(held, grad), rest)
        part = np.empty(held.stop - held.start)
        comm.reduce_scatter(grad, part).wait()  # REDUCE: its shard of the sum
        parts.append(part)

    rates = {"lr": optim.get_learning_rate(optimizer, number), "step": number}
    for held, part in zip(helds, reversed(parts), strict=True):  # UPDATE: its shard
        own = {"segments": held.segments, "scale": 1.0 / totals[1]}  # divides once
        optimizer.update(np, held.shard, part, held.slots, **rates, **own)
    return totals[0] / totals[1]


def train(comm, layers, loss, optimizer, batches, seed=0):
    """Train on (x, y) global batches; the losses, and all parameters by dotted name."""
    helds = [hold(comm, str(i), x, optimizer, seed) for i, x in enumerate(layers)]
    losses = []
    for number, (x, y) in enumerate(batches, start=1):
        first, last = (len(x) * r // comm.size for r in (comm.rank, comm.rank + 1))
        mine = x[first:last], y[first:last]
        losses.append(step(comm, layers, helds, loss, optimizer, number, *mine))
    full = [(i, gather(comm, held)) for i, held in enumerate(helds)]
    return losses, {f"{i}.{name}": a for i, p in full for name, a in p.items()}


def main():
    rng = np.random.default_rng(0)
    layers = [nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3)]
    batches = [(rng.standard_normal((13, 6)), rng.integers(0, 3, 13)) for _ in range(5)]
    adamw = optim.AdamW(lr=1e-2)
    losses, _ = train(fsdpx.init(), layers, nn.CrossEntropyLoss(), adamw, batches)
    if fsdpx.rank() == 0:
        print(" ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
