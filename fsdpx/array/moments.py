"""Counts, means and sums of squares about them: of one set, and of sets together, so that nothing cancels."""

from __future__ import annotations

from typing import Any

__all__ = ["chan"]


def chan(xp: Any, one: Any, other: Any) -> Any:
    """(count, mean, sum of squares about it) of two sets together, by the rule of Chan et al. (1979)."""
    total = one[0] + other[0]
    share = other[0] / xp.where(total > 0, total, 1.0)
    apart = other[1] - one[1]
    return xp.stack([total, one[1] + apart * share, one[2] + other[2] + apart * apart * (one[0] * share)])
