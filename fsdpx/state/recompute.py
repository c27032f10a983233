"""Recompute (activation checkpointing, Chen et al. 2016): which units keep only what they read, and run forward again
before their backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdpx.config import byte_count
from fsdpx.errors import ConfigError

__all__ = ["Recompute", "recompute"]


@dataclass(frozen=True)
class Recompute:
    """every: k for every k-th unit, 0 none. budget: bytes that what backward needs may take on a rank, or None. cores:
    kinds of layers that keep less inside their unit."""

    every: int = 0
    budget: int | None = None
    cores: frozenset[str] = frozenset()


def recompute(choice: Any) -> Recompute:
    """From what a user says: None, "all", "attention", every k-th unit as a number, or a budget such as "512MiB"."""
    if choice is None:
        return Recompute()
    if choice == "all":
        return Recompute(every=1)
    if choice == "attention":
        return Recompute(cores=frozenset({"attention"}))
    if isinstance(choice, int) and not isinstance(choice, bool) and choice > 0:
        return Recompute(every=choice)
    if not isinstance(choice, str) or not choice.strip().endswith("B"):
        raise ConfigError(
            f"recompute={choice!r}: choose 'all', 'attention', a number k for every k-th unit, or the bytes that may "
            "be kept for backward, such as '512MiB'"
        )
    return Recompute(budget=byte_count(choice, "recompute"))
