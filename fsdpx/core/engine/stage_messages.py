"""Messages between pipeline stages. Their shapes and tags are computed once per action and batch shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.program import Action, Edge
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import Microbatch

__all__ = ["StageMessage", "StageMessages", "is_dtype_sent"]

MAX_PLANS = 1 << 14
"""Maximum number of message plans of a program. When it is reached, all plans are dropped, so that memory use stays
bounded if batch shapes vary."""


class StageMessage(NamedTuple):
    """An activation, or its gradient, that is sent between this pipeline rank and another one.

    Attributes
    ----------
    shape, dtype : shape and dtype of the array
    size : number of elements
    peer : the other pipeline rank
    tag : message tag, unique between the two ranks
    what : name of the message, for error messages
    """

    edge: Edge
    shape: tuple[int, ...]
    dtype: np.dtype
    size: int
    peer: int
    tag: int
    what: str


class StageMessages:
    """The messages to and from other pipeline stages in one program on this rank."""

    def __init__(self, place: Placement, microbatches: int) -> None:
        self._place, self._microbatches = place, microbatches
        self._planned: dict[Any, StageMessage | None] = {}

    def get_message(self, action: Action, batch: Microbatch | None) -> StageMessage | None:
        """Return the message of a send or receive action, or None if nothing is sent, for example because the
        microbatch has no samples."""
        if batch is None:
            return None
        key = (action.unit, action.mb, *[(a.shape, a.dtype) for a in batch.inputs])
        if key not in self._planned:
            if len(self._planned) >= MAX_PLANS:
                self._planned.clear()
            self._planned[key] = self._plan_message(action, batch)
        return self._planned[key]

    def _plan_message(self, action: Action, batch: Microbatch) -> StageMessage | None:
        place, stage = self._place, self._place.stage
        edge = stage.edge_of(action)
        value = place.value_shapes.shape_of(edge.value, batch)
        if not is_dtype_sent(edge, value.dtype):
            return None
        assert action.mb is not None
        node = place.model.find_node_of_value(edge.value)
        description = f"{action} {'gradient' if edge.gradient else 'output'} of {node.path!r}"
        peer = edge.receiver if edge.sender == stage.rank else edge.sender
        number = stage.get_message_tag(edge, action.mb, self._microbatches)
        return StageMessage(edge, *value, value.size, peer, number, description)


def is_dtype_sent(edge: Edge, dtype: Any) -> bool:
    """Return whether arrays of this dtype are sent over `edge`, a connection between two stages. Activations of any
    dtype are sent forward, but integer activations have no gradient to send back."""
    return not (edge.gradient and np.dtype(dtype).kind in "iub")
