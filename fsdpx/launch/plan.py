"""`fsdpx plan` finds the fastest configuration of a job, and `fsdpx measure-machine` measures the speed of a
machine."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from fsdpx import plan
from fsdpx.core.base import environment
from fsdpx.core.base.messages import reporting_if_slow
from fsdpx.core.base.safe_files import READABLE, expanduser, write_file
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.trainer.initialize import init
from fsdpx.errors import ConfigError
from fsdpx.ext.observe.plots import draw_scaling, require_writable_picture, save_figure
from fsdpx.launch.catalog import CatalogModel, find_model
from fsdpx.launch.show import (
    converting_write_errors,
    draw_step_to_file,
    make_error_that_samples_are_not_fields,
    parse_dim_size_tuple,
    parse_recompute,
)  # fmt: skip
from fsdpx.plan.auto import MACHINE_FILE
from fsdpx.plan.measuring import format_machine_file, measure_this_machine
from fsdpx.plan.peak import format_option_changes
from fsdpx.plan.prediction import dry_run_one_rank_per_group, predict_from_dry_runs
from fsdpx.plan.searching import ANY_GRID, MAX_CANDIDATES

__all__ = ["add_measure_options", "add_options", "measure_and_write_machine", "search_and_format_plan"]


def add_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `fsdpx plan` to its argument parser."""
    p.add_argument("example", nargs="?", default="gpt-small", help="as for `show`: gpt-small, mymodule:make_model, ...")
    size = p.add_mutually_exclusive_group(required=True)
    size.add_argument("--ranks", type=int, default=None, help="number of ranks")
    size.add_argument("--hosts", type=int, default=None, help="number of hosts, filled with ranks")
    names = ", ".join(plan.Machine.list_names())
    p.add_argument(
        "--machine", default=MACHINE_FILE, help=f"a file of measure-machine (default: {MACHINE_FILE}), or {names}"
    )
    p.add_argument("--memory", default=None, help="memory of a rank, such as 16GiB (default: that of the machine)")
    p.add_argument("--batch", default=None, help="samples of the global batch; for your model its shape: 8x1024")
    p.add_argument("--strategy", default=None, help="try only this strategy")
    p.add_argument("--mesh", default=None, help="try only this mesh, such as pipe=2,tensor=2")
    p.add_argument("--field", default=None, help="cells of the field of unet2d, unet3d or fno2d, such as 128,128,128")
    p.add_argument("--domain", default=None, help="try only this grid of ranks, such as 2,2,1")
    p.add_argument("--microbatches", type=int, default=None, help="try only this number")
    p.add_argument("--schedule", default=None, help="try only this schedule")
    p.add_argument("--recompute", default=None, help="try only this: all, attention, k (every k-th unit), or bytes")
    p.add_argument("--precision", default=None, help="use this precision")
    p.add_argument("--codecs", default="", help="lossy codecs that may be chosen, such as bf16,int8")
    p.add_argument("--most", type=int, default=MAX_CANDIDATES, help="maximum number of configurations to predict")
    p.add_argument("--json", action="store_true", help="print the plan as JSON")
    p.add_argument("--png", default=None, help="draw the simulated step of the fastest one to this file")
    p.add_argument("--ranks-png", default=None, help="draw time and memory by number of ranks to this file")


FIXED_PLACEMENTS = ("strategy", "microbatches", "schedule", "precision")


def search_and_format_plan(args: argparse.Namespace) -> str:
    """Search for the fastest configuration of a model, draw the requested figures, and return the resulting plan as
    text."""
    for option, path in (("--png", args.png), ("--ranks-png", args.ranks_png)):
        if path is not None:
            require_writable_picture(option, path)
    example = find_model(args.example, args.batch)
    fixed = {name: getattr(args, name) for name in FIXED_PLACEMENTS if getattr(args, name) is not None}
    fixed |= {} if args.mesh is None else {"mesh": Mesh.parse(args.mesh)}
    fixed |= {} if args.recompute is None else {"recompute": parse_recompute(args.recompute)}
    example, space = _apply_field_and_domain_options(args, example)
    if example.batch < 1:
        raise ConfigError(f"--batch {example.batch}: at least one sample")
    codecs = [word for word in args.codecs.split(",") if word]
    with reporting_if_slow(True, "searching:", None) as count:
        found = plan.search(
            example.model(), batch=(example.x(example.batch), example.y(example.batch)), ranks=args.ranks,
            hosts=args.hosts, machine=args.machine, memory=args.memory, most=args.most, loss=example.loss,
            domain=space, codecs=codecs, say=count, **fixed,
        )  # fmt: skip
        best = found.best_candidate.prediction
        count("what would lower the memory")
        changes = best.list_memory_lowering_changes()
    if args.png is not None:
        batch = example.x(example.batch), example.y(example.batch)
        options = {**fixed, **found.best_candidate.options, "loss": example.loss}
        dry = dry_run_one_rank_per_group(example.model(), batch, found.rank_count, found.machine.compute.gpu, **options)
        title = f"{args.example}: {found.best_candidate.python_text}"
        prediction = predict_from_dry_runs(dry, found.machine)
        print(draw_step_to_file(dry, prediction, title, args.png, found.memory), file=sys.stderr)
    if args.ranks_png is not None:
        rows = [(one.mesh.size, one.seconds, one.memory) for one in found.scaling]
        title = f"{args.example} on {found.machine.name}: {found.best_candidate.python_text}"
        with converting_write_errors(args.ranks_png):
            drawn = draw_scaling(title, rows, found.memory)
            print(f"drawn: {save_figure(drawn, args.ranks_png)}", file=sys.stderr)
    if args.json:
        more = {"peak": best.peak.to_json(), "lower": [one.to_json() for one in changes]}
        return json.dumps(found.to_json() | more, indent=1)
    explained = f"{best.peak}\n\n{format_option_changes(changes, best.seconds)}"
    return f"{found.format_plan(f'{args.example}: {example.about}')}\n\nmemory of the fastest\n{explained}"


def _apply_field_and_domain_options(args: argparse.Namespace, example: CatalogModel) -> tuple[CatalogModel, Any]:
    """Return the model with samples of the size given by --field, and the `domain` argument of the search. This
    argument is the grid of ranks given by --domain, or else a value that stands for all possible grids. It is None if
    samples are not fields."""
    cells, dims = (
        parse_dim_size_tuple("--field", args.field) or example.cells,
        parse_dim_size_tuple("--domain", args.domain),
    )
    if not example.cells and (cells or dims):
        raise make_error_that_samples_are_not_fields(args.example)
    return (example.with_field_shape(cells, None), dims or ANY_GRID) if example.cells else (example, None)


def add_measure_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `fsdpx measure-machine` to its argument parser."""
    p.add_argument("--output", type=expanduser, default=MACHINE_FILE, help="the file to write")
    p.add_argument("--name", default="mine", help="name of the machine")
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="whether cores or GPUs compute")


def measure_and_write_machine(args: argparse.Namespace) -> str:
    """Measure the machine, write the machine file on rank 0, and return a message with the beginning of the file. Under
    mpiexec, this function is collective, and other ranks return ""."""
    comm = init() if environment.read_environment().launcher is not None else make_single_rank_communicator()
    with reporting_if_slow(comm.rank == 0, "measuring: timing", None) as count:
        found = measure_this_machine(args.name, comm, args.device, count)
    if comm.rank:
        return ""
    text = format_machine_file(found)
    with converting_write_errors(args.output):
        write_file(args.output, text, READABLE)
    return f"written: {args.output}; it begins with\n\n{text.partition('[kernels')[0].rstrip()}"
