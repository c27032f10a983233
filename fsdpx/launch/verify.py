"""`verify`: the promise of equal results, checked on this machine: N ranks against one process, tensor by tensor."""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

import fsdpx
from fsdpx import nn, optim
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.local import single
from fsdpx.config import PRESETS
from fsdpx.errors import ConfigError
from fsdpx.layout.tree import chunks_of

__all__ = ["verify"]

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
VOCAB, SEQ_LEN = 61, 12
FULL_BATCH, LAST_BATCH = 13, 3  # the last batch leaves ranks without samples


def verify(args: argparse.Namespace) -> int:
    """0 if all is well, 1 if a tensor differs."""
    comm = fsdpx.init("mpi" if args.no_node else None)
    strategies = list(PRESETS) if args.strategy == "all" else [args.strategy]
    formats = list(TOLERANCE) if args.precision == "all" else [args.precision]
    if not set(formats) <= set(TOLERANCE):
        raise ConfigError(f"verify --precision {args.precision}: choose float64, float32 or all")
    good = True
    for strategy in strategies:
        for precision in formats:
            good &= _compare(comm, args, strategy, precision)
    return 0 if good else 1


def _compare(comm: Communicator, args: argparse.Namespace, strategy: str, precision: str) -> bool:
    losses, got, text = _train(comm, args, strategy, precision)
    verdict = None
    if comm.rank == 0:
        one_losses, want, _ = _train(single(), args, "ddp", precision)
        verdict = _verdict(want, got, one_losses, losses, 0.0 if args.chunks else TOLERANCE[precision])
        good, line = verdict
        print(f"{'OK' if good else 'DIFFERS'}  {strategy} {precision}, {comm.size} ranks{text}: {line}", flush=True)
    return bool(comm.all_gather_object(verdict)[0][0])


def _train(
    comm: Communicator, args: argparse.Namespace, strategy: str, precision: str
) -> tuple[list[float], dict[str, Any], str]:
    """A small GPT with tied weights and dropout, clipped, on batches of which the last is short."""
    trainer = nn.GPT(VOCAB, 24, 2, 3, SEQ_LEN, tie=True, dropout=0.0 if args.chunks else 0.1).as_distributed(
        loss=nn.CrossEntropy(),
        optimizer=optim.AdamW(lr=1e-3, eps=1e-6) if precision == "float64" else optim.SGD(lr=0.05, momentum=0.9),
        strategy=strategy,
        comm=comm,
        precision=precision,
        microbatches=1 if args.chunks else args.microbatches,
        chunks=args.chunks,
        clip_norm=0.5,
        group_bytes=4096,
        seed=7,
    )
    losses = [trainer.step(x, y) for x, y in _batches(comm, args.steps, args.chunks)]
    text = f", chunks {args.chunks}, sha256 {trainer.fingerprint()[:16]}" if args.chunks else ""
    parameters = trainer.parameters()
    trainer.close()
    return losses, parameters, text


def _batches(comm: Communicator, steps: int, chunks: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same global batches at any world size, this rank's part of them."""
    rng = np.random.Generator(np.random.Philox(11))
    for step in range(steps):
        rows = 2 * chunks if chunks else FULL_BATCH if step < steps - 1 else LAST_BATCH
        tokens = rng.integers(0, VOCAB, (rows, SEQ_LEN + 1))
        tokens[:, 1::5] = -100 if step % 2 else tokens[:, 1::5]  # labels that count nothing
        if chunks:
            mine, each = chunks_of(chunks, comm.rank, comm.size), rows // chunks
            part = slice(mine.start * each, mine.stop * each)
        else:
            part = slice(rows * comm.rank // comm.size, rows * (comm.rank + 1) // comm.size)
        yield np.abs(tokens[part, :-1]) % VOCAB, tokens[part, 1:]


def _verdict(
    want: dict[str, Any], got: dict[str, Any], want_losses: list[float], got_losses: list[float], tolerance: float
) -> tuple[bool, str]:
    """Relative to the largest element of each tensor; the first one over the tolerance is named."""
    worst, where = 0.0, "the losses"
    pairs = [("the losses", np.array(want_losses), np.array(got_losses))]
    pairs += [(name, want[name], got[name]) for name in want]
    for name, a, b in pairs:
        a, b = a.astype(np.float64), b.astype(np.float64)
        error = float(np.abs(a - b).max() / (np.abs(a).max() or 1.0)) if a.size else 0.0
        if not error <= tolerance:
            return False, f"{name} differs by {error:.2e} relative, more than {tolerance:g}"
        if error > worst:
            worst, where = error, name
    return True, f"largest relative difference {worst:.2e} ({where}), allowed {tolerance:g}"
