"""Gradient buffers are not zeroed: what was in them before must never show, whatever is or is not written into them."""

from typing import Any

import numpy as np
import pytest

from fsdpx.core.state import gradients


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer holds NaN when it becomes a gradient."""
    begin, close = gradients.FullGradient.__init__, gradients.ChunkGradients._push_current_chunk

    def born(self: gradients.FullGradient, buffer: Any, at_home: bool) -> None:
        buffer[...] = np.nan
        begin(self, buffer, at_home)

    def closed(self: gradients.ChunkGradients) -> None:
        close(self)
        for leaf in self.free:
            leaf[...] = np.nan

    monkeypatch.setattr(gradients.FullGradient, "__init__", born)
    monkeypatch.setattr(gradients.ChunkGradients, "_push_current_chunk", closed)
