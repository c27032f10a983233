"""Out-of-memory errors that show the planned memory by kind and suggest options that need less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from traceback import clear_frames
from typing import Any

from fsdpx.core.array.arena import trim_heap
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.array.shapes.array import measuring_shape_only_memory
from fsdpx.core.base.config import PRECISIONS, PRESETS_BY_MEMORY
from fsdpx.core.base.messages import format_bytes, format_table
from fsdpx.core.comm.backend import FakeCommunicator, FakeNodeCommunicator
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import find_node_communicator, unwrap_message_backend
from fsdpx.core.engine.activations import HeapRecorder
from fsdpx.core.state.footprint import find_memory_budget
from fsdpx.core.state.step_inputs import StepInputs
from fsdpx.core.trainer.assemble import assemble_session
from fsdpx.core.trainer.recipe import NoOptimizer, Recipe
from fsdpx.core.trainer.session import Session
from fsdpx.errors import FsdpxError, OutOfMemory
from fsdpx.nn.container import unwrap_single

__all__ = ["FITTING_SHARE", "format_cheaper_options", "iterate_cheaper_options", "make_out_of_memory_error"]

FITTING_SHARE = 0.99
"""An option is listed only if it reduces the required memory to less than this fraction of the memory in the previous
row."""


def format_cheaper_options(
    options: Mapping[str, Any], count_bytes: Callable[[dict[str, Any]], int], limit: int | None, rows: int = 0
) -> str:
    """Return a table of options that need less memory. Each row adds one option to the options in the row above. The
    table ends with the first row that would fit into memory.

    Parameters
    ----------
    options : the current options; `strategy`, `recompute`, `microbatches` and `precision` are used
    count_bytes : function that returns the planned bytes for a dict of changed options
    limit : number of bytes that fit into memory; None if unknown
    rows : number of samples per rank; 0 if unknown
    """
    changed, least = dict[str, Any](), count_bytes({})
    lines: list[tuple[str, ...]] = [("what would take less", "bytes", "")]
    for name, value in iterate_cheaper_options(options, rows):
        try:
            nbytes = count_bytes({**changed, name: value})
        except FsdpxError:  # skip values that are invalid for this model or number of ranks
            continue
        if nbytes < FITTING_SHARE * least:
            changed, least = {**changed, name: value}, nbytes
            fits = limit is not None and nbytes <= limit
            words = ", ".join(f"{name}={value!r}" for name, value in changed.items())
            lines.append((words, format_bytes(nbytes), "fits" * fits))
            if fits:
                return format_table(lines)
    more = "take more ranks, a smaller model or batch, or offload=fsdpx.OffloadConfig(...)"
    sections = [format_table(lines)] if len(lines) > 1 else []
    return "\n".join([*sections, f"none of the choices that fsdpx knows fits: {more}" if limit is not None else more])


def iterate_cheaper_options(options: Mapping[str, Any], rows: int) -> Iterator[tuple[str, Any]]:
    """Yield (option, value) pairs that may need less memory than the current options. The same option may occur with
    several values. `rows` is the number of samples per rank; 0 if unknown."""
    strategy = options.get("strategy")
    chains = PRESETS_BY_MEMORY, ("hybrid", "fsdp"), (strategy,)
    strategies = next(chain for chain in chains if strategy in chain)
    yield from (("strategy", name) for name in strategies[strategies.index(strategy) + 1 :])
    if options.get("recompute") is None:
        yield "recompute", "all"
    pieces = (options.get("microbatches") or 1) * 2
    while pieces <= rows:
        yield "microbatches", pieces
        pieces *= 2
    if options.get("precision") in (None, "float32"):
        yield from (("precision", name) for name, one in PRECISIONS.items() if one.compute == "bf16")


def make_out_of_memory_error(
    recipe: Recipe, world: Communicator, session: Session | None, error: MemoryError, feed: StepInputs | None
) -> OutOfMemory:
    """Return an OutOfMemory error that shows the planned memory and lists options that need less memory.

    Parameters
    ----------
    recipe : the recipe of the trainer
    world : communicator of all ranks
    session : session of the trainer; None if it has not been made yet
    error : the MemoryError that was raised
    feed : inputs of the step in which the MemoryError was raised; None if it was raised elsewhere
    """
    clear_frames(error.__traceback__)  # free the arrays that the stack frames of the error still refer to
    trim_heap()
    node = find_node_communicator(world)
    held = 0 if session is None else sum(session.state.count_bytes_by_kind().values())
    here = len(node.ranks_on_host) if node is not None else world.size if unwrap_message_backend(world) is None else 1
    there, most = find_memory_budget(held, here)
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    head = f"rank {world.rank} of {world.size} has too little memory: {error}{notes}"
    fake: Communicator = FakeCommunicator(world.rank, world.size)
    if node is not None:
        hosts = {rank: number for number, ranks in enumerate(node.ranks_by_host) for rank in ranks}
        fake = FakeNodeCommunicator(world.rank, [hosts[rank] for rank in range(world.size)])
    try:
        text = _format_plan_and_remedies(recipe, fake, feed, most)
    except Exception as problem:  # an error while the plan is made must not hide the memory error
        text = f"what would fit could not be counted: {problem!r}"
    return OutOfMemory(f"{head}\n\nmemory that there is: {there}\n\n{text}")


def _format_plan_and_remedies(recipe: Recipe, fake: Communicator, feed: StepInputs | None, limit: int | None) -> str:
    """Return a table of the planned bytes by kind, followed by a table of options that need less memory."""
    bare, batch = recipe.without_data(), _make_shape_only_batch(feed)
    plan = _count_planned_bytes(bare, fake, feed)
    lines = [("plan of this rank", "bytes"), *((kind, format_bytes(n)) for kind, n in sorted(plan.items()))]
    lines += [("in all", format_bytes(sum(plan.values())))]

    def count_bytes(changes: dict[str, Any]) -> int:
        return sum(_count_planned_bytes(bare.with_options(changes), fake, feed).values())

    now = {**vars(bare.training), **vars(bare.distribution), **vars(bare.runtime)}
    remedies = format_cheaper_options(now, count_bytes, limit, 0 if batch is None else len(batch[1]))
    return f"{format_table(lines)}\n\n{remedies}"


def _count_planned_bytes(recipe: Recipe, fake: Communicator, feed: StepInputs | None) -> dict[str, int]:
    """Return the planned bytes of this rank by kind of memory, for a step on the batch of `feed`. Without a batch,
    count only what does not depend on the batch."""
    with measuring_shape_only_memory() as meter:
        batch = _make_shape_only_batch(feed)
        session = assemble_session(recipe, fake, initial=False)
        state = session.state
        if batch is not None:
            watch = HeapRecorder(session.engine, meter)
            session.run_program("step", session.agree_on_batch_and_make_microbatches(*batch, "step", training=True))
            return watch.get_bytes_by_kind_at_heap_peak()
        pieces = session.placement.accumulation.count_microbatches(session.microbatches)
        kind = "predict" if isinstance(session.placement.optimizer, NoOptimizer) else "step"
        state.arena.grow_slab(session.engine.prepare_program(session.make_program_request(kind, pieces)).workspace.plan)
        return state.count_bytes_by_kind()


def _make_shape_only_batch(feed: StepInputs | None) -> tuple[Any, Any] | None:
    """Return the batch of a step as arrays that have shapes but no data; None if the batch is not known."""
    microbatches = [] if feed is None else [batch for batch in feed.batch if batch is not None]
    if not microbatches or microbatches[0].target is None:
        return None
    rows, first_microbatch = sum(len(batch.targets[0]) for batch in microbatches), microbatches[0]
    inputs, targets = (
        tuple(ShapeArray((rows, *a.shape[1:]), a.dtype) for a in arrays)
        for arrays in (first_microbatch.inputs, first_microbatch.targets)
    )
    return unwrap_single(inputs), unwrap_single(targets)
