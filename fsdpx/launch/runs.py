"""The commands for run folders: `fsdpx train` creates them, and `runs`, `report` and `trace` show their content."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

from fsdpx.core.base.messages import format_count, format_table, wrap_for_terminal
from fsdpx.core.trainer.fit_checkpoints import CheckpointConfig
from fsdpx.core.trainer.initialize import init
from fsdpx.errors import ConfigError
from fsdpx.ext.observe.chrome import merge_traces
from fsdpx.ext.observe.folder import RunFolder, agree_on_run_folder_and_last_arguments, naming_folder_in_errors
from fsdpx.ext.observe.html_page import write_report_page
from fsdpx.ext.observe.plots import format_missing_matplotlib_message
from fsdpx.launch.builder import ModelBuilder
from fsdpx.launch.ckpt import iterate_flat_items
from fsdpx.launch.run_results import format_summary_line, save_and_print_results

__all__ = ["merge_traces_and_print_path", "print_and_write_report", "print_runs", "train_run_file"]


def print_and_write_report(args: argparse.Namespace) -> int:
    """Print the report of a run, write the report as an HTML page, and print the path of the page. Return the exit
    status."""
    folder = RunFolder(args.run)
    print(wrap_for_terminal(write_report_page(folder)))
    print(f"\n{folder.page_path}")
    if why := format_missing_matplotlib_message():
        print(f"it has no pictures: {why}")
    return 0


def merge_traces_and_print_path(args: argparse.Namespace) -> int:
    """Merge the traces of all ranks into one file for Perfetto, and print the path of this file. Return the exit
    status."""
    with naming_folder_in_errors(args.folder):
        path, error, messages = merge_traces(args.folder)
    print(
        f"{path}: open it in https://ui.perfetto.dev\n"
        f"clocks of two ranks differ by at most {1e6 * error:.1f} us; {messages} messages with both ends"
    )
    return 0


def print_runs(args: argparse.Namespace) -> int:
    """Print a table of the given runs, followed by the arguments that differ between the runs. If no runs are given,
    print a table of all runs. Return the exit status."""
    given = [path if (path / "config.json").exists() else args.folder / path for path in args.run]
    for path in given:
        if not (path / "config.json").exists():
            raise ConfigError(
                f"{path} holds no run: there is no config.json; `fsdpx runs` lists those in {args.folder}/"
            )
    found = given or sorted(path.parent for path in args.folder.glob("*/config.json"))
    if not found:
        raise ConfigError(f"{args.folder}/ holds no run: train one, or name the folder with --in")
    folders = [RunFolder(path) for path in found]
    with naming_folder_in_errors(args.folder):
        print(_format_runs(folders))
        if len(given) > 1:
            print(f"\n{_format_argument_differences(folders)}")
    return 0


def _format_runs(folders: list[RunFolder]) -> str:
    rows: list[tuple[str, ...]] = [("run", "begun", "ranks", "steps", "loss", "validation", "rate", "ended")]
    for folder in folders:
        config, metrics = folder.read_json("config.json"), folder.read_metrics()
        last = {name: row[name] for row in metrics for name in row}
        best = min((row["validation_loss"] for row in metrics if "validation_loss" in row), default=None)
        rates = [row["rate"] for row in metrics if "rate" in row][1:]
        rate = sorted(rates)[len(rates) // 2] if rates else None
        ended = "ended" in folder.read_json("report.json")
        rows.append(
            (
                folder.path.name, str(config.get("begun", ""))[5:16], str(config.get("ranks", "")),
                str(last.get("step", 0)), _format_number(last.get("loss")), _format_number(best),
                "" if rate is None else f"{rate:,.0f}",
                "yes" if ended else "no",
            )
        )  # fmt: skip
    return format_table(rows)


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _format_argument_differences(folders: list[RunFolder]) -> str:
    """Return a table of the arguments that differ between the runs, with one column per run."""
    given: list[dict[str, Any]] = [
        dict(iterate_flat_items({"ranks": f.read_json("config.json").get("ranks"), **f.read_arguments()}))
        for f in folders
    ]
    names = [n for n in dict.fromkeys(n for one in given for n in one) if len({str(one.get(n)) for one in given}) > 1]
    rows = [("differ in", *(folder.path.name for folder in folders))]
    rows += [(name, *(str(one.get(name, "")) for one in given)) for name in names]
    return format_table(rows) if names else "no argument differs"


def train_run_file(args: argparse.Namespace) -> int:
    """Train and validate the model that a run file describes, and save the results. Return the exit status.
    Collective."""
    builder = ModelBuilder.from_file(args.file, args.changes)
    options, comm = builder.get_fit_options(), init()
    batches, unit = options.pop("validation_batches", None), options.get("unit", "samples")
    if not (batches is None or (isinstance(batches, int) and batches > 0)):
        raise ConfigError(f"{args.file}: [fit] validation_batches={batches!r}: a whole number, at least 1")
    folder, _ = agree_on_run_folder_and_last_arguments(Path(args.file).stem, args.run, args.resume, comm)
    trainer = builder.build_trainer(comm)
    train_on, held_out = builder.make_loaders(trainer)
    if held_out is not None:
        with held_out:
            options["validation"] = list(islice(held_out, batches)) if batches else held_out
    if trainer.call_runner.rank == 0:
        folder.write_config(dict(builder.plan), comm.size)
        placed = trainer.inspect.placement
        size, chosen = placed.layout.size, placed.tuning
        ranks = format_count(comm.size, "rank")
        print(wrap_for_terminal(f"{args.file}: {size:,} parameters on {ranks}; chosen: {chosen}"), flush=True)
    trainer.inspect.reset_counters()  # the report should cover only the training, not the setup
    checkpoints = CheckpointConfig(folder.checkpoint_folder, every=options.get("every", 50), keep=2)
    with train_on:
        history = trainer.fit(train_on, **{"log": folder.path, "checkpoints": checkpoints, **options})
    summary = trainer.inspect.gather_summary()
    if trainer.call_runner.rank == 0:
        print(f"\n{format_summary_line(history, unit)}", flush=True)
    save_and_print_results(trainer, history, folder, summary, f"fsdpx train {args.file} --resume, with more steps")
    return 0
