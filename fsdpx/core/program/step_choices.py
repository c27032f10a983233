"""What users choose about a step."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpx.core.base.option_kinds import option, positive, whole

__all__ = ["StepChoices"]


@dataclass(frozen=True, kw_only=True)
class StepChoices:
    """What users choose about a step. An option is declared here alone, and is one of `distribute` of the same name:
    placements have it, ranks compare it, and programs may depend on it (`Request.choices`).

    seed: of initialisation and dropout. clip_norm: largest global gradient norm. chunks: number of equal pieces of the
    global batch whose gradients are added in one fixed tree."""

    seed: int = option(0, whole(0), "a whole number, 0 or more")
    clip_norm: float | None = option(None, positive, "a positive number, or None")
    chunks: int | None = None
