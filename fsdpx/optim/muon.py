"""Muon: momentum of matrices, made orthogonal (Jordan et al. 2024), as large as AdamW's steps (Liu et al. 2025)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.optim.adam import AdamW
from fsdpx.optim.elementwise import Elementwise
from fsdpx.optim.matrices import BUT, Matrices
from fsdpx.optim.optimizer import Rate, Slots
from fsdpx.optim.segments import Groups, Run, Segment

__all__ = ["Muon", "orthogonal"]

STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
"""Of the iteration of Newton and Schulz: singular values come near 1, between 0.7 and 1.2."""


@dataclass(frozen=True)
class Muon(Matrices):
    """m = momentum m + g; p -= lr (0.2 sqrt(max(rows, columns)) O + weight_decay p), O the matrix with the singular
    vectors of g + momentum m and singular values near 1, by five steps of Newton and Schulz (Jordan et al. 2024). The
    factor makes steps as large as AdamW's, so both have one learning rate and weight decay (Liu et al. 2025).

    Parameters of one dim, and those whose names match `but`, are updated by `others`. Kernels of convolutions count as
    matrices of as many rows as channels go out. Matrices are gathered: every rank that holds a part of one computes all
    of its update, so the bits do not depend on the cut, and sends the page's momentum once per update. The tensor axis
    must have one rank.

    Slots: those of `others`, of which "m" is the momentum.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number, of all parameters
    momentum : decay of m per step, in [0, 1)
    weight_decay : share of p that is taken off per step, times lr, of all parameters
    but : name patterns (fnmatch) of matrices for `others`
    others : an `AdamW`, or another optimiser with a slot "m" that works element by element; its lr, weight decay and
        groups are those of this one
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    lr: Rate = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.01
    but: Sequence[str] = BUT
    others: Elementwise = field(default_factory=AdamW)
    groups: Groups = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.others, Elementwise) or "m" not in self.slots:
            raise ConfigError(f"Muon(others={self.others!r}): an optimiser with a slot m is needed, optim.AdamW()")

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.others.slots)  # type: ignore[attr-defined]

    def _other(self) -> Elementwise:
        return self.others

    def _part(self, xp: Any, g: Any, slots: Slots, scale: float) -> Any:
        """m = momentum m + scale g; what is made orthogonal, with Nesterov's look ahead."""
        m = slots["m"]
        share = m.dtype.type(self.momentum)
        direction = g.astype(m.dtype) * m.dtype.type(scale)
        m *= share
        m += direction
        direction += m * share
        return direction

    def _follow(self, xp: Any, p: Any, full: Any, slots: Slots, s: Segment, run: Run, lr: float, step: int) -> None:
        matrix = full.reshape(s.shape[0], -1)
        o = orthogonal(xp, matrix).reshape(-1)[s.offset : s.offset + p.size]
        p *= p.dtype.type(1.0 - lr * run.decay(self.weight_decay))
        p -= o * p.dtype.type(lr * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(xp: Any, matrix: Any) -> Any:
    """U V of a matrix U S V, nearly: odd polynomials drive its singular values to 1, as long as they are above 0."""
    a, b, c = (matrix.dtype.type(number) for number in COEFFICIENTS)
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    with np.errstate(all="ignore"):
        x = x / (xp.sqrt((x * x).sum()) + matrix.dtype.type(1e-7))
        for _ in range(STEPS):
            square = x @ x.T
            x = a * x + (b * square + c * (square @ square)) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
