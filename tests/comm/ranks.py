"""One test on all ranks: it fails everywhere if it fails anywhere."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from fsdpx.comm import Communicator

__all__ = ["together"]


def together(world: Communicator, comm: Communicator, body: Callable[[Communicator], Any]) -> None:
    failure = None
    try:
        body(comm)
    except Exception:
        failure = f"[rank {world.rank}]\n{traceback.format_exc()}"
    failures = [text for text in world.all_gather_object(failure) if text]
    assert not failures, "\n".join(failures)
