"""`CommunicatorContract`, a base class with tests that every communicator must pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by name from here on
import numpy as np
import pytest

from fsdpx.core.comm.communicator import Communicator, ReduceOp, split_evenly
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.testing.threads import switching_at_every_bytecode

__all__ = ["CommunicatorContract"]

FLOATS = ("float64", "float32", "float16", "bfloat16")
SUM = ReduceOp.SUM
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
ALL_DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, "bool")
LENGTHS = (0, 1, 7, 60)


def _decorate_test_to_run_on_every_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Decorator for test methods. It runs the test on every rank with the contract's `run` method, and passes the
    rank's communicator to the test."""

    @wraps(test)
    def everywhere(contract: CommunicatorContract, **given: Any) -> None:
        contract.run(lambda comm: test(contract, comm, **given))

    signature = inspect.signature(test)  # pytest reads the names of fixtures from the signature
    given = [parameter for name, parameter in signature.parameters.items() if name != "comm"]
    vars(everywhere)["__signature__"] = signature.replace(parameters=given)
    return everywhere


class CommunicatorContract:
    """Tests for a communicator. Inherit from this class and define `run`, which every test calls once."""

    def run(self, body: Callable[[Communicator], Any]) -> Any:
        """Call `body(comm)` on every rank. If calls fail, raise the error of one of them. Must be overridden.

        Parameters
        ----------
        body : function to call; its argument is the communicator to test
        """
        raise TypeError(f"{type(self).__name__} must define run(body)")

    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    @_decorate_test_to_run_on_every_rank
    def test_all_gather(self, comm: Communicator, dtype: str) -> None:
        for n in LENGTHS:
            whole = _make_random_array(dtype, n, seed=n)
            recv = np.zeros_like(whole)
            comm.all_gather(_get_rank_part(whole, comm).copy(), recv, what="x").wait()
            _assert_same_bytes(recv, whole)

    @_decorate_test_to_run_on_every_rank
    def test_all_gather_in_place_and_uneven(self, comm: Communicator) -> None:
        counts = [(3 * rank) % 5 for rank in range(comm.size)]
        whole = _make_random_array("float32", sum(counts), seed=1)
        recv = np.zeros_like(whole)
        own = _get_rank_part(recv, comm, counts)
        own[:] = _get_rank_part(whole, comm, counts)
        comm.all_gather(own, recv, counts).wait()
        _assert_same_bytes(recv, whole)

    @_decorate_test_to_run_on_every_rank
    def test_threads_may_change_at_every_bytecode(self, comm: Communicator) -> None:
        ours = [_make_random_array("float64", 7, seed=rank) for rank in range(comm.size)]
        with switching_at_every_bytecode():
            for _ in range(2):
                mine, gathered = ours[comm.rank].copy(), np.empty(7 * comm.size)
                comm.all_reduce(mine, SUM).wait()
                comm.all_gather(ours[comm.rank].copy(), gathered).wait()
                _assert_close(mine, _compute_reduction(ours, SUM))
                _assert_same_bytes(gathered, np.concatenate(ours))

    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    @_decorate_test_to_run_on_every_rank
    def test_reduce_scatter(self, comm: Communicator, dtype: str) -> None:
        for n in LENGTHS:
            for op in _list_operations(dtype):
                ours = [_make_random_array(dtype, n, seed=10 * n + rank) for rank in range(comm.size)]
                want = _get_rank_part(_compute_reduction(ours, op), comm)
                recv = np.zeros_like(want)
                comm.reduce_scatter(ours[comm.rank], recv, op).wait()
                _assert_close(recv, want)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
    @_decorate_test_to_run_on_every_rank
    def test_reduce_scatter_in_place_and_uneven(self, comm: Communicator, dtype: str, op: ReduceOp) -> None:
        counts = [(3 * rank + 1) % 5 for rank in range(comm.size)]
        ours = [_make_random_array(dtype, sum(counts), seed=rank) for rank in range(comm.size)]
        want = _get_rank_part(_compute_reduction(ours, op), comm, counts)
        buf = ours[comm.rank].copy()
        comm.reduce_scatter(buf, buf[: want.size], op, counts).wait()
        _assert_close(buf[: want.size], want)

    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    @pytest.mark.parametrize("algorithm", ["library", "ring"])
    @_decorate_test_to_run_on_every_rank
    def test_all_reduce(self, comm: Communicator, dtype: str, algorithm: str) -> None:
        if algorithm == "ring" and dtype in ("float16", "bfloat16"):
            with pytest.raises(ConfigError, match=r"does not add .* in rank order: use algorithm='library'"):
                comm.all_reduce(_make_random_array(dtype, 3, seed=0), ReduceOp.SUM, "ring")
            return
        found = []
        for n in LENGTHS:
            for op in _list_operations(dtype):
                ours = [_make_random_array(dtype, n, seed=10 * n + rank) for rank in range(comm.size)]
                buf = ours[comm.rank].copy()
                comm.all_reduce(buf, op, algorithm).wait()
                _assert_close(buf, _compute_reduction(ours, op))
                found.append(buf.tobytes())
        assert all(theirs == found for theirs in comm.all_gather_object(found))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @_decorate_test_to_run_on_every_rank
    def test_16_bit_floats_are_added_in_float32_in_rank_order(self, comm: Communicator, dtype: str) -> None:
        ours = [_make_random_array(dtype, 33, seed=rank) / 512 for rank in range(comm.size)]
        # in rank order, the large values cancel before the small ones are added; in any other order, the small values
        # would be lost
        if comm.size > 2:
            ours[0] = _make_random_array(dtype, 33, seed=9) * 4096
            ours[1] = -ours[0]
        ours = [array.astype(dtype) for array in ours]
        total = ours[0].astype(np.float32)
        for other in ours[1:]:
            total = total + other.astype(np.float32)
        want = total.astype(ours[0].dtype)
        buf, recv = ours[comm.rank].copy(), np.zeros_like(want)
        comm.all_reduce(buf).wait()
        root = comm.size - 1
        comm.reduce(ours[comm.rank], recv if comm.rank == root else None, ReduceOp.SUM, root).wait()
        _assert_same_bytes(buf, want)
        if comm.rank == root:
            _assert_same_bytes(recv, want)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("wire", ["bfloat16", "float16"])
    @_decorate_test_to_run_on_every_rank
    def test_summands_are_rounded_to_wire_dtype(self, comm: Communicator, dtype: str, wire: str) -> None:
        for counts in (None, [2] * comm.size, [(3 * rank + 1) % 5 for rank in range(comm.size)]):
            n = 61 if counts is None else sum(counts)
            ours = [_make_random_array(dtype, n, seed=n + rank) for rank in range(comm.size)]
            ours[0][:3] = np.array([np.inf, 1e5, -1e-6])[:n]  # these values overflow or underflow in float16
            with np.errstate(over="ignore"):
                want = ours[0].astype(wire).astype(dtype) if comm.size > 1 else ours[0]
                for other in ours[1:]:
                    want = want + other.astype(wire).astype(dtype)
                rounded = want.astype(wire).astype(dtype) if comm.size > 1 else want
            own = _get_rank_part(want, comm, counts)
            for start in (None, 0, sum((counts or split_evenly(n, comm.size))[: comm.rank])):
                buf = ours[comm.rank].copy()
                recv = np.zeros_like(own) if start is None else buf[start : start + own.size]
                comm.reduce_scatter(buf, recv, counts=counts, wire=np.dtype(wire), what="x").wait()
                _assert_same_bytes(recv, own)
            buf = ours[comm.rank].copy()
            comm.all_reduce(buf, wire=np.dtype(wire)).wait()
            _assert_same_bytes(buf, rounded)

    @_decorate_test_to_run_on_every_rank
    def test_broadcast_from_every_root(self, comm: Communicator) -> None:
        for root in range(comm.size):
            for dtype in ALL_DTYPES:
                want = _make_random_array(dtype, 7, seed=root)
                buf = want.copy() if comm.rank == root else np.zeros_like(want)
                comm.broadcast(buf, root).wait()
                _assert_same_bytes(buf, want)

    @pytest.mark.parametrize("dtype", ["float64", "float16", "complex64", "int16", "int64", "bool"])
    @_decorate_test_to_run_on_every_rank
    def test_reduce_to_every_root(self, comm: Communicator, dtype: str) -> None:
        for root in range(comm.size):
            for op in _list_operations(dtype):
                ours = [_make_random_array(dtype, 7, seed=rank) for rank in range(comm.size)]
                send = ours[comm.rank].copy()
                recv = np.zeros_like(send) if root % 2 else send  # even-numbered roots reduce in place
                comm.reduce(send, recv if comm.rank == root else None, op, root).wait()
                if comm.rank == root:
                    _assert_close(recv, _compute_reduction(ours, op))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128", "uint16"])
    @_decorate_test_to_run_on_every_rank
    def test_gather_and_scatter(self, comm: Communicator, dtype: str) -> None:
        for root in range(comm.size):
            for counts in (None, [rank % 3 for rank in range(comm.size)]):
                whole = _make_random_array(dtype, 11 if counts is None else sum(counts), seed=root)
                own = _get_rank_part(whole, comm, counts)
                at_root = comm.rank == root
                recv = np.zeros_like(whole) if at_root else None
                comm.gather(own.copy(), recv, root, counts).wait()
                if recv is not None:
                    _assert_same_bytes(recv, whole)
                back = np.zeros_like(own)
                comm.scatter(whole if at_root else None, back, root, counts).wait()
                _assert_same_bytes(back, own)

    @pytest.mark.parametrize("dtype", ["float64", "float16", "complex64", "int8", "int32"])
    @_decorate_test_to_run_on_every_rank
    def test_all_to_all(self, comm: Communicator, dtype: str) -> None:
        size, rank = comm.size, comm.rank
        counts = [[(2 * source + dest) % 4 for dest in range(size)] for source in range(size)]
        rows = [_make_random_array(dtype, sum(counts[source]), seed=source) for source in range(size)]
        received = [counts[source][rank] for source in range(size)]
        recv = np.zeros(sum(received), rows[0].dtype)
        comm.all_to_all(rows[rank], recv, counts[rank], received).wait()
        want = [_get_rank_part(rows[source], comm, counts[source]) for source in range(size)]
        _assert_same_bytes(recv, np.concatenate(want))

    @_decorate_test_to_run_on_every_rank
    def test_all_to_all_of_equal_pieces_is_a_transpose(self, comm: Communicator) -> None:
        send = np.arange(2 * comm.size, dtype=np.float32) + 100 * comm.rank
        recv = np.zeros_like(send)
        comm.all_to_all(send, recv).wait()
        want = [100 * source + 2 * comm.rank + i for source in range(comm.size) for i in range(2)]
        _assert_same_bytes(recv, np.array(want, np.float32))

    @_decorate_test_to_run_on_every_rank
    def test_messages_arrive_in_order_and_by_tag(self, comm: Communicator) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        bufs = [np.full(3, 10 * comm.rank + i, np.float16) for i in range(4)]
        recvs = [np.zeros(3, np.float16) for _ in range(4)]
        tags = [0, 5, 0, 5]
        handles = [comm.recv(recvs[i], left, tags[i], what=f"in {i}") for i in (1, 0, 3, 2)]
        handles += [comm.send(bufs[i], right, tags[i], what=f"out {i}") for i in range(4)]
        for handle in reversed(handles):
            handle.wait()
        for i in range(4):
            _assert_same_bytes(recvs[i], np.full(3, 10 * left + i, np.float16))

    @_decorate_test_to_run_on_every_rank
    def test_handles_may_be_waited_for_in_any_order(self, comm: Communicator) -> None:
        bufs = [_make_random_array(dtype, 9, seed=1) for dtype in ("float64", "bfloat16", "float16")]
        rings = [np.arange(9.0) + comm.rank for _ in range(3)]
        handles = [comm.all_reduce(buf) for buf in bufs]
        handles += [comm.all_reduce(ring, ReduceOp.SUM, "ring") for ring in rings]
        for i in np.random.default_rng(comm.rank).permutation(6):
            handles[i].wait()
            assert handles[i].test()
        comm.barrier().wait()
        for buf, dtype in zip(bufs, ("float64", "bfloat16", "float16"), strict=True):
            _assert_close(buf, _compute_reduction([_make_random_array(dtype, 9, seed=1)] * comm.size, ReduceOp.SUM))
        for ring in rings:
            _assert_same_bytes(ring, comm.size * np.arange(9.0) + comm.size * (comm.size - 1) / 2)

    @_decorate_test_to_run_on_every_rank
    def test_waiting_for_one_transfer_progresses_others(self, comm: Communicator) -> None:
        # rank 0 waits for its reductions before it sends a message; all other ranks wait for this message before they
        # wait for their reductions
        half, ring, note = np.ones(5, np.float16), np.ones(5), np.zeros(1)
        handles = [comm.all_reduce(half), comm.all_reduce(ring, ReduceOp.SUM, "ring")]
        if comm.rank == 0:
            for handle in handles:
                handle.wait()
            for send in [comm.send(note, other) for other in range(1, comm.size)]:
                send.wait()
        else:
            comm.recv(note, 0).wait()
        for handle in handles:
            handle.wait()
        _assert_same_bytes(half, np.full(5, comm.size, np.float16))
        _assert_same_bytes(ring, np.full(5, float(comm.size)))

    @_decorate_test_to_run_on_every_rank
    def test_test_becomes_true_without_wait(self, comm: Communicator) -> None:
        handles = [comm.all_reduce(np.ones(4, dtype)) for dtype in (np.float32, np.float16)]
        handles.append(comm.barrier())
        while not all(handle.test() for handle in handles):
            pass
        comm.barrier().wait()

    @_decorate_test_to_run_on_every_rank
    def test_split_orders_by_key_and_leaves_out_none(self, comm: Communicator) -> None:
        reverse = comm.split(comm.rank % 2, -comm.rank)
        assert reverse is not None
        members = reverse.all_gather_object(comm.rank)
        assert members == sorted(range(comm.rank % 2, comm.size, 2), reverse=True)
        assert members[reverse.rank] == comm.rank
        first = comm.split(0 if comm.rank == 0 else None)
        assert (first is None) == (comm.rank != 0)
        total = np.array([comm.rank])
        reverse.all_reduce(total).wait()
        assert total[0] == sum(members)
        for group in (reverse, first):
            if group is not None:
                group.close()

    @_decorate_test_to_run_on_every_rank
    def test_subgroup_keeps_the_order_given(self, comm: Communicator) -> None:
        middle = comm.size // 2
        ranks = range(middle) if comm.rank < middle else range(middle, comm.size)
        group = comm.subgroup(list(reversed(ranks)))
        assert group.all_gather_object(comm.rank) == list(reversed(ranks))
        with pytest.raises(ConfigError, match="must name this rank"):
            comm.subgroup([(comm.rank + 1) % comm.size] if comm.size > 1 else [0, 0])
        group.close()

    @_decorate_test_to_run_on_every_rank
    def test_all_gather_object(self, comm: Communicator) -> None:
        objects = comm.all_gather_object({"rank": comm.rank, "text": "x" * 50 * comm.rank})
        assert [obj["rank"] for obj in objects] == list(range(comm.size))
        assert [len(obj["text"]) for obj in objects] == [50 * rank for rank in range(comm.size)]

    @_decorate_test_to_run_on_every_rank
    def test_bad_arguments_are_named_before_anything_is_sent(self, comm: Communicator) -> None:
        c, size, alone = comm, comm.size, comm.subgroup([comm.rank])
        x, y = np.zeros(2 * size), np.zeros(3)
        cases = [
            (ShapeError, "of w on .* send has 3 elements, but 2", lambda: c.all_gather(y, x, what="w")),
            (ShapeError, "recv must be a flat array", lambda: c.all_gather(x[:2], x.reshape(2, size))),
            (ShapeError, "not contiguous", lambda: c.all_reduce(np.zeros(8)[::2])),
            (ShapeError, "counts add up to", lambda: c.all_gather(x[:2], x, [1] * size)),
            (ShapeError, "counts for", lambda: c.all_gather(x[:2], x, [1] * (size + 1))),
            (ShapeError, "recv has 1 elements, but 2", lambda: c.reduce_scatter(x, x[:1])),
            (ConfigError, "float64, recv is float32", lambda: c.all_gather(x[:2], x.astype("f4"))),
            (ConfigError, f"root={size} is not a rank", lambda: c.broadcast(x, size)),
            (ConfigError, "dest=-1 is not a rank", lambda: c.send(x, -1)),
            (ConfigError, "tag=16384 is out of range", lambda: c.recv(x, 0, 16384)),
            (ConfigError, "MAX of complex128", lambda: c.all_reduce(np.zeros(3, complex), ReduceOp.MAX)),
            (ConfigError, "MIN of complex64", lambda: c.all_reduce(np.zeros(3, "F"), ReduceOp.MIN)),
            (ConfigError, "datetime64.* cannot be communicated", lambda: c.all_reduce(np.zeros(3, "M8[s]"))),
            (ConfigError, "byte order of other machines", lambda: c.all_reduce(np.zeros(3, ">f8"))),
            (ConfigError, "AVG of int64", lambda: c.all_reduce(np.zeros(3, np.int64), ReduceOp.AVG)),
            (ConfigError, "AVG of bool", lambda: c.all_reduce(np.zeros(3, bool), ReduceOp.AVG)),
            (ConfigError, "wire=float32 for float64", lambda: c.all_reduce(x, wire="float32")),
            (ConfigError, "wire=float16 for int64", lambda: c.all_reduce(np.zeros(3, np.int64), wire="float16")),
            (ConfigError, "wire=bfloat16 with AVG", lambda: c.all_reduce(x, ReduceOp.AVG, wire="bfloat16")),
            (ConfigError, "wire=float16 with SUM by 'ring'", lambda: c.all_reduce(x, SUM, "ring", wire="float16")),
            (ConfigError, "unknown algorithm 'tree'", lambda: c.all_reduce(x, ReduceOp.SUM, "tree")),
            (ConfigError, "is an array of .* reductions work in place", lambda: c.all_reduce(x, x)),  # type: ignore[arg-type]
            (ConfigError, r"unknown algorithm \['ring'\]", lambda: c.all_reduce(x, SUM, ["ring"])),  # type: ignore[arg-type]
            (ConfigError, r"wire=\[1\] is not a dtype", lambda: c.all_reduce(x, wire=[1])),
            (ConfigError, "unknown reduce operation 'median'", lambda: c.all_reduce(x, "median")),  # type: ignore[arg-type]
            (ShapeError, "is root and needs an array for recv", lambda: alone.gather(x, None, 0)),
        ]  # fmt: skip
        for kind, words, call in cases:
            with pytest.raises(kind, match=words):
                call()
        comm.barrier().wait()
        alone.close()


def _make_random_array(dtype: str, n: int, seed: int) -> np.ndarray:
    return _draw_random_array(dtype, n, seed).copy()


@lru_cache(2**14)
def _draw_random_array(dtype: str, n: int, seed: int) -> np.ndarray:
    """Draw an array. Drawing costs more than most collectives of the contract, and each rank needs the arrays of all
    ranks."""
    generator = np.random.default_rng(seed)
    if dtype in FLOATS:
        return generator.standard_normal(n).astype(dtype)
    if dtype in COMPLEX:
        return (generator.standard_normal(n) + 1j * generator.standard_normal(n)).astype(dtype)
    if dtype == "bool":
        return generator.integers(0, 2, n).astype(bool)
    return generator.integers(1, 3, n).astype(dtype)


def _list_operations(dtype: str) -> list[ReduceOp]:
    if dtype in COMPLEX:
        return [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD]
    return [op for op in ReduceOp if op is not ReduceOp.AVG or dtype in FLOATS]


def _get_rank_part(whole: np.ndarray, comm: Communicator, counts: list[int] | None = None) -> np.ndarray:
    counts = split_evenly(whole.size, comm.size) if counts is None else counts
    start = sum(counts[: comm.rank])
    return whole[start : start + counts[comm.rank]]


def _compute_reduction(arrays: list[np.ndarray], op: ReduceOp) -> np.ndarray:
    """Compute the expected result of a reduction without communication, in float64, complex128 or exact integers, and
    round it only once, at the end."""
    function: Any = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min, "prod": np.prod}[op.value]
    dtype = arrays[0].dtype
    if dtype.kind == "b":
        return np.any(arrays, 0) if op in (ReduceOp.SUM, ReduceOp.MAX) else np.all(arrays, 0)
    wide = dtype if dtype.kind in "iu" else np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
    return function(np.stack([array.astype(wide) for array in arrays]), 0).astype(dtype)


def _assert_same_bytes(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes(), f"{got} is not {want}"


def _assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    exact = {"float64": 1e-14, "complex128": 1e-14, "float32": 1e-6, "complex64": 1e-6, "float16": 2e-3}
    tolerance = {**exact, "bfloat16": 2e-2}.get(got.dtype.name, 0.0)
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    if got.shape != want.shape or got.tobytes() != want.tobytes():
        np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance)
