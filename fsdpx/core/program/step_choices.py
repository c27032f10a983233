"""Options of a step that users choose."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpx.core.base.option_kinds import is_positive_number, make_min_int_predicate, make_option_field

__all__ = ["StepChoices"]


@dataclass(frozen=True, kw_only=True)
class StepChoices:
    """Options of a step that users choose. Each option is declared only here and is a keyword of `distribute` with the
    same name. Placements hold the options, ranks compare them, and programs may depend on them
    (`ProgramRequest.choices`).

    seed: seed of initialization and dropout. clip_norm: maximum global gradient norm. reproducible_chunks: number of
    equal parts of the global batch whose gradients are added along a fixed tree.
    """

    seed: int = make_option_field(0, make_min_int_predicate(0), "a whole number, 0 or more")
    clip_norm: float | None = make_option_field(None, is_positive_number, "a positive number, or None")
    reproducible_chunks: int | None = None
