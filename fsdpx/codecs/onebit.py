"""Means of gradients over time, in one bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fsdpx.array.random import Stretch
from fsdpx.codecs.codec import Memory, Recut
from fsdpx.codecs.compressed import GRAIN, TURNS, keep_numbers
from fsdpx.codecs.sign import Sign
from fsdpx.comm.calls import Array

__all__ = ["OneBit"]


class OneBit(Sign):
    """What 1-bit Adam sends (Tang et al. 2021): in the first `warmup` reduces gradients as they are, in 4 bytes; from
    then on each rank's m = beta m + (1 - beta) gradient, by signs with error feedback as in `Sign`. The rule of m is
    linear, so that the sum of all ranks' m is the m of the sum. Gradients must be reduced once per step.

    For `optim.OneBitAdam`, whose `warmup_steps` and `betas[0]` these are."""

    whole_steps = True
    recut: Mapping[str, Recut] = {"error": "sum", "turn": "same", "mean": "sum"}

    def __init__(self, warmup: int = 100, beta: float = 0.9) -> None:
        super().__init__()
        self.warmup, self.beta = warmup, beta

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __repr__(self) -> str:
        return f"OneBit({self.warmup}, {self.beta})"

    def __hash__(self) -> int:
        return hash((self.warmup, self.beta))

    def nbytes(self, size: int, turn: int = TURNS) -> int:
        return super().nbytes(size) if turn >= self.warmup else -(-4 * size // GRAIN) * GRAIN

    def memory(self, size: int) -> Mapping[str, int]:
        return {**super().memory(size), "mean": size}

    def prepare(self, grad: Array, memory: Memory, turn: int) -> Array:
        mean = memory["mean"]
        mean += (1 - self.beta) * (grad - mean)
        return grad if turn < self.warmup else super().prepare(mean, memory, turn)

    def packed(self, parts: Sequence[Array], counts: Sequence[int], memory: Memory, turn: int) -> None:
        keep_numbers(memory["mean"])

    def pack(self, xp: Any, x: Array, wire: Array, lost: Array | None, numbers: Stretch) -> None:
        if numbers.seed >= self.warmup:
            super().pack(xp, x, wire, lost, numbers)
            return
        with np.errstate(over="ignore"):
            wire[: 4 * x.size].view(np.float32)[...] = x
        wire[4 * x.size :] = 0
        if lost is not None:
            lost[...] = 0

    def unpack(self, xp: Any, wire: Array, out: Array, add: bool, numbers: Stretch) -> None:
        if numbers.seed >= self.warmup:
            super().unpack(xp, wire, out, add, numbers)
            return
        values = wire[: 4 * out.size].view(np.float32)
        out[...] = out + values if add else values
