"""Whatever happens to the bytes of a checkpoint: an error that says so, or the values that were saved."""

import json

import pytest
from amount import examples, in_full
from fuzz import Fuzz
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.checkpoint.format import parse
from fsdpx.errors import CheckpointError


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Fuzz:
    return Fuzz(tmp_path_factory.mktemp("fuzz"))


@in_full
@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**32))
def test_mutated_files_are_refused_or_the_same(fuzz: Fuzz, seed: int) -> None:
    fuzz.refused(seed)


@in_full
def test_some_are_refused(fuzz: Fuzz) -> None:
    assert sum(fuzz.refused(seed) for seed in range(50)) > 40


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), st.one_of(JSON, st.fixed_dictionaries({
        "dtype": st.sampled_from(["F32", "U8"]) | JSON,
        "shape": st.lists(st.integers(-1, 3), max_size=2) | JSON,
        "data_offsets": st.lists(st.integers(-1, 12), min_size=2, max_size=2) | JSON,
    }))),
    st.binary(max_size=16),
)  # fmt: skip
def test_any_json_is_a_header_or_an_error(table: object, data: bytes) -> None:
    text = json.dumps(table).encode()
    file = len(text).to_bytes(8, "little") + text + data
    try:
        found = parse(lambda n: file[:n], len(file), "file")
    except CheckpointError:
        return
    assert sum(entry.nbytes for entry in found.tensors.values()) == len(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_file_or_an_error(data: bytes) -> None:
    try:
        parse(lambda n: data[:n], len(data), "file")
    except CheckpointError:
        return
    assert data[8:9] == b"{"
