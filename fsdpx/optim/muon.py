"""Muon, an optimizer that orthogonalizes the momentum of each weight matrix."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from fsdpx.core.base.dataclass import dataclass, field, replace
from fsdpx.core.base.name_hints import parse_patterns, wrap_constructor_with_option_check
from fsdpx.errors import ConfigError
from fsdpx.optim.adam import AdamW
from fsdpx.optim.optimizer import (
    Elementwise,
    LearningRate,
    Slots,
    require_matching_shard,
    require_number_in_range,
    require_valid_hyperparameters,
)  # fmt: skip
from fsdpx.optim.segments import HyperparameterSpan, ParamGroups, ShardSegment, ShardSegments

__all__ = ["NOT_MATRICES", "Muon", "orthogonalize"]

NOT_MATRICES = ("*embed*", "*wte*", "*wpe*", "*head*")
"""Name patterns of embeddings and heads. Their weights are not treated as matrices, because the rows are independent
vectors rather than a linear map."""


STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
"""Number of steps and coefficients of the Newton-Schulz iteration, which moves singular values into the range from 0.7
to 1.2."""


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al. 2024): updates each weight matrix by its orthogonalized momentum.

    `m = momentum * m + g`, then `p -= lr * (0.2 * sqrt(max(rows, columns)) * O + weight_decay * p)`. The matrix O has
    the singular vectors of `g + momentum * m`, and singular values near 1. It is computed with five Newton-Schulz
    steps. The factor `0.2 * sqrt(max(rows, columns))` makes steps as large as AdamW's, so that learning rates and
    weight decays for AdamW also suit Muon (Liu et al. 2025).

    Parameters with one dim, and parameters whose names match `exclude`, are updated by `others`. Convolution kernels
    are treated as matrices with one row per output channel. Every rank that holds a part of a matrix gathers the
    momentum of the full matrix and computes the full update, so that results are bit-identical for every sharding. Each
    rank sends its part of the momentum once per update. The tensor axis must have only one rank.

    Slots (state arrays): the slots of `others`. For matrices, the slot "m" is the momentum m.

    Parameters
    ----------
    lr : learning rate for all parameters: a number, or a schedule (a function that takes the step, counted from 1, and
        returns a number)
    momentum : decay of m per step, in [0, 1)
    weight_decay : coefficient; lr * weight_decay * p is subtracted from p in each step, for all parameters
    exclude : name patterns (fnmatch) of matrices to be updated by `others`
    others : an `AdamW`, or another elementwise optimizer with a slot "m"; its lr, weight decay and groups are replaced
        with the ones of `Muon`
    groups : dict that maps name patterns (fnmatch) to dicts with `weight_decay`, `lr_scale` or both, for the matching
        parameters
    """

    lr: LearningRate = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.01
    exclude: Sequence[str] = NOT_MATRICES
    others: Elementwise = field(default_factory=AdamW)
    groups: ParamGroups = field(default_factory=dict)
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_valid_hyperparameters(self)
        require_number_in_range(self, "momentum", self.momentum, below=1.0)
        if isinstance(self.exclude, str):
            raise ConfigError(f"Muon(exclude={self.exclude!r}): a list of name patterns is needed, [{self.exclude!r}]")
        parse_patterns("Muon: exclude", self.exclude)
        if not isinstance(self.others, Elementwise) or "m" not in self.slots:
            raise ConfigError(f"Muon(others={self.others!r}): an optimizer with a slot m is needed, optim.AdamW()")

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(self.others.slots)  # type: ignore[attr-defined]

    def update(
        self,
        xp: Any,
        p: Any,
        g: Any,
        slots: Slots,
        *,
        lr: float,
        step: int,
        segments: ShardSegments,
        scale: float = 1.0,
    ) -> None:
        """Update a shard in place. Collective over the ranks that hold the shards of the same flat array.

        Parameters
        ----------
        xp : namespace of the arrays
        p : the shard's parameters, flat `(n,)`; changed in place
        g : gradient of these parameters, `(n,)`, before it is multiplied by `scale`; not changed
        slots : state arrays `(n,)` by name; changed in place
        lr : learning rate of the step
        step : number of the update, counted from 1
        segments : the parameters, or parts of parameters, that the shard holds
        scale : factor by which g is multiplied

        Raises
        ------
        ConfigError, ShapeError
            if the slots or the arrays do not fit the segments
        """
        require_matching_shard(self, p, g, slots, step, segments)
        parts: dict[str, Any] = {}
        for s in segments.items:
            span = slice(s.start, s.stop)
            own_slots = {name: slots[name][span] for name in self.slots}
            if self.is_matrix(s.name, s.shape):
                parts[s.name] = self._update_and_get_nesterov_momentum(g[span], own_slots["m"], scale)
            else:
                alone = ShardSegments((ShardSegment(s.name, 0, s.stop - s.start, s.offset, s.size, missed=s.missed),))
                self._other_optimizer.update(
                    xp, p[span], g[span], own_slots, lr=lr, step=step, segments=alone, scale=scale
                )
        known = segments.exchange_parts(xp, parts, self.count_sent_elements, p.dtype)
        full = {name: _assemble_matrix(xp, some, p.dtype) for name, some in known.items()}
        for s, run in zip(segments.items, segments.hyperparameters_per_segment(self.groups), strict=True):
            if s.name in full and s.start < s.stop:
                self._apply_update_to_matrix_part(xp, p[s.start : s.stop], full[s.name], s, run, lr * run.lr_scale)

    def count_sent_elements(self, s: ShardSegment) -> int:
        """Return how many elements of a parameter this rank sends to each of the other ranks that hold parts of the
        parameter.

        Parameters
        ----------
        s : this rank's segment (part) of the parameter

        Returns
        -------
        int
            the size of the segment if the parameter is updated as a matrix, else 0
        """
        return s.stop - s.start if self.is_matrix(s.name, s.shape) else 0

    def is_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a parameter is updated as a matrix, with dim 0 as its rows.

        Parameters
        ----------
        name : dotted name of the parameter
        shape : shape of the full parameter

        Returns
        -------
        bool
            True if the parameter has at least two dims and its name matches no pattern of `exclude`
        """
        return len(shape) > 1 and not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    @cached_property
    def _other_optimizer(self) -> Any:
        other: Any = self.others
        return replace(other, lr=self.lr, weight_decay=self.weight_decay, groups=self.groups)

    def _update_and_get_nesterov_momentum(self, g: Any, m: Any, scale: float) -> Any:
        """Set `m = momentum * m + scale * g` in place, and return the Nesterov direction,
        `scale * g + momentum * m`."""
        share = m.dtype.type(self.momentum)
        direction = g.astype(m.dtype) * m.dtype.type(scale)
        m *= share
        m += direction
        direction += m * share
        return direction

    def _apply_update_to_matrix_part(
        self, xp: Any, p: Any, full: Any, s: ShardSegment, run: HyperparameterSpan, lr: float
    ) -> None:
        """Update this rank's part `p` of a matrix, given `full`, the flat update direction of the full matrix. `run`
        holds the hyperparameters of the matrix."""
        matrix = full.reshape(s.shape[0], -1)
        o = orthogonalize(xp, matrix).reshape(-1)[s.offset : s.offset + p.size]
        p *= p.dtype.type(1.0 - lr * run.get_weight_decay(self.weight_decay))
        p -= o * p.dtype.type(lr * 0.2 * max(matrix.shape) ** 0.5)


def _assemble_matrix(xp: Any, parts: list[tuple[ShardSegment, Any]], dtype: Any) -> Any:
    """Join the parts of a matrix that the ranks hold, and return the full matrix as a flat array."""
    name, size = parts[0][0].name, parts[0][0].size
    assert sum(s.stop - s.start for s, _ in parts) == size, f"{name} is not whole"
    full = xp.empty(size, dtype)
    for s, part in parts:
        full[s.offset : s.offset + s.stop - s.start] = part
    return full


def orthogonalize(xp: Any, matrix: Any) -> Any:
    """Return an approximation of `U @ V` for a matrix with the singular value decomposition `U @ S @ V`. It is computed
    by a Newton-Schulz iteration, which moves the nonzero singular values toward 1."""
    a, b, c = (matrix.dtype.type(number) for number in COEFFICIENTS)
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    with np.errstate(all="ignore"):
        x = x / (xp.sqrt((x * x).sum()) + matrix.dtype.type(1e-7))
        for _ in range(STEPS):
            square = x @ x.T
            x = a * x + (b * square + c * (square @ square)) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
