"""Messages between stages: values on their way to the next reader, and gradients on their way back."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.engine.run import ProgramRun, Values, microbatch_of, number_of
from fsdpx.errors import ShapeError
from fsdpx.program import Action, Edge
from fsdpx.state.pipe import tag
from fsdpx.state.placement import Placement
from fsdpx.state.transfer import Transfer

__all__ = ["receive", "send", "travelling"]


def send(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Start to send a value; the run waits for the end of the message at its own end."""
    (value,) = (*taken, *read)
    edge, expected = run.place.stage.edges[number_of(action)], _expected(run, action)
    if expected is None:
        return ()
    xp = run.place.xp
    if value is None:  # a gradient: nothing that counts depends on the value
        value = xp.zeros(expected.shape, dtype=expected.dtype)
    if tuple(value.shape) != tuple(expected.shape) or value.dtype != expected.dtype:
        raise ShapeError(
            f"{action}: value {edge.value} is {value.dtype}{list(value.shape)}, rank {edge.receiver} of the pipe "
            f"expects {expected.dtype}{list(expected.shape)}: shapes of values may depend on shapes only"
        )
    flat = xp.ascontiguousarray(value).reshape(-1)
    handle = run.place.axes.pipe.send(flat, edge.receiver, _tag(run, action), what=_what(run.place, edge, action))
    run.issue(action, Transfer(handle, lambda: flat))  # which keeps the array until it is sent
    return ()


def receive(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """The value, on its way; None where nothing travels."""
    edge, expected = run.place.stage.edges[number_of(action)], _expected(run, action)
    if expected is None:
        return (None,)
    flat = run.place.xp.empty((expected.size,), dtype=expected.dtype)
    handle = run.place.axes.pipe.recv(flat, edge.sender, _tag(run, action), what=_what(run.place, edge, action))
    return (Transfer(handle, lambda: flat.reshape(expected.shape)),)


def travelling(edge: Edge, value: Any) -> bool:
    """Whether a value has a message on this edge: whole numbers have no gradient."""
    return not (edge.gradient and np.dtype(value.dtype).kind in "iub")


def _expected(run: ProgramRun, action: Action) -> Any:
    """The array that travels, shape only; empty for a rank without samples."""
    batch, edge = run.batch(action), run.place.stage.edges[number_of(action)]
    if batch is None:
        return None
    value = run.place.shapes.of(edge.value, batch)
    return value if travelling(edge, value) else None


def _tag(run: ProgramRun, action: Action) -> int:
    stage = run.place.stage
    return tag(stage, stage.edges[number_of(action)], microbatch_of(action), len(run.feed.batch))


def _what(placement: Placement, edge: Edge, action: Action) -> str:
    node = placement.model.nodes[edge.value - len(placement.model.inputs)]
    return f"{action} {'gradient' if edge.gradient else 'output'} of {node.path!r}"
