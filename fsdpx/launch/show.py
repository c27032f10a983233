"""`fsdpx show`: simulate one training step of a model, and describe it as text, as a figure or as a trace."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from fsdpx import optim
from fsdpx.core.base.config import parse_byte_count
from fsdpx.core.base.messages import COLUMNS, format_bytes, format_count, format_table, reporting_if_slow
from fsdpx.core.base.safe_files import describe_read_error
from fsdpx.core.comm.mesh import AXES, Mesh
from fsdpx.core.program import (
    SCHEDULES,
    VERBS,
    ActionEvent,
    PipelineSchedule,
    StageCosts,
    compute_bubble,
    count_in_flight,
    simulate,
)
from fsdpx.core.program.drawing import draw_schedule
from fsdpx.core.state.gradients import count_samples_of_rank
from fsdpx.core.trainer.out_of_memory import format_cheaper_options
from fsdpx.core.trainer.recipe import DistributionChoices
from fsdpx.errors import ConfigError
from fsdpx.ext.fields.grid import Grid
from fsdpx.ext.observe.chrome import TraceGroups, TraceHeader, write_simulated_trace
from fsdpx.ext.observe.plots import StepLanes, make_step_figure, require_writable_picture, save_figure
from fsdpx.ext.observe.recording import ActionSpan, ProgramRecord, TransferSpan
from fsdpx.ext.observe.report import format_transfer_name
from fsdpx.ext.offload.choice import OffloadConfig
from fsdpx.launch.catalog import CATALOG, CatalogModel, find_model
from fsdpx.plan.dry_run import DryRun, dry_run
from fsdpx.plan.extrapolation import StepDryRuns
from fsdpx.plan.machine import Machine
from fsdpx.plan.peak import OptionChange, format_option_changes, list_memory_lowering_changes
from fsdpx.plan.prediction import Prediction, dry_run_one_rank_per_group, predict_from_dry_runs

__all__ = [
    "add_options",
    "converting_write_errors",
    "draw_step_to_file",
    "format_mesh",
    "make_error_that_samples_are_not_fields",
    "make_step_lanes",
    "parse_dim_size_tuple",
    "parse_recompute",
    "require_axes_for_options",
    "show",
    "write_trace_of_dry_run",
]  # fmt: skip


def add_options(p: argparse.ArgumentParser, also: str = "") -> None:
    """Add --mesh, --schedule, --sequence and --recompute to an argument parser. `also` is appended to the help of
    --schedule and --sequence, to name one more value that the command accepts."""
    p.add_argument("--mesh", default=None, help="widths of axes, such as pipe=2,tensor=2; also replica and shard")
    p.add_argument("--schedule", default=None, help=f"pipeline schedule: {', '.join(SCHEDULES)}, a text file{also}")
    p.add_argument("--sequence", default=None, help=f"mode of the tensor axis: parallel, ulysses, ring, samples{also}")
    p.add_argument("--recompute", default=None, help="all, attention, k (every k-th unit), or bytes such as 512MiB")


def require_axes_for_options(mesh: Mesh | None, schedule: str | None, sequence: str | None) -> None:
    """Raise ConfigError if --schedule is given but the mesh has no pipeline axis, or --sequence is given but the mesh
    has no tensor axis."""
    if schedule is not None and (mesh is None or mesh.pipe == 1):
        raise ConfigError(f"--schedule {schedule}: the mesh has no pipe axis; say --mesh pipe=2")
    if sequence is not None and (mesh is None or mesh.tensor == 1):
        raise ConfigError(f"--sequence {sequence}: the mesh has no tensor axis; say --mesh tensor=2")


def parse_recompute(text: str | None) -> Any:
    """Convert the value of --recompute to an int if it is a number, else return it as text."""
    return int(text) if text is not None and text.isdecimal() else text


def format_mesh(mesh: Mesh) -> str:
    """Return the mesh axes with several ranks as text, such as "pipe=2 x tensor=2". Return "one rank" if all axes have
    width 1."""
    return " x ".join(f"{axis}={mesh.width_of(axis)}" for axis in AXES if mesh.width_of(axis) > 1) or "one rank"


MAX_PROGRAM_ACTIONS = 400  # if a program has more actions, only its beginning and its end are printed
SCHEDULE_WIDTH_CHARS = 250  # line width of a drawn schedule if the output is not a terminal
DEFAULT_MACHINE = "epyc-100g"
"""Machine on which steps are simulated by default."""
UNIT_COSTS = StageCosts(forward=1, backward_input=1, backward_params=1)
# layers themselves communicate over these axes, so this traffic cannot be predicted from the program
LAYER_AXES = ("tensor", "data", "domain")


def show(args: argparse.Namespace) -> str:
    """Simulate a step with the given options, and return the text that `show` prints."""
    with reporting_if_slow(True, "simulating step", None) as count:
        return _simulate_and_format_step(args, count)


def _simulate_and_format_step(args: argparse.Namespace, count: Callable[[int], None]) -> str:
    """Return the text that `show` prints. To report progress, `count` is called at the start of each dry run, with the
    number of the dry run."""
    if args.png is not None:
        require_writable_picture("--png", args.png)
    example = _round_batch_up_to_chunk_multiple(find_model(args.example, args.batch), args.batch, args.chunks)
    mesh = None if args.mesh is None else Mesh.parse(args.mesh)
    require_axes_for_options(mesh, args.schedule, args.sequence)
    dims = parse_dim_size_tuple("--domain", args.domain) or (mesh.domain if mesh is not None else ())
    ranks, batch = _choose_rank_count(args, mesh, prod(dims)), example.batch
    if ranks < 1 or batch < 1:
        raise ConfigError(f"--ranks {ranks} --batch {batch}: both at least 1")
    strategy = DistributionChoices(args.strategy, mesh).strategy_within_replica(ranks)
    full = (mesh or Mesh()).fill_from_strategy(strategy, ranks)
    cells, grid = _choose_field_cells_and_grid(args, example, dims)
    rank, rows = _choose_shown_rank_and_sample_count(
        args, replace(full, domain=dims), ranks, batch, 0 if grid is None else grid.busiest_ranks[0]
    )
    space = None if grid is None else grid.as_rank(full.data_rank_of(rank))
    example, whole = (example.with_field_shape(cells, one) if cells else example for one in (space, None))
    options = _make_dry_run_options(args, example, full, ranks, rank) | {"domain": space}

    numbers = itertools.count(1)

    def run_dry(changes: Mapping[str, Any]) -> DryRun:
        count(next(numbers))
        return dry_run(example.model(), example.x(rows), example.y(rows), **{**options, **changes})

    run = run_dry({})
    changes = (
        list_memory_lowering_changes(options, rows, lambda changes: (run_dry(changes).peak.nbytes, None))
        if args.lower
        else None
    )
    simulated = _write_step_picture_and_trace(args, whole, options | {"domain": dims or None})
    if args.json:
        return json.dumps(_make_json_dict(args, run, rows, changes) | {"simulated": list(simulated)}, indent=1)
    helpful = partial(format_cheaper_options, options, lambda changes: run_dry(changes).footprint.pss, rows=rows)
    budget = _format_budget_check(run, args.memory, helpful)
    where = "" if mesh is None else f" on {format_mesh(full)}"
    head = f"{args.example}: {example.about}; {args.strategy}{where}, rank {rank} of {ranks}, batch {batch}"
    if space is not None:
        head += f", with {' x '.join(map(str, space.parts.local_shape(space.coords)))} cells of {space}"
    parts = [f"{head}\n{_format_peak_memory_and_traffic(run)}{budget}"]
    parts += [_format_program(run), _format_units(run), _format_traffic(run), _format_memory(run)]
    parts += [str(run.peak), *([] if changes is None else [format_option_changes(changes)])]
    parts += [str(run.footprint)]
    schedule = run.trainer.inspect.placement.pipe.get_schedule(run.program.microbatches)
    parts += [_format_schedule(schedule)] if args.grid else []
    parts += simulated
    return "\n\n".join(parts)


def _make_json_dict(
    args: argparse.Namespace, run: DryRun, rows: int, changes: list[OptionChange] | None
) -> dict[str, Any]:
    """Return the content of `show` as a dict of plain values, for --json."""
    moved = [{"axis": axis, "call": call, **vars(n)} for (axis, call), n in sorted(run.report.traffic.items())]
    process = {name: {"rss": part.rss, "pss": part.pss} for name, part in run.footprint.parts.items()}
    axes = run.trainer.inspect.placement.axes
    return {
        "model": args.example, "strategy": args.strategy, "rank": axes.world.rank, "ranks": axes.world.size,
        "mesh": {axis: axes.mesh.width_of(axis) for axis in AXES}, "samples": rows, "program": str(run.program).split(),
        "traffic": moved, "memory": run.report.memory, "activations": run.activations, "disk": run.report.disk,
        "peak": run.peak.to_json(), "process": process,
        **({} if changes is None else {"lower": [one.to_json() for one in changes]}),
    }  # fmt: skip


def _make_dry_run_options(
    args: argparse.Namespace, example: CatalogModel, mesh: Mesh, ranks: int, rank: int
) -> dict[str, Any]:
    """Convert command-line options to keyword arguments of `fsdpx.dry_run`."""
    return {
        "ranks": ranks,
        "rank": rank,
        "ranks_per_host": ranks if args.ranks_per_host is None else args.ranks_per_host,
        "loss": example.loss,
        "optimizer": optim.AdamW(lr=1e-3) if args.optimizer == "adamw" else optim.SGD(lr=1e-3),
        "strategy": args.strategy,
        "mesh": mesh if args.mesh is not None else None,
        "microbatches": args.microbatches,
        "reproducible_chunks": args.chunks,
        "precision": args.precision,
        "group_bytes": args.group_bytes,
        "tune": False,  # as in `plan`, the output must not depend on measurements of this machine
        "prefetch": args.prefetch,
        "schedule": args.schedule or "1f1b",
        "sequence": args.sequence,
        "recompute": parse_recompute(args.recompute),
        "offload": None if args.offload is None else OffloadConfig("(a folder)", args.offload.split(",")),
    }


def parse_dim_size_tuple(option: str, text: str | None) -> tuple[int, ...]:
    """Parse the value of a command-line option, such as "2,2,2" or "2x2x2"; None is parsed as (). Raise ConfigError for
    anything else."""
    words = [] if text is None else text.replace("x", ",").split(",")
    if any(not word.strip().isdecimal() or int(word) < 1 for word in words):
        raise ConfigError(f"{option} {text}: a number above 0 for each dim, such as 2,2,2")
    return tuple(map(int, words))


def make_error_that_samples_are_not_fields(example: str) -> ConfigError:
    """Return the error to raise if --domain or --field is used with the model `example`, whose samples are not
    fields."""
    fields = ", ".join(name for name, one in CATALOG.items() if one.cells)
    say = "; of a model of your own say --batch with samples, channels and cells, as many as it gives"
    own = say * (":" in example)
    return ConfigError(f"--domain and --field: {example} takes no fields; {fields} do{own}")


def _choose_field_cells_and_grid(
    args: argparse.Namespace, example: CatalogModel, dims: tuple[int, ...]
) -> tuple[tuple[int, ...], Grid | None]:
    """Return the number of cells of the field along each dim (from --field), and the grid of ranks that splits the
    field (None if it is not split)."""
    cells = parse_dim_size_tuple("--field", args.field) or example.cells
    if not example.cells and (dims or cells):
        raise make_error_that_samples_are_not_fields(args.example)
    return cells, Grid.from_shape(cells, dims) if dims else None


def _round_batch_up_to_chunk_multiple(example: CatalogModel, batch: str | None, chunks: int | None) -> CatalogModel:
    """Return the model with a batch size that is a multiple of `chunks`. If necessary, increase a default batch size,
    but raise ConfigError for a batch size that the user gave."""
    if chunks is None or chunks < 1 or example.batch % chunks == 0:
        return example
    fits = -(-example.batch // chunks) * chunks
    if batch is not None:
        raise ConfigError(f"--chunks {chunks}: a global batch of {example.batch} samples does not divide; say {fits}")
    return replace(example, batch=fits)


def _choose_shown_rank_and_sample_count(
    args: argparse.Namespace, mesh: Mesh, ranks: int, batch: int, part: int
) -> tuple[int, int]:
    """Return the rank to show, and its number of samples. By default, the first rank that has samples and holds shard
    number `part` of the field is shown."""
    if args.rank is not None and not 0 <= args.rank < ranks:
        return args.rank, 1  # there is no such rank; the dry run will raise the error
    rows = [_count_samples_of_rank(mesh, rank, batch, args.chunks) for rank in range(ranks)]
    first = next(rank for rank, own in enumerate(rows) if own and mesh.data_rank_of(rank) % prod(mesh.domain) == part)
    if args.rank is not None and not rows[args.rank]:
        what = f"{batch} samples" if args.chunks is None else f"{args.chunks} chunks"
        raise ConfigError(f"--rank {args.rank}: of {what} this one of {ranks} ranks gets none; say --rank {first}")
    rank = first if args.rank is None else args.rank
    return rank, rows[rank]


def _choose_rank_count(args: argparse.Namespace, mesh: Mesh | None, grid: int) -> int:
    """Return the number of ranks given by --ranks. The default is the size of the mesh. Without a mesh, it is the size
    of the grid of ranks, and with neither a mesh nor a grid, it is 4. Mesh axes without a given width are assumed to
    have width 1."""
    if args.ranks is not None:
        return int(args.ranks)
    if mesh is None or mesh.domain:
        return (grid if grid > 1 else 4) if mesh is None else grid * (mesh.pipe or 1) * (mesh.replica or 1)
    return (mesh.pipe or 1) * (mesh.replica or 1) * (mesh.shard or 1) * (mesh.tensor or 1)


def _count_samples_of_rank(mesh: Mesh, rank: int, batch: int, chunks: int | None) -> int:
    """Return how many samples of the global batch a rank gets."""
    grid = prod(mesh.domain)
    return count_samples_of_rank(batch, mesh.data_rank_of(rank) // grid, mesh.width_of("data") // grid, chunks)


def _format_peak_memory_and_traffic(run: DryRun) -> str:
    """Return one line with this rank's peak memory and its traffic per step."""
    moved = sum(one.bytes for (axis, _), one in run.report.traffic.items() if axis != "disk")
    held = f"{format_bytes(run.peak.nbytes)} at its peak, {format_bytes(run.footprint.pss)} with the process"
    rank = run.trainer.inspect.placement.axes.world.rank
    return f"rank {rank} holds {held}, and moves {format_bytes(moved)} per step"


def _format_program(run: DryRun) -> str:
    count = len(run.program.actions)
    lines = textwrap.wrap(str(run.program), COLUMNS - 2, break_long_words=False)
    if count > MAX_PROGRAM_ACTIONS:
        lines = [*lines[:12], f"... {len(lines) - 24} lines ...", *lines[-12:]]
    return f"program, {count} actions\n" + "\n".join("  " + line for line in lines)


def _format_units(run: DryRun) -> str:
    """Return a table of the FSDP units (layers whose parameters are gathered together) of all pipeline stages. The
    column "on this rank" is empty for units of other stages."""
    layout, state = run.trainer.inspect.placement.layout, run.trainer.inspect.placement.pages
    pipe = run.trainer.inspect.placement.axes.pipe.size > 1
    rows: list[tuple[str, ...]] = [("unit", *["stage"] * pipe, "layers", "parameters", "on this rank", "pages")]
    for unit in layout.units:
        here = [p for p in unit.pages if p in state]
        rows.append(
            (
                f"{unit.index}  {unit.name}",
                *[str(unit.stage)] * pipe,
                str(len(unit.nodes)),
                f"{sum(layout.pages[p].size for p in unit.pages):,}",
                f"{sum(state[p].own_range.size for p in here):,}" if here or not pipe else "",
                " ".join(map(str, unit.pages)),
            )
        )
    if len(rows) > 40:
        rows = [*rows[:20], ("...", *[""] * (len(rows[0]) - 1)), *rows[-19:]]
    gathers = f"{format_count(_count_forward_gathers(run), 'all-gather')} in the first forward"
    return format_table(rows, text=True) + f"\n{format_count(len(layout.units), 'unit')}; {gathers}"


def _count_forward_gathers(run: DryRun) -> int:
    """Return the number of parameter all-gathers in the first forward pass of the step."""
    words = [str(action) for action in run.program.actions]
    end = next(i for i, word in enumerate(words) if word.startswith(("LOSS", "B", "I")))
    moves = run.trainer.inspect.placement.axes.shard.size > 1
    return sum(word.startswith("GATHER") for word in words[:end]) if moves else 0


def _format_traffic(run: DryRun) -> str:
    rows: list[tuple[str, ...]] = [("this rank moves per step", "calls", "bytes", "from the program")]
    for (axis, call), count in sorted(run.report.traffic.items()):
        predicted = run.report.predicted.get((axis, call))
        check = f"{format_count(predicted.calls, 'call')}, {format_bytes(predicted.bytes)}" if predicted else ""
        layers = axis in LAYER_AXES and (predicted is None or predicted.calls < count.calls)
        more = "(in layers)" if layers else "" if predicted else "(control)"
        words = " ".join(filter(None, (check, more)))
        rows.append((format_transfer_name(axis, call), f"{count.calls:,}", format_bytes(count.bytes), words))
    return format_table(rows if len(rows) > 1 else [*rows, ("nothing", "", "", "")], text=True)


def _format_memory(run: DryRun) -> str:
    rows: list[tuple[str, ...]] = [("memory of this rank", "bytes")]
    rows += [(kind, format_bytes(n)) for kind, n in sorted(run.report.memory.items())]
    rows += [("activations at their peak", format_bytes(run.activations))]
    rows += [(f"on disk: {kind}", format_bytes(n)) for kind, n in sorted(run.report.disk.items())]
    return format_table(rows)


def _format_budget_check(run: DryRun, budget: str | None, helpful: Callable[..., str]) -> str:
    """Return text that says whether the predicted peak memory of the process is within the budget given by --memory. If
    not, append the text from the function `helpful`, which lists options that would lower the peak."""
    if budget is None:
        return ""
    found = run.footprint
    limit = parse_byte_count(budget, "--memory")
    compared = f"{format_bytes(found.pss)} of {format_bytes(limit)} per rank, where shared memory counts in part (PSS)"
    if found.is_within(limit):
        return f"\nbudget kept: {compared}"
    over = format_bytes(found.pss - limit)
    return f"\nbudget NOT kept: {compared}, {over} too much\n\n{helpful(limit=limit)}"


def _format_schedule(schedule: PipelineSchedule) -> str:
    """Draw a pipeline schedule as text, with one row per pipeline rank. Each character is one time step: a forward pass
    (F), or half of a backward pass (I for input gradients, W for parameter gradients)."""
    idle = compute_bubble(simulate(schedule, UNIT_COSTS), schedule, UNIT_COSTS)
    pairs = ", ".join(map(str, count_in_flight(schedule)))
    numbers = f"{format_count(schedule.stages, 'stage')}, {format_count(schedule.microbatches, 'microbatch', 'es')}"
    head = f"schedule {schedule.name}: {numbers}; F, I and W take one time step each, B two"
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else SCHEDULE_WIDTH_CHARS
    found = f"bubble {idle:.1%} (simulated, messages take no time); in flight by rank: {pairs}"
    return f"{head}\n{draw_schedule(schedule, width)}\n{found}"


def _write_step_picture_and_trace(
    args: argparse.Namespace, example: CatalogModel, options: dict[str, Any]
) -> Iterator[str]:
    """Simulate the step on all ranks, and write the files that --png and --trace name. Yield a message about each file.
    If the samples of `example` are fields, they must be whole fields, not the shards of one rank."""
    if not args.png and not args.trace:
        if args.machine is not None:
            raise ConfigError(f"--machine {args.machine}: of a simulated step; say --png FILE or --trace FILE, too")
        return
    machine = Machine.load(args.machine or DEFAULT_MACHINE)
    chosen = {name: value for name, value in options.items() if name not in ("ranks", "rank", "ranks_per_host")}
    batch = example.x(example.batch), example.y(example.batch)
    dry = dry_run_one_rank_per_group(example.model(), batch, options["ranks"], machine.compute.gpu, **chosen)
    found = predict_from_dry_runs(dry, machine)
    where = "" if options["mesh"] is None else f" on {format_mesh(options['mesh'])}"
    if args.png:
        title = f"{args.strategy}{where}: {args.example}, batch {example.batch}, on {machine.name}"
        yield draw_step_to_file(dry, found, title, args.png)
    if args.trace:
        yield write_trace_of_dry_run(dry, found, args.trace)


MAX_RANKS_SHOWN = 4
"""If there is no pipeline parallelism and there are at most this many ranks, each rank is drawn in a row of its own.
Otherwise, there is one row per pipeline stage, which stands for all ranks of the stage."""


def make_step_lanes(dry: StepDryRuns, found: Prediction, title: str, limit: float | None = None) -> StepLanes:
    """Return the simulated step in the form that `fsdpx.ext.observe.plots.make_step_figure` draws.

    `title` has the form "name: about". `limit` is the number of bytes that a rank may use. If it is None, the memory
    capacity of the machine is used."""
    mesh, held, pipe = found.mesh, dry.make_memory_timelines(found.events), found.mesh.width_of("pipe")
    places = [mesh.coordinates_of(rank).pipe for rank in range(mesh.size)]
    each = pipe == 1 and mesh.size <= MAX_RANKS_SHOWN
    rows = range(mesh.size) if each else [places.index(stage) for stage in range(pipe)]
    more = f"\nand {mesh.size // pipe - 1} more" * (not each and mesh.size > pipe)

    def is_transfer(event: ActionEvent) -> bool:
        lane = VERBS[event.action.op].lane
        return lane not in AXES or mesh.width_of(lane) > 1

    events = [
        replace(event, rank=row)
        for row, rank in enumerate(rows)
        for event in found.events
        if event.rank == places[rank] and is_transfer(event)
    ]
    names, numbered = [f"rank {rank}{more}" for rank in rows], "mb" if pipe > 1 else "unit"
    limit = found.machine.compute.capacity if limit is None else limit
    return StepLanes(title, events, names, [held[places[rank]] for rank in rows], numbered, 1.0, limit)


@contextmanager
def converting_write_errors(path: Any) -> Iterator[None]:
    """Context manager that raises a ConfigError if `path` cannot be written."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {describe_read_error(error, path)}") from error


def draw_step_to_file(dry: StepDryRuns, found: Prediction, title: str, path: str, limit: float | None = None) -> str:
    """Draw the simulated step to an image file, and return a message about it. `limit` is the number of bytes that a
    rank may use."""
    drawn = len({event.action.mb for event in found.events} - {None})
    of = f", {drawn} of {found.microbatches} microbatches" if drawn < found.microbatches else ""
    with converting_write_errors(path):
        save_figure(make_step_figure([make_step_lanes(dry, found, title + of, limit)]), Path(path))
    ranks = format_count(found.mesh.size, "rank")
    return f"drawn: {path}, a step of {ranks} of {found.machine.name}{of}: {found}"


def write_trace_of_dry_run(dry: StepDryRuns, found: Prediction, path: str) -> str:
    """Write the simulated step as a trace for Perfetto that shows one rank per pipeline stage. Return a message about
    the file."""
    ranks = []
    for stage, (run, held) in enumerate(zip(dry.runs, dry.make_memory_timelines(found.events), strict=True)):
        axes, rank = run.session.state.placement.axes, run.found.rank
        host, place = f"{found.machine.name}, simulated", axes.coordinates._asdict()
        header = TraceHeader(rank, found.mesh.size, str(axes.mesh), place, host, 0.0, [])
        row = [event for event in found.events if event.rank == stage]
        turn = _convert_events_to_record(run, row, held["activations"], run.programs[dry.simulated])
        ranks.append((header, turn, TraceGroups.from_axes(axes)))
    with converting_write_errors(path):
        write_simulated_trace(Path(path), ranks)
    return f"traced: {path}, {len(ranks)} of {format_count(found.mesh.size, 'rank')} of {found.machine.name}, simulated"


def _convert_events_to_record(
    run: Any, row: Sequence[ActionEvent], alive: Sequence[tuple[float, int]], program: Any
) -> ProgramRecord:
    """Convert simulated events to a `ProgramRecord`, as if a rank had recorded them. The record's program number is -1,
    which no recorded program has."""
    turn, free = ProgramRecord(-1, 0, program, []), 0.0
    times = [time for time, _ in alive]
    for event in row:
        cost = run.costs.get(event.action)
        nbytes = sum(n for _, _, _, n in cost.calls) if cost is not None else 0
        if VERBS[event.action.op].moves:
            turn.transfers.append(TransferSpan(event.action, free, event.end))
            begin = ready = free
        else:
            begin, ready, free = free, event.start, event.end
        now = alive[bisect_right(times, free) - 1][1]
        turn.actions.append(ActionSpan(event.action, begin, ready, free, nbytes, now))
    return turn
