"""State between ranks: whoever has whatever, all get what they want, bit by bit, and only that travels."""

import math
import pickle
import tracemalloc
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from assembled import assembled, bits, demand_equal, elements, missing
from hypothesis import given
from hypothesis import strategies as st
from models import make
from threads import on_ranks

import fsdpx
from fsdpx import Mesh
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.checkpoint.local_shards import LocalShard, iterate_local_state_shards
from fsdpx.core.comm.communicator import CountingCommunicator, TrafficCounters
from fsdpx.core.state.ledger import list_checkpoint_tensors
from fsdpx.ext.elastic.reshard import MAX_MESSAGES_IN_FLIGHT, describe_shard, find_element_runs_of_shard, reshard_arrays
from fsdpx.nn.layer import ParameterSpec
from fsdpx.nn.shard_specs import ShardSpec


@st.composite
def specs(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    if not draw(st.booleans()):
        return ParameterSpec(tuple(shape))
    dim, blocks, grain = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    shape[dim] *= blocks * grain
    return ParameterSpec(tuple(shape), cut=ShardSpec(dim, blocks, grain))


@st.composite
def tilings(draw, name, spec, values):
    """Parts that are all of a tensor together: cut over a tensor axis, then anywhere."""
    width, found = draw(st.integers(1, 3)), []
    for rank in range(width if spec.cut is not None else 1):
        full = values.reshape(spec.shape)
        local = full if spec.cut is None else spec.cut.take_shard(full, rank, width)
        flat = np.ascontiguousarray(local).reshape(-1)
        edges = [0, *sorted(draw(st.lists(st.integers(0, flat.size), max_size=3))), flat.size]
        found += [LocalShard(name, flat[a:b].copy(), a, spec, rank, width) for a, b in pairwise(edges)]
    return found


@st.composite
def cases(draw):
    """values: flat tensors. have, want: of each rank."""
    ranks = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    case = SimpleNamespace(values={}, have=[[] for _ in range(ranks)], want=[[] for _ in range(ranks)])
    for k in range(draw(st.integers(1, 3))):
        name, spec = f"tensor {k}", draw(specs())
        kind = parse_dtype(draw(st.sampled_from(("float32", "float64", "uint8", "bfloat16"))))
        values = case.values[name] = np.frombuffer(rng.bytes(spec.size * kind.itemsize), kind)
        several = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=3, unique=True)
        for _ in range(draw(st.integers(1, 2))):
            for part in draw(tilings(name, spec, values)):
                for rank in draw(several):
                    case.have[rank].append(part)
        for _ in range(draw(st.integers(0, 2))):
            for part in draw(tilings(name, spec, values)):
                for rank in draw(several):
                    empty = np.zeros(part.array.size, kind)
                    case.want[rank].append(LocalShard(name, empty, part.start, spec, part.rank, part.width))
    return case


def bytes_sent(comm, have, want, block):
    counters = TrafficCounters()
    reshard_arrays(CountingCommunicator(comm, "here", counters), have, want, block)
    return counters.sum_counts(verb="send").bytes


@given(case=cases(), block=st.sampled_from([8, 24, 64, 1 << 22]), delays=st.sampled_from([None, None, None, 1]))
def test_everybody_gets_what_it_wants(case, block, delays):
    sent = fsdpx.spawn(
        lambda comm: bytes_sent(comm, case.have[comm.rank], case.want[comm.rank], block),
        len(case.have), timeout=20, delays=delays,
    )  # fmt: skip
    assert sum(sent) == travels(case)
    for wanted in case.want:
        demand_equal(wanted, case.values)


def travels(case):
    """Bytes of what is wanted somewhere and not there."""
    total = 0
    for have, want in zip(case.have, case.want, strict=True):
        here = defaultdict(set)
        for part in have:
            here[part.name].update(elements(part).tolist())
        for part in want:
            total += part.array.itemsize * sum(e not in here[part.name] for e in elements(part).tolist())
    return total


@given(case=cases())
def test_runs_and_words_are_those_of_elements_one_by_one(case):
    left, known = case.have[1:], defaultdict(set)
    parts = [part for have in case.have for part in have]
    shapes = {part.name: part.spec for part in parts}
    for part in parts:
        found = find_element_runs_of_shard(describe_shard(part))
        mine = [e for a, b in zip(found.start.tolist(), found.stop.tolist(), strict=True) for e in range(a, b)]
        assert mine == elements(part).tolist()
        np.testing.assert_array_equal(found.at, np.cumsum([0, *(found.stop - found.start)])[: found.at.size])
    for part in (part for have in left for part in have):
        known[part.name].update(elements(part).tolist())
    said = [text.partition(":")[0] for text in missing(left, shapes)]
    assert said == [name for name, spec in shapes.items() if set(range(spec.size)) - known[name]]


def flat(name, first, last, size=48, kind="float32"):
    return LocalShard(name, np.arange(first, last, dtype=kind), first, ParameterSpec((size,)), 0, 1)


def test_what_is_missing_is_said_in_words():
    have = [[flat("a", 0, 12), flat("b", 0, 48)], [flat("a", 24, 40)], []]
    want = {name: ParameterSpec(shape) for name, shape in {"a": (48,), "b": (6, 8), "c": (3,), "none": (0,)}.items()}
    assert missing(have, want) == ["a: elements 12..24, 40..48 of 48", "c: elements 0..3 of 3"]
    a = {"a": want["a"]}
    assert missing(have[:1], a) == ["a: elements 12..48 of 48"]
    every_other = [flat("a", i, i + 1) for i in range(0, 48, 2)]
    assert missing([every_other], a) == ["a: elements 1..2, 3..4, 5..6, 7..8 and 20 more runs of 48"]


def test_a_cut_tensor_misses_its_rows():
    spec = ParameterSpec((3, 4), cut=ShardSpec(1))
    half = LocalShard("a", np.zeros(6), 0, spec, 0, 2)
    assert missing([[half]], {"a": spec}) == ["a: elements 2..4, 6..8, 10..12 of 12"]


def test_descriptors_are_small():
    spec = ParameterSpec((1024, 1024), cut=ShardSpec(1, 1, 64))
    names = [f"m/blocks.{k}.mlp.up.weight" for k in range(1000)]
    parts = [describe_shard(LocalShard(n, np.zeros(8), 8 * k, spec, k % 4, 4)) for k, n in enumerate(names)]
    assert len(pickle.dumps(parts)) < 80_000
    assert pickle.loads(pickle.dumps(parts)) == parts


@on_ranks(5, timeout=20)
def test_those_that_have_the_same_take_turns(comm):
    """Four ranks have all, a fifth wants all: each sends a quarter."""
    mine = [] if comm.rank == 4 else [flat("a", 0, 64, 64, "float64")]
    wanted = [LocalShard("a", np.zeros(64), 0, ParameterSpec((64,)), 0, 1)]
    assert bytes_sent(comm, mine, wanted, block=64) == (0 if comm.rank == 4 else 128)
    np.testing.assert_array_equal(wanted[0].array, np.arange(64.0))


@pytest.mark.parametrize("here", [[(2, 3), (5, 6), (8, 10)], [(2, 3), (5, 7), (9, 10)], [(1, 3), (4, 40), (41, 42)]])
@on_ranks(2, timeout=20)
def test_pieces_at_irregular_distances(comm, here):
    """Rank 1 has a few elements; what it gets for the others is of one size, or nearly."""
    have = [flat("a", 0, 48)] if comm.rank == 0 else [flat("a", a, b) for a, b in here]
    want = [] if comm.rank == 0 else [LocalShard("a", np.zeros(48, "float32"), 0, ParameterSpec((48,)), 0, 1)]
    reshard_arrays(comm, have, want)
    for part in want:
        np.testing.assert_array_equal(part.array, np.arange(48))


@pytest.mark.parametrize(
    ("have", "want", "text"),
    [
        (flat("a", 0, 12), flat("a", 8, 16), r"no rank holds.*name='a', start=8"),
        (flat("a", 0, 48), flat("a", 0, 48, kind="float64"), "a is float32 and float64"),
    ],
    ids=["missing", "formats"],
)
@on_ranks(3, timeout=20)
def test_what_cannot_move_is_said_by_all(comm, have, want, text):
    with pytest.raises(AssertionError, match=text):
        reshard_arrays(comm, [have] if comm.rank == 0 else [], [want] if comm.rank == 2 else [])


def test_little_memory_is_needed_beside_the_arrays():
    """4 MiB in rows go to four ranks that want columns, through messages of 16 KiB."""
    spec = ParameterSpec((1024, 1024), cut=ShardSpec(1))
    values = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)

    def body(comm):
        rows = values[comm.rank * 256 : (comm.rank + 1) * 256].reshape(-1)
        have = [LocalShard("a", rows, comm.rank * 256 * 1024, spec, 0, 1)]
        want = [LocalShard("a", columns[comm.rank], 0, spec, comm.rank, 4)]
        reshard_arrays(comm, have, want, block)

    block, columns = 16 << 10, [np.empty(1024 * 256, np.float32) for _ in range(4)]
    tracemalloc.start()
    fsdpx.spawn(body, 4, timeout=60)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for rank in range(4):
        np.testing.assert_array_equal(columns[rank].reshape(1024, 256), values[:, rank * 256 : (rank + 1) * 256])
    assert peak < 4 * MAX_MESSAGES_IN_FLIGHT * block + 4 * 64 * 4096  # indices of the edges of one part


def test_the_whole_of_a_trainer_is_what_its_ranks_hold():
    trainer = fsdpx.spawn(lambda comm: make(comm, "norms", "fsdp", mesh=Mesh(shard=1), frozen=["0.bias"]), 1)[0]
    found = assembled(iterate_local_state_shards(trainer.inspect.engine.state))
    wanted = list_checkpoint_tensors(trainer.inspect.placement)
    assert {name: values.size for name, values in found.items()} == {name: s.size for name, s in wanted.items()}
    assert "1.running_mean" in wanted
    assert "m/0.weight" in wanted
    assert "m/0.bias" not in wanted
    assert math.prod(wanted["m/0.weight"].shape) == bits(found["m/0.weight"]).size // 8
