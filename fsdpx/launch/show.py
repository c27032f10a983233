"""`show`: a step explained before it runs: its program, its units, what it moves and what it keeps in memory."""

import argparse

from fsdpx import optim
from fsdpx.engine.dryrun import DryRun, dry_run
from fsdpx.engine.report import bytes_text, table
from fsdpx.errors import ConfigError
from fsdpx.examples.catalog import entry
from fsdpx.layout.tree import chunks_of

__all__ = ["show"]

LONG = 400  # actions; longer programs are printed with their middle left out


def show(args: argparse.Namespace) -> str:
    example = entry(args.example)
    batch = example.batch if args.batch is None else args.batch
    if args.ranks < 1 or batch < 1:
        raise ConfigError(f"show --ranks {args.ranks} --batch {batch}: both at least 1")
    if args.chunks is not None:
        rows = batch // args.chunks * len(chunks_of(args.chunks, args.rank, args.ranks))
    else:
        rows = batch * (args.rank + 1) // args.ranks - batch * args.rank // args.ranks
    optimizer = optim.AdamW(lr=1e-3) if args.optimizer == "adamw" else optim.SGD(lr=1e-3)
    run = dry_run(
        example.model(),
        example.x(rows),
        example.y(rows),
        ranks=args.ranks,
        rank=args.rank,
        loss=example.loss,
        optimizer=optimizer,
        strategy=args.strategy,
        microbatches=args.microbatches,
        chunks=args.chunks,
        precision=args.precision,
        group_bytes=args.group_bytes,
        ahead=args.ahead,
    )
    head = f"{args.example}: {example.about}; {args.strategy}, rank {args.rank} of {args.ranks}, batch {batch}"
    return "\n\n".join([head, _program(run), _units(run), _traffic(run), _memory(run)])


def _program(run: DryRun) -> str:
    text, count = str(run.program), len(run.program.actions)
    lines = text.splitlines()
    if count > LONG:
        lines = [*lines[:12], f"... {len(lines) - 24} lines ...", *lines[-12:]]
    return f"program, {count} actions\n" + "\n".join("  " + line for line in lines)


def _units(run: DryRun) -> str:
    layout, state = run.trainer.engine.layout, run.trainer.engine.pages
    rows: list[tuple[str, ...]] = [("unit", "layers", "parameters", "on this rank", "pages")]
    for unit in layout.units:
        own = sum(layout.pages[p].size for p in unit.pages)
        mine = sum(state[p].mine.size for p in unit.pages)
        rows.append(
            (
                f"{unit.index}  {unit.name}",
                str(len(unit.nodes)),
                f"{own:,}",
                f"{mine:,}",
                " ".join(map(str, unit.pages)),
            )
        )
    if len(rows) > 40:
        rows = [*rows[:20], ("...", "", "", "", ""), *rows[-19:]]
    words = [str(a) for a in run.program.actions]
    loss = next(i for i, w in enumerate(words) if w.startswith("LOSS"))
    gathers = sum(w.startswith("GATHER") for w in words[:loss])
    if run.trainer.engine.axes.shard.size == 1:
        gathers = 0
    return table(rows) + f"\n{len(layout.units)} units; {gathers} all-gathers in the first forward"


def _traffic(run: DryRun) -> str:
    rows: list[tuple[str, ...]] = [("this rank moves per step", "calls", "bytes", "from the program")]
    for (axis, call), count in sorted(run.report.traffic.items()):
        predicted = run.report.predicted.get((axis, call))
        check = f"{predicted.calls:,} calls, {bytes_text(predicted.bytes)}" if predicted else "(control)"
        rows.append((f"{call.replace('_', '-')} over {axis}", f"{count.calls:,}", bytes_text(count.bytes), check))
    return table(rows if len(rows) > 1 else [*rows, ("nothing", "", "", "")])


def _memory(run: DryRun) -> str:
    rows: list[tuple[str, ...]] = [("memory of this rank", "bytes")]
    rows += [(kind, bytes_text(n)) for kind, n in sorted(run.report.memory.items())]
    rows += [("activations at their peak", bytes_text(run.activations))]
    rows += [("in all", bytes_text(sum(run.report.memory.values()) + run.activations))]
    return table(rows)
