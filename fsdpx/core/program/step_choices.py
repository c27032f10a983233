"""The options of a training step that users can set."""

from __future__ import annotations

from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.option_kinds import is_positive_number, make_min_int_predicate, make_option_field

__all__ = ["StepChoices"]


@dataclass(frozen=True, kw_only=True)
class StepChoices:
    """Options of a training step that users choose. Each option is a keyword argument of `distribute` and is declared
    only in this class. All ranks check that they have the same values, and programs may depend on these values
    (`ProgramRequest.choices`).

    Attributes
    ----------
    seed : seed for initialization and dropout
    clip_norm : maximum global gradient norm; if None, gradients are not clipped
    reproducible_chunks : number of equal parts into which the global batch is split. Their gradients are added along a
        fixed tree, so that results do not depend on the number of ranks. If None, gradients are added as they are
        computed
    """

    seed: int = make_option_field(0, make_min_int_predicate(0), "a whole number, 0 or more")
    clip_norm: float | None = make_option_field(None, is_positive_number, "a positive number, or None")
    reproducible_chunks: int | None = None
