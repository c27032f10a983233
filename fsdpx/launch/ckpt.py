"""`ckpt`: inspect, verify, compare and convert checkpoints in a single process, without MPI and with little memory."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdpx.core.base.config import parse_byte_count
from fsdpx.core.base.messages import format_count, wrap_for_terminal
from fsdpx.core.base.safe_files import expanduser
from fsdpx.core.checkpoint import offline
from fsdpx.core.checkpoint.atomic_commit import format_os_independent_error_text
from fsdpx.core.checkpoint.format import STATE_FILE_NAME
from fsdpx.core.checkpoint.read import CheckpointSource
from fsdpx.core.checkpoint.save import format_run_description, read_run_description
from fsdpx.core.checkpoint.write import is_checkpoint
from fsdpx.core.trainer.fit_checkpoints import CheckpointConfig
from fsdpx.errors import CheckpointError, ConfigError, escape_control

__all__ = ["add_options", "ckpt", "iterate_flat_items", "print_checkpoint_differences"]

DTYPES = ("float64", "float32", "float16", "fp16", "bf16", "bfloat16")


def add_options(p: argparse.ArgumentParser) -> None:
    actions = p.add_subparsers(dest="action", required=True, metavar="inspect|verify|diff|convert")
    inspect = actions.add_parser("inspect", help="show files, tensors and the training state")
    verify = actions.add_parser("verify", help="check headers, sizes and digests; exit status 1 if damaged")
    diff = actions.add_parser("diff", help="compare names, shapes, formats and values; exit status 1 if any differ")
    convert = actions.add_parser("convert", help="write the weights in another format, to one file or several")
    for one in (inspect, verify, diff, convert):
        one.add_argument("path", type=expanduser, help="a checkpoint, a safetensors file, or a folder with such files")
    diff.add_argument("other", type=expanduser, help="what to compare it with")
    convert.add_argument("target", type=expanduser, help="the folder to write")
    formats = f"number format of the weights: {', '.join(DTYPES)}"
    convert.add_argument("--dtype", default=None, choices=DTYPES, metavar="FORMAT", help=formats)
    convert.add_argument("--shard-bytes", default=None, help="maximum bytes of one file: a number, or 500MB, 5GB, 2GiB")


def ckpt(args: argparse.Namespace) -> int:
    """Run `ckpt inspect`, `verify`, `diff` or `convert`, and print the result. Return the exit status. Raise
    CheckpointError if a file cannot be read or written."""
    try:
        return _run_and_print_action(args)
    except OSError as error:
        raise CheckpointError(format_os_independent_error_text(error)) from error


def _run_and_print_action(args: argparse.Namespace) -> int:
    if args.action == "inspect":
        source = offline.open_checkpoint_source(_resolve_and_print_newest_checkpoint(args.path))
        print(wrap_for_terminal(_format_checkpoint_contents(source)))
        return 0
    if args.action == "verify":
        return _verify_and_print_digests(_resolve_and_print_newest_checkpoint(args.path))
    if args.action == "diff":
        return print_checkpoint_differences(args.path, args.other)
    made = offline.convert_weights(args.path, args.target, args.dtype, _parse_shard_bytes(args.shard_bytes))
    for name, contents in made.files.items():
        print(f"{args.target / name}: {format_count(len(contents.tensors), 'tensor')}, {_format_size(contents.size)}")
    return 0


def _resolve_and_print_newest_checkpoint(path: Path) -> Path:
    """If `path` is a folder of several checkpoints, as written by `fit`, print the name of the newest checkpoint and
    return its path. Otherwise return `path`."""
    found = CheckpointConfig(path).find_latest()
    if found is None or is_checkpoint(path):
        return path
    print(f"{path}: a folder of checkpoints, the newest is {found.name}")
    return found


def _format_checkpoint_contents(source: CheckpointSource) -> str:
    weights = source.select_state_or_weights(state=False).locations.values()
    lines = [f"{sum(entry.elements for _, entry in weights):,} elements of weights"]
    if source.manifest is not None:
        lines.append(f"written by: {format_run_description(read_run_description(source))}")
    state = offline.read_state(source)
    lines += [f"{key}: {_format_value(value)}" for key, value in state.items() if value is not None]
    for file, contents in source.files.items():
        tensors = format_count(len(contents.tensors), "tensor")
        lines.append(f"{source.folder / file}: {tensors}, {_format_size(contents.size)}")
        lines += [f"  {name}  {e.code} {list(e.shape)}" for name, e in contents.tensors.items()]
        lines += [f"  {key} = {value}" for key, value in contents.metadata.items() if file != STATE_FILE_NAME]
    return "\n".join(lines)


def _verify_and_print_digests(path: Path) -> int:
    """Recompute the digests of a checkpoint, and print which tensors are damaged. Return 1 if there are any, else 0."""
    source, wrong = offline.open_and_list_damaged_tensors(path)
    count = format_count(len(source.locations), "tensor")
    size = _format_size(sum(contents.size for contents in source.files.values()))
    if source.manifest is None:
        print(f"{source.folder}: {count}, {size}: headers and sizes are good; there are no digests to check")
        return 0
    for name in wrong:
        print(
            f"{source.folder / source.locations[name][0]}: {escape_control(name)} is damaged: its digest does not fit"
        )
    if not wrong:
        print(f"{source.folder}: {count}, {size}: intact")
    return 1 if wrong else 0


def print_checkpoint_differences(first: Path, second: Path) -> int:
    """Print the differences between two checkpoints. Return 1 if there are any, else 0."""
    a, b = offline.open_checkpoint_source(first), offline.open_checkpoint_source(second)
    lines = []
    for found in offline.compare_sources(a, b):
        largest = "" if found.largest is None else f", largest difference {found.largest:.6g}"
        lines.append(f"{found.name}: {found.what}{largest}")
    lines += _iterate_state_differences(offline.read_state(a), offline.read_state(b))
    same = f"the same: {format_count(len(a.locations), 'tensor')}"
    print(wrap_for_terminal("\n".join([format_count(len(lines), "difference") if lines else same, *lines])))
    return 1 if lines else 0


def _iterate_state_differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """Yield one line of text for each value of the training state that differs between two checkpoints. Names of
    nested values are joined with dots, such as "fit.done"."""
    a, b = dict(iterate_flat_items(first)), dict(iterate_flat_items(second))
    names = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
    for name in names:
        one, other = _format_inner_value(a.get(name)), _format_inner_value(b.get(name))
        yield f"{name}: {one} and {other}" if one != other else f"{name}: {one}, of other values"


def iterate_flat_items(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the items of nested dicts, with nested keys joined by dots, such as "fit.steps"."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from iterate_flat_items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _format_value(value: Any) -> str:
    """Return a value of the training state as one line of text. For a dict or list inside a dict, only the number of
    entries is shown."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{name} {_format_inner_value(one)}" for name, one in value.items())


def _format_inner_value(value: Any) -> str:
    return (
        f"({len(value)} {'entry' if len(value) == 1 else 'entries'})" if isinstance(value, dict | list) else str(value)
    )


def _parse_shard_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        count = parse_byte_count(text, "--shard-bytes")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if count < 1:
        raise CheckpointError(f"--shard-bytes {text}: at least one byte is needed")
    return count


def _format_size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB" if count >= 1 << 20 else f"{count} bytes"
