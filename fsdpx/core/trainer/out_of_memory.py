"""What to do when memory is too small: the plan by kind, and choices that take less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from traceback import clear_frames
from typing import Any

from fsdpx.core.array.arena import give_back
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.array.shapes.array import metered
from fsdpx.core.base.config import PRECISIONS, PRESETS_BY_MEMORY
from fsdpx.core.base.messages import bytes_text, table
from fsdpx.core.comm.backend import FakeCommunicator, FakeNode
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import carrier_of, node_of
from fsdpx.core.engine.activations import HeapWatch
from fsdpx.core.state.footprint import memory_limits
from fsdpx.core.state.step_inputs import Feed
from fsdpx.core.trainer.assemble import session_of
from fsdpx.core.trainer.recipe import NoOptimizer, Recipe
from fsdpx.core.trainer.session import Session
from fsdpx.errors import FsdpxError, OutOfMemory

__all__ = ["ENOUGH", "cheaper", "explain_memory_error", "remedies"]

ENOUGH = 0.99
"""A choice that leaves more than this of the bytes is none."""


def remedies(now: Mapping[str, Any], count: Callable[[dict[str, Any]], int], limit: int | None, rows: int = 0) -> str:
    """Choices that take less memory, each with those before that helped, up to the first that fits: a table.

    now: those of the plan, of which `strategy`, `recompute`, `microbatches` and `precision` are looked at. count: the
    bytes of the plan with these choices instead. limit: what fits. rows: samples of a rank, 0 if they are not known."""
    changed, least = dict[str, Any](), count({})
    lines: list[tuple[str, ...]] = [("what would take less", "bytes", "")]
    for name, value in cheaper(now, rows):
        try:
            nbytes = count({**changed, name: value})
        except FsdpxError:  # not a choice for this model and these ranks
            continue
        if nbytes < ENOUGH * least:
            changed, least = {**changed, name: value}, nbytes
            fits = limit is not None and nbytes <= limit
            words = ", ".join(f"{name}={value!r}" for name, value in changed.items())
            lines.append((words, bytes_text(nbytes), "fits" * fits))
            if fits:
                return table(lines)
    more = "take more ranks, a smaller model or batch, or offload=fsdpx.Offload(...)"
    found = [table(lines)] if len(lines) > 1 else []
    return "\n".join([*found, f"none of the choices that fsdpx knows fits: {more}" if limit is not None else more])


def cheaper(now: Mapping[str, Any], rows: int) -> Iterator[tuple[str, Any]]:
    """Options that may take less memory than those of now, of which several may have one name."""
    strategy = now.get("strategy")
    chains = PRESETS_BY_MEMORY, ("hybrid", "fsdp"), (strategy,)
    strategies = next(chain for chain in chains if strategy in chain)
    yield from (("strategy", name) for name in strategies[strategies.index(strategy) + 1 :])
    if now.get("recompute") is None:
        yield "recompute", "all"
    pieces = (now.get("microbatches") or 1) * 2
    while pieces <= rows:
        yield "microbatches", pieces
        pieces *= 2
    if now.get("precision") in (None, "float32"):
        yield from (("precision", name) for name, one in PRECISIONS.items() if one.compute == "bf16")


def explain_memory_error(
    recipe: Recipe, world: Communicator, session: Session | None, error: MemoryError, feed: Feed | None
) -> OutOfMemory:
    """The error that says all that. session: if there is one already. feed: of the step in which it happened."""
    clear_frames(error.__traceback__)  # they hold what the plan has got so far
    give_back()
    node, held = node_of(world), 0 if session is None else sum(session.state.nbytes().values())
    here = len(node.machine) if node is not None else world.size if carrier_of(world) is None else 1
    there, most = memory_limits(held, here)
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    head = f"rank {world.rank} of {world.size} has too little memory: {error}{notes}"
    fake: Communicator = FakeCommunicator(world.rank, world.size)
    if node is not None:
        hosts = {rank: number for number, ranks in enumerate(node.machines) for rank in ranks}
        fake = FakeNode(world.rank, [hosts[rank] for rank in range(world.size)])
    try:
        text = _counted(recipe, fake, feed, most)
    except Exception as problem:  # beside what has happened it is a detail
        text = f"what would fit could not be counted: {problem!r}"
    return OutOfMemory(f"{head}\n\nmemory that there is: {there}\n\n{text}")


def _counted(recipe: Recipe, fake: Communicator, feed: Feed | None, most: int | None) -> str:
    """The plan by kind, and remedies."""
    bare, batch = recipe.without_data(), _shapes(feed)
    plan = _planned(bare, fake, feed)
    lines = [("plan of this rank", "bytes"), *((kind, bytes_text(n)) for kind, n in sorted(plan.items()))]
    lines += [("in all", bytes_text(sum(plan.values())))]

    def count(changes: dict[str, Any]) -> int:
        return sum(_planned(bare.changed(changes), fake, feed).values())

    now = {**vars(bare.training), **vars(bare.distribution), **vars(bare.machinery)}
    return f"{table(lines)}\n\n{remedies(now, count, most, 0 if batch is None else len(batch[1]))}"


def _planned(recipe: Recipe, fake: Communicator, feed: Feed | None) -> dict[str, int]:
    """Bytes by kind: of a step on such a batch, else of what a rank holds between and during steps of any batch."""
    with metered() as meter:
        batch = _shapes(feed)
        session = session_of(recipe, fake, initial=False)
        state = session.state
        if batch is not None:
            watch = HeapWatch(session.engine, meter)
            session.run("step", session.feed(*batch, "step", training=True))
            return watch.memory()
        pieces = session.place.accumulation.microbatches(session.microbatches)
        kind = "predict" if isinstance(session.place.optimizer, NoOptimizer) else "step"
        state.arena.lend(session.engine.prepare(session.request(kind, pieces)).workspace.plan)
        return state.nbytes()


def _shapes(feed: Feed | None) -> tuple[Any, Any] | None:
    """The batch of a step, without its data; None if it is not known."""
    found = [] if feed is None else [batch for batch in feed.batch if batch is not None]
    if not found or found[0].target is None:
        return None
    rows, one = sum(len(batch.target) for batch in found), found[0]
    *inputs, target = (ShapeArray((rows, *a.shape[1:]), a.dtype) for a in (*one.inputs, one.target))
    return tuple(inputs) if len(inputs) > 1 else inputs[0], target
