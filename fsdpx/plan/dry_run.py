"""`dry_run` runs one training step of one rank on shape-only arrays (arrays without data), and counts communication
calls, bytes sent and memory. It needs neither MPI nor the other ranks."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property, partial
from typing import Any
from zlib import crc32

import numpy as np

from fsdpx.core.array.shapes.array import measuring_shape_only_memory
from fsdpx.core.base import environment
from fsdpx.core.base.arguments import wrap_with_type_hint_check
from fsdpx.core.base.option_names import ForeignModule
from fsdpx.core.base.safe_files import require_json_fields
from fsdpx.core.base.version import __version__, get_package_version
from fsdpx.core.comm.backend import FakeCommunicator, FakeNodeCommunicator
from fsdpx.core.engine.activations import HeapRecorder
from fsdpx.core.program import Program
from fsdpx.core.state import tuning
from fsdpx.core.state.footprint import Footprint, ProcessBytes, count_arena_and_window_bytes
from fsdpx.core.trainer.distribute import distribute
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.errors import ConfigError
from fsdpx.ext.native import code_cache
from fsdpx.ext.observe.report import Report
from fsdpx.nn.layer import Layer
from fsdpx.plan.peak import ACTIVATION_BYTES_PER_GAP_BYTE, MemoryPeak, find_memory_peak

__all__ = ["DryRun", "ProcessBaseline", "dry_run", "measure_or_load_baseline_memory"]

MEASURE_TIMEOUT_SECONDS = 240.0
"""Timeout of the child process that measures memory. Compiling all kernels may take most of this time."""

CHILD_CODE = """
import json, sys
def kilobytes():
    lines = (line.split() for line in open("/proc/self/status"))
    found = {words[0]: int(words[1]) for words in lines if words[0].startswith("Rss")}
    return [1024 * found[name] for name in ("RssAnon:", "RssFile:", "RssShmem:")]
import numpy, fsdpx
from fsdpx import nn, optim
from fsdpx.core.array import blas, cores
backend, library, ranks = sys.argv[1:]
before = kilobytes()
if backend == "mpi":
    from mpi4py import MPI
between = kilobytes()
comm = fsdpx.init(backend)
cores.set_threads_per_rank(int(ranks))
blas.select_library(library)
trainer = nn.GPT(16, 16, 2, 2, 8).as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(), tune=False)
x = numpy.zeros((2, 8), "int64")
for _ in range(3):
    trainer.step(x, x)
taken = kilobytes()
out, a, b = numpy.ones((3, 1024, 1024), "float32")
ready = kilobytes()
blas.gemm(out, a, b)
print(json.dumps([taken, [b - a for a, b in zip(before, between)], kilobytes()[0] - ready[0]]))
"""


@dataclass(frozen=True)
class ProcessBaseline:
    """Resident memory of a process without a model, in bytes.

    Attributes
    ----------
    own : private memory of the process, excluding the memory that MPI adds
    files : memory for code and data files that the processes on a host share, excluding MPI's files
    mpi : memory that MPI adds to `own`, including MPI's shared memory
    mpi_files : memory that MPI adds to `files`
    workspace : workspace of the BLAS library, which holds reordered copies of large operands
    """

    own: int
    files: int
    mpi: int = 0
    mpi_files: int = 0
    workspace: int = 0


_TYPES = dict.fromkeys((one.name for one in fields(ProcessBaseline)), int)


@cache
def measure_or_load_baseline_memory(mpi: bool, blas: str, ranks_here: int) -> ProcessBaseline:
    """Return the resident memory of a process without a model. It is measured once per machine, which takes about
    three seconds; later calls read the recorded result.

    `mpi` says whether an MPI launcher starts the ranks; it is ignored if MPI cannot be loaded. `blas` is the library
    for matrix products, and `ranks_here` the number of ranks on this host. Raises ConfigError if the measurement
    fails."""
    key = {"machine": platform.node(), "python": sys.version, "blas": blas, "mpi": mpi, "ranks here": ranks_here}
    key |= {"code": code_cache.can_store_machine_code(), "fsdpx": __version__, "asked": crc32(CHILD_CODE.encode())} | {
        name: get_package_version(name) for name in ("numpy", "numba", "mpi4py", "mkl")
    }
    known = tuning.load_record("process", key, lambda value: ProcessBaseline(**require_json_fields(value, _TYPES)))
    if known is not None:
        return known
    # the first run only compiles missing kernels; it is not measured, because compiling takes memory
    _measure_baseline_memory_in_child(mpi, blas, ranks_here)
    found = _measure_baseline_memory_in_child(mpi, blas, ranks_here)
    if isinstance(found, str) and mpi:
        return measure_or_load_baseline_memory(False, blas, ranks_here)
    if isinstance(found, str):
        raise ConfigError(f"the memory of a process cannot be measured here: {found}")
    tuning.write_record("process", key, asdict(found))
    return found


def _measure_baseline_memory_in_child(mpi: bool, blas: str, ranks_here: int) -> ProcessBaseline | str:
    """Measure the resident memory of a new process without a model. Return an error message if the measurement
    fails."""
    command = [sys.executable, "-c", CHILD_CODE, "mpi" if mpi else "local", blas, str(ranks_here)]
    try:
        done = subprocess.run(
            command,
            env=environment.copy_without_rank_variables(),
            capture_output=True,
            text=True,
            timeout=MEASURE_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
        (own, files, shared), mpi_adds, workspace = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"no answer after {MEASURE_TIMEOUT_SECONDS:.0f} s"
    except (OSError, ValueError, IndexError, TypeError) as error:
        return (done.stderr.strip().splitlines() or [str(error)])[-1]
    taken = max(mpi_adds[0], 0)
    return ProcessBaseline(own - taken, files - mpi_adds[1], taken + shared, mpi_adds[1], max(workspace, 0))


OBJECT_BYTES_PER_PARAMETER = 6 << 10
"""Number of bytes that Python objects take per parameter tensor: views, fields, and the tensor's share of the objects
that belong to its layer and to the program. Measured on models with a thousand layers, where these objects take 10% of
the process's memory.
"""


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run: the program of the step, its traffic and its memory.

    Parameters
    ----------
    program : the actions of the step
    report : counted traffic and memory of one step
    trainer : the trainer that ran on shape-only arrays
    activations : peak bytes of activations that are kept between actions: outputs of the forward pass, their gradients,
        and values kept for the backward pass. A trace of a real step measures the same quantity.
    peak_heap_bytes : peak bytes outside the arena (the preallocated buffers) at any time, including the whole batch and
        temporaries of layers while they compute. This number is larger than `activations`. Plans and `footprint` list
        this larger number as "activations".
    ranks_here : number of ranks on this rank's host
    peak : the moment of highest memory use, and the memory held for each unit
    """

    program: Program
    report: Report
    trainer: Trainer
    activations: int
    peak_heap_bytes: int
    ranks_here: int
    peak: MemoryPeak

    @cached_property
    def footprint(self) -> Footprint:
        """Predicted peak memory of the whole process, including interpreter, libraries, MPI and shared memory.

        The memory of a process without a model is measured once per machine, which takes about three seconds. The
        prediction assumes that kernels are already compiled. The first job on a machine, which compiles its kernels,
        needs about 150 MiB more."""
        placement, here = self.trainer.inspect.placement, self.ranks_here
        base = measure_or_load_baseline_memory(placement.axes.world.size > 1, placement.tuning.blas, here)
        objects = OBJECT_BYTES_PER_PARAMETER * len(placement.layout.specs)
        largest = max((spec.size for spec in placement.layout.specs.values() if len(spec.shape) > 1), default=0)
        # BLAS holds copies of at most two operands
        workspace = min(base.workspace, 2 * largest * placement.formats.compute.itemsize)
        gaps = self.peak_heap_bytes // ACTIVATION_BYTES_PER_GAP_BYTE
        parts = {
            "interpreter and libraries": ProcessBytes(base.own, base.own),
            "code of libraries": ProcessBytes(base.files + base.mpi_files, (base.files + base.mpi_files) // here),
            "MPI": ProcessBytes(base.mpi, base.mpi),
            "Python objects of layers": ProcessBytes(objects, objects),
            **count_arena_and_window_bytes(self.trainer.inspect.engine.state, here),
            "activations": ProcessBytes(self.peak_heap_bytes, self.peak_heap_bytes),
            "between activations": ProcessBytes(gaps, gaps),
            "matrix products": ProcessBytes(workspace, workspace),
        }
        return Footprint({name: part for name, part in parts.items() if part.rss}, here)


@partial(wrap_with_type_hint_check, when="failed")
def dry_run(
    model: Layer | ForeignModule,
    x: Any,
    y: Any,
    *,
    ranks: int,
    rank: int = 0,
    ranks_per_host: int = 1,
    **options: Any,
) -> DryRun:
    """Run one training step of one rank on arrays without data, and return its predicted memory and traffic. A dry run
    needs neither MPI nor initial parameter values.

    Parameters
    ----------
    model : the model
    x, y : this rank's batch as arrays or (shape, dtype) pairs; only the shape and dtype of arrays are used. For several
        inputs, a tuple or dict of arrays or pairs
    ranks : number of ranks in the simulated job
    rank : the rank to run
    ranks_per_host : number of ranks per host; they share buffers if shared memory is enabled (docs: speed)
    options : options of `fsdpx.distribute`, except comm, device and backend

    Returns
    -------
    DryRun : the rank's program and report, and the `footprint` of its process

    Raises
    ------
    ConfigError : if `fsdpx.distribute` would reject the options, or the batch contains anything other than arrays and
        (shape, dtype) pairs
    """
    for name in ("comm", "device", "backend"):
        if name in options:
            raise ConfigError(f"dry_run decides {name} itself")
    comm = _make_fake_world(rank, ranks, ranks_per_host)
    with measuring_shape_only_memory() as meter:
        trainer = distribute(model, comm=comm, device="shape", **options)
        trainer.inspect.reset_counters()
        watch = HeapRecorder(trainer.inspect.engine, meter)
        trainer.step(_make_shape_only_arrays(x), _make_shape_only_arrays(y, "y"))
    program = trainer.inspect.engine.last_program
    machine = comm.ranks_on_host if isinstance(comm, FakeNodeCommunicator) else [rank]
    assert program is not None
    peak = find_memory_peak(trainer.inspect.engine, watch)
    numbers = watch.activations.peak_bytes, watch.peak_heap_bytes, len(machine)
    return DryRun(program, trainer.report(), trainer, *numbers, peak)


def _make_fake_world(rank: int, ranks: int, ranks_per_host: int) -> FakeCommunicator:
    """Return a communicator that pretends to belong to a job of `ranks` ranks. Consecutive ranks share a host, as
    launchers place them."""
    if ranks_per_host < 1:
        raise ConfigError(f"ranks_per_host={ranks_per_host}: at least one rank is on a host")
    if min(ranks, ranks_per_host) == 1 or not environment.read_environment().can_share_memory or not 0 <= rank < ranks:
        return FakeCommunicator(rank, ranks)
    return FakeNodeCommunicator(rank, [one // ranks_per_host for one in range(ranks)])


def _make_shape_only_arrays(spec: Any, name: str = "x") -> Any:
    """Convert a batch, given as arrays or (shape, dtype) pairs, to shape-only arrays. Error messages call the batch
    `name`."""
    from fsdpx.core.array.namespace import parse_dtype
    from fsdpx.core.array.shapes import ShapeArray

    if isinstance(spec, dict) and spec and name == "x":
        return {key: _make_shape_only_arrays(one) for key, one in spec.items()}
    if hasattr(spec, "shape") and hasattr(spec, "dtype"):
        return ShapeArray(tuple(spec.shape), np.dtype(spec.dtype))
    if isinstance(spec, Sequence) and len(spec) == 2 and isinstance(spec[1], str | type | np.dtype):
        return ShapeArray(tuple(spec[0]), parse_dtype(spec[1]) if isinstance(spec[1], str) else np.dtype(spec[1]))
    if isinstance(spec, Sequence) and len(spec) and not isinstance(spec, str | bytes):
        return tuple(_make_shape_only_arrays(one) for one in spec)
    raise ConfigError(f"dry_run({name}=): a batch is an array or a pair ((8, 4), 'float32'), not {spec!r}")
