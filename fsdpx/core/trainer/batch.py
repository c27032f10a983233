"""Make ranks agree on calls and batches. Every collective call of a trainer begins with a small all-gather, in which
ranks compare the methods that they have called. A batch is checked on each rank, compared with the batches of the other
ranks, and split into microbatches."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.devices import CPU, get_device_of_array
from fsdpx.core.array.namespace import LARGEST_INTEGERS, to_host
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.comm.communicator import Communicator, ReduceOp
from fsdpx.core.comm.desync_check import format_calls_by_rank, require_same_settings_on_all_ranks
from fsdpx.core.comm.mesh import AXES_OF_ONE_REPLICA, MeshAxes
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import Microbatch
from fsdpx.errors import DataError, DesyncError, FsdpxError, warn
from fsdpx.nn.gradient_accumulation import cast_input_to_dtype_of_readers, choose_float_dtype

__all__ = [
    "CALL", "LOADER_ENDED", "CallRecord", "DuplicateBatchDetector", "LocalBatch", "add_given_dtype_to_error",
    "add_rank_to_error", "agree_on_batch", "agree_on_call", "all_gather_and_check_call_records",
    "all_gather_four_integers", "all_reduce_max", "check_and_partition_target", "checksum_arrays",
    "describe_different_calls", "has_sample_dim", "has_target_per_output", "hash_text", "list_inputs_in_order",
    "make_shape_only_microbatch", "prepare_inputs", "raising_errors_on_all_ranks", "require_batch_usable_on_device",
    "split_into_microbatches", "to_device_array",
]  # fmt: skip

WIDTH, CALL = 4, 2
"""To compare calls, each rank sends WIDTH 8-byte integers. The integer at index CALL identifies the rank's call. The
other integers are values that the ranks exchange at the same time."""
VALUE_COLUMNS = [column for column in range(WIDTH) if column != CALL]
VALUE_COUNT = len(VALUE_COLUMNS)


class CallRecord(NamedTuple):
    """A rank's report about its call: the name of the call, a description of its arguments, and the class and text of
    its error, if any. All ranks use these records to raise the same error."""

    call: str
    features: str = ""
    kind: type[FsdpxError] | None = None
    text: str = ""


def all_gather_four_integers(comm: Communicator, row: Sequence[int], what: str) -> np.ndarray:
    """Gather four integers (`row`) from each rank, and return them as an int64 array of shape (ranks, 4). `what` names
    the transfer in error messages. Collective: one all-gather of 32 bytes per rank; a single rank sends nothing."""
    if not comm.has_peers:
        return np.array([row], np.int64)
    table = np.zeros((comm.size, WIDTH), np.int64)
    table[comm.rank] = row
    flat = table.reshape(-1)
    comm.all_gather(flat[WIDTH * comm.rank : WIDTH * (comm.rank + 1)], flat, what=what).wait()
    return table


def agree_on_call(comm: Communicator, call: str, values: Mapping[str, str] | None = None) -> None:
    """Wait until all ranks have reached `call`. If some ranks have made a different call, raise DesyncError on all
    ranks. If `values` (the arguments to compare) differ between ranks, raise ConfigError on all ranks. Collective."""
    values_number = 0 if values is None else hash_text(str(sorted(values.items())))
    table = _all_gather_integers_and_check_call(comm, call, [values_number] * VALUE_COUNT)
    if values is not None and (table[:, 0] != values_number).any():
        require_same_settings_on_all_ranks(comm, values)


@contextmanager
def raising_errors_on_all_ranks(comm: Communicator, call: str, agree_at_end: bool = False) -> Iterator[None]:
    """Context manager that raises an FsdpxError on all ranks if any rank raises one in the `with` block. The block must
    not communicate. Collective.

    `call` is the name of the collective call that follows. When this call begins, all ranks compare their calls. A rank
    then learns whether another rank has failed in the block, so the block itself communicates only if this rank has
    raised an error. If no call follows the block, pass `agree_at_end`; ranks then report errors to each other at the
    end of the block."""
    if not comm.has_peers:
        yield
        return
    try:
        yield
    except FsdpxError as error:
        all_gather_four_integers(comm, [0, 0, hash_text(f"{call}: an error"), 0], call)
        own_record = CallRecord(call, "", type(error), str(error))
        everyone = comm.all_gather_value(own_record)
        if all(one == own_record for one in everyone):
            raise  # if all ranks have raised the same error, its text needs no rank number
        raise_first_error(everyone)
    else:
        if agree_at_end:
            agree_on_call(comm, call)


def all_reduce_max(comm: Communicator, call: str, values: np.ndarray) -> np.ndarray:
    """Return the elementwise maximum of `values`, a 1-d array of an 8-byte dtype, over all ranks. Ranks also compare
    their calls, as in `agree_on_call`. If there are at most three values, a single message carries the call and the
    values. Collective."""
    if values.size > VALUE_COUNT:
        agree_on_call(comm, call)
        maxima = np.array(values)
        comm.all_reduce(maxima, ReduceOp.MAX, what=call).wait()
        return maxima
    row = np.zeros(VALUE_COUNT, values.dtype)
    row[: values.size] = values
    table = _all_gather_integers_and_check_call(comm, call, row.view(np.int64).tolist())
    return np.ascontiguousarray(table[:, VALUE_COLUMNS]).view(values.dtype)[:, : values.size].max(axis=0)


def _all_gather_integers_and_check_call(comm: Communicator, call: str, values: Sequence[int]) -> np.ndarray:
    """Gather the integers `values` of all ranks, together with a hash of `call`. Raise DesyncError on all ranks if
    some ranks have made a different call."""
    table = all_gather_four_integers(comm, [*values[:CALL], hash_text(call), *values[CALL:]], call)
    if (table[:, CALL] != table[0, CALL]).any():
        all_gather_and_check_call_records(comm, CallRecord(call))
    return table


def all_gather_and_check_call_records(comm: Communicator, own_record: CallRecord) -> list[CallRecord]:
    """Return the call records of all ranks if all ranks have made the same call without an error. Otherwise, raise the
    same error on all ranks. This function is called only if a cheaper comparison of hashes has shown a difference.
    Collective."""
    everyone: list[CallRecord] = comm.all_gather_value(own_record)
    raise_first_error(everyone)
    if any(one.call != own_record.call for one in everyone):
        raise DesyncError(describe_different_calls({rank: one.call for rank, one in enumerate(everyone)}))
    return everyone


def raise_first_error(records: Sequence[CallRecord]) -> None:
    """Raise the error of the lowest rank that reports one, with the prefix "rank N: " before its text. Do nothing if no
    rank reports an error."""
    for rank, record in enumerate(records):
        if record.kind is not None:
            raise add_rank_to_error(record.kind(record.text), rank)


def add_rank_to_error(error: FsdpxError, rank: int) -> FsdpxError:
    """Return the error with the prefix "rank N: " before its text, unless the text already begins with this prefix."""
    text = str(error)
    return error if text.startswith(f"rank {rank}: ") else type(error)(f"rank {rank}: {text}")


def describe_different_calls(calls: dict[int, str]) -> str:
    """Return the error text for ranks that made different calls. `calls` maps each rank to the name of its call."""
    called = format_calls_by_rank(calls)
    return f"ranks called different methods: {called}. All ranks make the same calls, in the same order"


def hash_text(text: str) -> int:
    """Return a 56-bit hash of `text`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


ENOUGH_EQUAL_SAMPLES = 8
"""Number of consecutive samples that must be equal on all data ranks before a warning is issued. Fewer samples may be
equal by chance."""


class DuplicateBatchDetector:
    """Warns if all data ranks train on the same samples, which usually means that the data was not sharded as intended.
    The detector stops checking after its warning, or as soon as samples differ between data ranks.

    Two kinds of batches are ignored: batches without samples, and batches whose samples are all identical. Such batches
    may be intentional, or may come from an idle rank.

    Attributes
    ----------
    may_have_duplicates : True while the detector is still checking
    """

    def __init__(self, axes: MeshAxes) -> None:
        self._size, self._speaks = axes.data.size, axes.world.rank == 0
        self.may_have_duplicates, self._same = self._size > 1, 0

    def count_samples_of_equal_batch_and_warn(self, equal_on_all_ranks: bool, arrays: Sequence[Any]) -> None:
        """If the batch is equal on all data ranks, add its samples to the count of duplicate samples. When this count
        becomes too large, issue a warning.

        Every rank must pass the same `equal_on_all_ranks`, so that all ranks make the same decision."""
        if not equal_on_all_ranks:
            self.may_have_duplicates = False
        elif any(bool((a != a[:1]).any()) for a in arrays):
            self._same += arrays[0].shape[0]
            self.may_have_duplicates = self._same < ENOUGH_EQUAL_SAMPLES
            if not self.may_have_duplicates and self._speaks:
                self._warn_of_duplicate_samples()

    def _warn_of_duplicate_samples(self) -> None:
        warn(
            f"fsdpx: all {self._size} data ranks train on the same samples ({self._same} so far), so together they do "
            "what one rank would: give each its part of the global batch, as DataLoader(comm=trainer.data_group) "
            "does, or "
            "cut it by trainer.data_group.rank and trainer.data_group.size",
        )


@dataclass(frozen=True)
class LocalBatch:
    """This rank's samples of the global batch.

    Attributes
    ----------
    inputs, target : arrays with samples along dim 0
    rows : number of samples of each data rank, in rank order
    row : index of this rank's first sample in the global batch
    """

    inputs: tuple[Any, ...]
    target: Any
    rows: tuple[int, ...]
    row: int

    @property
    def size(self) -> int:
        """Number of samples of this rank."""
        return int(self.inputs[0].shape[0])


def prepare_inputs(placement: Placement, x: Any) -> tuple[Any, ...]:
    """Return the model's inputs as a tuple of arrays on this rank's device. `x` is an array, a tuple, or a dict keyed
    by input name. Floats are converted to the compute dtype. Integers are converted too, unless the model uses them as
    indices."""
    names, takes = placement.layout.inputs, placement.model.takes
    rows = zip(list_inputs_in_order(placement, x), names, takes, strict=True)
    given = [to_device_array(placement, *row) for row in rows]
    arrays = placement.sample_layout.to_model_inputs(given, names)
    for name, array in zip(names, arrays, strict=True):
        if array.ndim == 0:
            raise DataError(f"input {name!r} is a single number: dim 0 must be samples")
        if array.shape[0] != arrays[0].shape[0]:
            raise DataError(f"input {name!r} has {array.shape[0]} samples, input {names[0]!r} has {arrays[0].shape[0]}")
    return tuple(
        [_convert_input_dtype(placement, name, a, word) for name, a, word in zip(names, arrays, takes, strict=True)]
    )


def list_inputs_in_order(placement: Placement, x: Any) -> list[Any]:
    """Return the arrays that the caller passed as `x`, in the order of the model's inputs. Raise DataError if their
    number or names do not match."""
    names = placement.layout.inputs
    if isinstance(x, Mapping):
        if set(x) != set(names):
            raise DataError(f"the model's inputs are {', '.join(names)}, the batch has {', '.join(map(str, x))}")
        return [x[name] for name in names]
    given = list(x) if isinstance(x, tuple | list) and len(names) > 1 else [x]
    if len(given) != len(names):
        raise DataError(f"the model has {len(names)} inputs ({', '.join(names)}), the batch has {len(given)}")
    return given


def _convert_input_dtype(placement: Placement, name: str, array: Any, takes: str) -> Any:
    """Convert an input to the dtype that the layers reading it expect. `takes` says what the elements of the input
    stand for, such as "numbers" or "indices". Raise DataError if an integer is too large for the dtype in which the
    model computes."""
    compute = placement.formats.compute
    largest = LARGEST_INTEGERS.get(compute) if takes == "numbers" and array.dtype.kind in "iu" else None
    if largest is not None and array.size and max(-int(array.min()), int(array.max())) > largest:
        raise DataError(
            f"input {name!r} is {array.dtype} but contains numbers beyond {largest}, the largest of {compute.name}"
        )
    return cast_input_to_dtype_of_readers(array, takes, placement.formats.compute)


def check_and_partition_target(placement: Placement, y: Any, samples: int, batched: bool) -> Any:
    """Return the target on this rank's device, partitioned like the model's output. Return a tuple if `y` has one
    target for each of several outputs. Raise DataError unless the target has the same number of samples as the inputs
    (`samples`). `batched` is true if the caller's arrays have a sample dimension."""
    if not has_target_per_output(placement, y):
        return _prepare_target_of_output(placement, y, samples, TARGET, 0, batched)
    count = len(placement.model.outputs)
    if len(y) != count:
        raise DataError(f"the model has {count} outputs: give a tuple of as many targets, got {len(y)}")
    names = [f"target {i}" for i in range(count)]
    return tuple(
        _prepare_target_of_output(placement, one, samples, name, i, batched)
        for i, (one, name) in enumerate(zip(y, names, strict=True))
    )


def has_target_per_output(placement: Placement, y: Any) -> bool:
    """Return whether `y` contains one target per output: the model has several outputs, and `y` is a list of arrays, or
    a tuple whose elements are arrays or lists."""
    several = len(placement.model.outputs) > 1 and isinstance(y, tuple | list)
    return several and all(hasattr(one, "shape") or (type(y) is tuple and isinstance(one, list)) for one in y)


def _prepare_target_of_output(placement: Placement, y: Any, samples: int, name: str, index: int, batched: bool) -> Any:
    """Convert, partition and check the target of a single output, as `check_and_partition_target` does for all outputs.
    `index` is the index of the output among the model's outputs. Error messages call the target `name`."""
    layout = placement.sample_layout
    target = layout.take_local_target(to_device_array(placement, y, name), index)
    target = layout.to_model_output(target, name, index, batched)
    if target.ndim == 0 or target.shape[0] != samples:
        have = "a single number" if target.ndim == 0 else f"{target.shape[0]} samples"
        raise DataError(f"{name} has {have}, the inputs have {samples}")
    return target


def has_sample_dim(placement: Placement, x: Any) -> bool:
    """Return whether the inputs `x`, as the caller passed them, have a sample dimension."""
    return placement.sample_layout.has_sample_dim(list_inputs_in_order(placement, x))


TARGET = "the target"


def _format_array_name(name: str) -> str:
    """Return the text with which error messages refer to an array of the batch, such as "input 'x'"."""
    return name if name.startswith(("target ", TARGET)) else f"input {name!r}" if name else "an array of the batch"


def add_given_dtype_to_error(problem: FsdpxError, x: Any, y: Any) -> FsdpxError:
    """Return `problem`, an error about the dtype of `x` or `y`. If the array was converted before the check, add the
    dtype of the caller's array to the error text."""
    text, _, dtype = str(problem).rpartition("whole numbers, got ")
    given = getattr(y if "labels" in text else x, "dtype", None)
    known = not text or given is None or str(given) == dtype
    return problem if known else type(problem)(f"{problem} (given as {given})")


def to_device_array(placement: Placement, value: Any, name: str = "", takes: str = "numbers") -> Any:
    """Return `value` as an array on this rank's device, in native byte order. Floats are converted to the compute
    dtype, with one exception: if `takes` is "exact" and the compute dtype has 16 bits, floats are converted to float32.
    `name` is the name of the array in error messages: the name of an input, or TARGET."""
    compute = choose_float_dtype(takes, placement.formats.compute)
    if value.__class__ is np.ndarray and placement.xp is np:  # fast path: the array can be used as it is
        dtype = value.dtype
        if dtype is compute or (dtype.kind in "iub" and dtype.isnative):
            return value
    if value is None:
        raise DataError(f"got None where an array is needed: {_format_array_name(name)}")
    home = get_device_of_array(value)
    try:
        array = home.as_array(value)
    except (TypeError, ValueError) as error:
        reason = "" if isinstance(error, DataError) else " is no array"
        raise DataError(f"{_format_array_name(name)}{reason}: {error}") from error
    if array.dtype.kind not in "fiubV" or array.dtype.type is np.void:
        raise DataError(f"{_format_array_name(name)} of dtype {array.dtype} cannot be trained on: numbers are needed")
    if array.dtype.kind in "fV" and array.dtype != compute:
        array = array.astype(compute)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if home is CPU:
        return placement.device.from_host(array)
    if home is not placement.device:
        own = placement.device.name
        where = home.describe_location(array)
        raise DataError(f"{_format_array_name(name)} lies {where}, and device={own!r}: pass array.get()")
    return array


def require_batch_usable_on_device(placement: Placement, x: Any, y: Any) -> None:
    """If this rank's device has its own memory, raise DataError unless all arrays of the batch are on the host, or all
    are on that device."""
    if placement.device is CPU:
        return
    inputs = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple) else [x]
    placement.device.require_arrays_on_one_device([*inputs, *([] if y is None else [y])])


LOADER_ENDED = "no batch: its loader has come to its end"
DIGEST_SEPARATOR = " holding "


def agree_on_batch(
    axes: MeshAxes, call: str, features: str, rows: int, error: FsdpxError | None, comm: Communicator | None = None
) -> tuple[tuple[int, ...], bool]:
    """Check that all ranks make the same call with matching batches. Return the number of samples of each data rank,
    and whether the checksum of the samples is the same on all data ranks. If the batch of any rank is invalid or if the
    descriptions of the batches differ, raise the same error on all ranks. Collective: one all-gather of 32 bytes per
    rank; texts are sent only if there is an error.

    Parameters
    ----------
    axes : the mesh axes of this rank
    call : name of the call
    features : description of the batch (shapes, dtypes), followed by DIGEST_SEPARATOR and a checksum of its samples.
        The description must be the same on all ranks. The checksum must be the same only on ranks with the same data
        rank. LOADER_ENDED means that this rank has no batch
    rows : number of samples of this rank
    error : error found in this rank's batch, or None
    comm : communicator of the ranks that compare batches (default: all ranks). If replicas train independently, these
        are the ranks of one replica, and the other replicas are assumed to have the same numbers of samples
    """
    comm = comm or axes.world
    if not comm.has_peers and error is not None:
        raise add_rank_to_error(error, axes.world.rank)
    if not comm.has_peers:
        return (rows,) * axes.data.size, True
    kind, _, digest = features.partition(DIGEST_SEPARATOR)
    table = all_gather_four_integers(
        comm, (error is None, rows, hash_text(f"{call} {kind}"), hash_text(digest)), "the batch"
    )
    alone = comm.size < axes.world.size
    ranks = axes.mesh.ranks_along(axes.coordinates, AXES_OF_ONE_REPLICA) if alone else range(comm.size)
    lines = list(map(axes.mesh.data_rank_of, ranks))
    first = [lines.index(line) for line in sorted(set(lines))]
    same = (table == table[[lines.index(line) for line in lines]]).all()
    if table[:, 0].all() and (table[:, CALL] == table[0, CALL]).all() and same:
        known = tuple(table[first, 1].tolist())
        return known * (axes.data.size // len(known)), bool((table[first] == table[0]).all())
    own_record = CallRecord(call, kind) if error is None else CallRecord(call, kind, type(error), str(error))
    raise _make_disagreement_error([one.features for one in all_gather_and_check_call_records(comm, own_record)], lines)


def _make_disagreement_error(features: list[str], lines: list[int]) -> DataError:
    """Return the error to raise if batches differ between ranks. Its text is the same on every rank. `features`
    describes the batch of each rank, and `lines` holds the data rank of each rank."""
    if len(set(features)) == 1:
        return DataError(
            "ranks of one line of the pipe or tensor axis have different samples: give each rank the part of its data "
            f"rank, as a DataLoader(comm=trainer.data_group) does. The data ranks of ranks 0 to {len(lines) - 1} are "
            f"{lines}"
        )
    lines_of = "; ".join(f"rank {r} has {report}" for r, report in enumerate(features))
    return DataError(f"the parts of the global batch differ in more than the number of samples: {lines_of}")


def checksum_arrays(arrays: Iterable[Any]) -> int:
    """Return the CRC-32 of the bytes of all arrays."""
    total = 0
    for array in arrays:
        total = zlib.crc32(np.ascontiguousarray(to_host(array)).reshape(-1).view(np.uint8).data, total)
    return total


def split_into_microbatches(
    placement: Placement, batch: LocalBatch, microbatches: int, evenly: bool = False
) -> list[Microbatch | None]:
    """Split this rank's samples into microbatches, in the order in which their gradients are added. Every rank gets the
    same number of microbatches; None stands for a microbatch without samples. If `evenly` is True, the split is as even
    as possible. Otherwise, the rule for gradient accumulation determines the split. With reproducible chunks, for
    example, each chunk is one microbatch."""
    bounds = [batch.size * m // microbatches for m in range(microbatches + 1)]
    if not evenly:
        sums, rank = placement.accumulation, placement.axes.data.rank
        bounds = sums.find_microbatch_bounds(batch.rows, rank, microbatches)
        microbatches = sums.count_microbatches(microbatches)
    if bounds == [0, batch.size] and microbatches == 1:  # the whole batch is one microbatch, so nothing is sliced
        return [Microbatch(batch.inputs, batch.target, batch.row)]
    own_microbatches: list[Microbatch | None] = []
    for a, b in pairwise(bounds):
        target = batch.target  # an array, a tuple of arrays, or None (see `Microbatch`)
        if target is not None:
            target = tuple(one[a:b] for one in target) if isinstance(target, tuple) else target[a:b]
        own_microbatches.append(Microbatch(tuple(array[a:b] for array in batch.inputs), target, batch.row + a))
    return own_microbatches + [None] * (microbatches - len(own_microbatches))


def make_shape_only_microbatch(
    placement: Placement, inputs: Sequence[Any], rows: tuple[int, ...], microbatches: int
) -> Microbatch:
    """Return a microbatch of arrays that have shapes but no data. It has as many samples as the largest microbatch of
    any rank. `rows` holds the number of samples of each data rank."""
    most = placement.accumulation.count_samples_of_largest_microbatch(rows, microbatches)
    return Microbatch(tuple(ShapeArray((most, *a.shape[1:]), a.dtype) for a in inputs), None, 0)
