"""`compile`: compile the kernels of models before the first job starts, so that no rank waits for compilation during
training."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from fsdpx import optim
from fsdpx.core.array import random
from fsdpx.core.array.kernels import choice
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base import config, environment
from fsdpx.core.base.config import Precision
from fsdpx.core.base.extensions import list_extensions
from fsdpx.core.base.messages import reporting_if_slow
from fsdpx.core.base.processor import read_cpuinfo_field
from fsdpx.core.base.safe_files import can_write_folder
from fsdpx.core.comm.node.persistent import compile_collective_kernels
from fsdpx.core.compression import make_gradient_codec
from fsdpx.core.engine.warmup import list_kernel_names, list_warm_up_calls, run_warm_up_calls_in_rotated_order
from fsdpx.errors import ConfigError
from fsdpx.ext.half.rounded import RoundedOptimizer
from fsdpx.ext.native import code_cache
from fsdpx.launch.catalog import list_kernels_of_model_and_loss
from fsdpx.launch.info import describe_package_version

__all__ = ["add_options", "compile_kernels"]

OPTIMIZERS = (
    optim.SGD(lr=0.0), optim.SGD(lr=0.0, momentum=0.9), optim.Adam(lr=0.0), optim.LAMB(lr=0.0), optim.Lion(lr=0.0),
    optim.Muon(lr=0.0),
)  # fmt: skip
"""One optimizer for each update kernel. All are compiled, because they compile quickly and a job may use any of
them."""


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("example", nargs="*", help="as for `show`: gpt-small, unet2d, mymodule:make_model, ...")
    p.add_argument("--all", action="store_true", help="every kernel, for any model, in float32, float64 and bf16")
    p.add_argument("--precision", default="float32", help="as for distribute (default: float32)")


def compile_kernels(args: argparse.Namespace) -> str:
    """Compile the kernels of the requested models. Return a message with the number of compiled kernels and the cache
    folder."""
    if args.all == bool(args.example):
        raise ConfigError("name a model, such as gpt-small, unet2d or mymodule:make_model, or say --all")
    folder = _require_writable_code_folder()
    calls = _make_functions_that_compile_kernels() if args.all else []
    for name in dict.fromkeys(args.example):
        calls += _make_kernel_compilation_calls(
            list_kernels_of_model_and_loss(name), config.resolve_precision(args.precision)
        )
    before, begin = set(folder.glob("*.code")), perf_counter()
    with reporting_if_slow(True, "compiling kernels") as count:
        run_warm_up_calls_in_rotated_order(calls, count=count)
    what = "all models" if args.all else f"{', '.join(dict.fromkeys(args.example))} in {args.precision}"
    new = set(folder.glob("*.code")) - before
    if not code_cache.can_store_machine_code():
        return f"kernels of {what} are compiled; Numba keeps them where NUMBA_CACHE_DIR says, else beside fsdpx"
    processor = read_cpuinfo_field("model name") or platform.machine()
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, Numba {describe_package_version('numba')}"
    return (
        f"kernels of {what} are in {folder}\n"
        f"{len(new)} were compiled now, in {perf_counter() - begin:.0f} s, for {processor}, {versions}\n"
        "jobs with the same, and with this FSDPX_CACHE, compile nothing"
    )


def _require_writable_code_folder() -> Path:
    """Return the cache folder for compiled code. Raise ConfigError if Numba is missing or the folder cannot be
    written."""
    if not choice.has_numba():
        raise ConfigError("Numba is not installed, so nothing is compiled: pip install numba")
    cache = environment.read_environment().cache
    if not can_write_folder(cache):
        raise ConfigError(f"{cache} cannot be written: set FSDPX_CACHE to a folder that the jobs can read")
    return cache / "code"


def _make_kernel_compilation_calls(runs: Iterable[str], precision: Precision) -> list[Callable[[], Any]]:
    """Return functions that compile the kernels named in `runs`, and all other code that is needed for training in this
    precision, such as optimizer updates and shared-memory collectives."""
    dtypes = parse_dtype(precision.compute), parse_dtype(precision.gradient_dtype), parse_dtype(precision.master_dtype)
    rounded = precision.master_dtype != precision.gradient_dtype
    optimizers = [RoundedOptimizer(one, precision.rounding == "kahan") if rounded else one for one in OPTIMIZERS]
    warm = partial(
        make_gradient_codec(None, precision.reduce_dtype, precision.gradient_dtype).warm_up,
        parse_dtype(precision.gradient_dtype),
    )
    meetings = partial(compile_collective_kernels, parse_dtype(precision.reduce_dtype).name)
    return [
        partial(random.normal, 0, "", 0, 1),
        meetings,
        *list_warm_up_calls(runs, optimizers, dtypes, norm=True),
        warm,
    ]


def _make_functions_that_compile_kernels() -> list[Callable[[], Any]]:
    """Return functions that compile every kernel and codec, in float32, float64 and bf16."""
    names = list_kernel_names()
    calls = [
        call
        for one in ("float32", "float64", "bf16")
        for call in _make_kernel_compilation_calls(names, Precision(one))
    ]
    codecs = [make_gradient_codec(name, "float32", "float32") for name in list_extensions("codec")]
    return calls + [partial(codec.warm_up, np.dtype(np.float32)) for codec in codecs]
