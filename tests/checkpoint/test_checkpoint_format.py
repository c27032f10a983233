"""Headers are those of the reference library, digests those of zlib, roundings those of exact arithmetic."""

import json
import zlib
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from fsdpx.checkpoint.format import Sum, array_type, code_of, lay, parse, rounded, whole
from fsdpx.errors import CheckpointError

DTYPES = [
    *(np.dtype(name) for name in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?")),
    np.dtype(ml_dtypes.bfloat16),
]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6), st.booleans())
def test_a_header_is_that_of_the_library(tensors: dict[str, Any], named: bool) -> None:
    arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in tensors.items() if name != "__metadata__"}
    metadata = {"format": "pt"} if named else None
    data = safetensors.numpy.save(arrays, metadata)
    made = lay({name: (code_of(a.dtype), a.shape) for name, a in arrays.items()}, metadata)
    assert made.header == data[: len(made.header)]
    assert made.size == len(data)
    assert parse(lambda n: data[:n], len(data), "file").tensors == made.tensors
    assert all(array_type(entry.code) == arrays[name].dtype for name, entry in made.tensors.items())


def file_of(table: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int, stop: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


TWICE = b'{"a":' + json.dumps(entry(0, 4)).encode() + b',"a":' + json.dumps(entry(0, 4)).encode() + b"}"
BAD = {
    "7 bytes are no safetensors file": b"1234567",
    "the header would have 100000001 bytes": file_of({}, length=100_000_001),
    "the header has 50 bytes, the file 10": file_of({}, length=50),
    "does not begin with '{'": file_of(b" {}     "),
    "'a' is there twice": file_of(TWICE, bytes(4)),
    "no JSON of unique names": file_of(b"{,,,,,,}"),
    "no JSON of unique names: 'utf-8'": file_of(b'{"\xff":1}'),
    "__metadata__ must map texts to texts": file_of({"__metadata__": {"a": 1}}),
    "unknown dtype 'F31'": file_of({"a": entry(0, 4, dtype="F31")}, bytes(4)),
    "unknown dtype \\[\\]": file_of({"a": entry(0, 4, dtype=[])}, bytes(4)),
    "does not have 4 bytes": file_of({"a": entry(0, 4, shape=[2])}, bytes(4)),
    "does not have -4 bytes": file_of({"a": entry(4, 0, shape=[1])}, bytes(4)),
    "must be lists of whole numbers": file_of({"a": entry(0, 4, shape=[True])}, bytes(4)),
    "shape \\[-1, -1\\].* must be lists": file_of({"a": entry(0, 4, shape=[-1, -1])}, bytes(4)),
    "shape 4 and": file_of({"a": entry(0, 4, shape=4)}, bytes(4)),
    "needs dtype, shape and data_offsets": file_of({"a": {"dtype": "F32"}}, bytes(4)),
    "an overlap before tensor 'b'": file_of({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "a hole before tensor 'b'": file_of({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)),
    "a hole before tensor 'a'": file_of({"a": entry(4, 8)}, bytes(8)),
    "truncated: 73 bytes, its tensors need 77": file_of({"a": entry(0, 8)}, bytes(4)),
    "3 bytes after the last tensor": file_of({"a": entry(0, 4)}, bytes(7)),
    "is no text": file_of({"\ud800": entry(0, 4)}, bytes(4)),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_with_a_header_is_said(message: str) -> None:
    data = BAD[message]
    with pytest.raises(CheckpointError, match=f"^file: .*{message}"):
        parse(lambda n: data[:n], len(data), "file")


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a":1' + b"0" * 100_000 + b"}"])
def test_deep_and_long_headers_end_in_an_error(text: bytes) -> None:
    data = file_of(b'{"x":' + text)
    with pytest.raises(CheckpointError, match="no JSON of unique names"):
        parse(lambda n: data[:n], len(data), "file")


@given(st.binary(max_size=300), st.lists(st.integers(0, 9000), max_size=8), st.integers(1, 4), st.randoms())
def test_sums_of_parts_are_the_crc_of_the_whole(data: bytes, cuts: list[int], ranks: int, random: Any) -> None:
    data *= random.choice([1, 30])
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    sums = [Sum() for _ in range(ranks)]
    for start, stop in zip(edges, edges[1:], strict=False):
        random.choice(sums).add(start, data[start:stop])
    total = 0
    for one in sums:
        total ^= one.of(len(data))
    assert whole(total, len(data)) == zlib.crc32(data)


@given(st.floats(allow_nan=False, width=64), st.integers(0, 255), st.integers(-60, -8))
def test_bf16_is_the_nearest_of_a_float64(x: float, top: int, exponent: int) -> None:
    """Also just beside a tie, where rounding to float32 in between would go wrong."""
    for value in (x, (1 + top / 128 + 1 / 256) * (1 + 2.0**exponent), (1 + top / 128 + 1 / 256) * (1 - 2.0**exponent)):
        got = rounded(np.array([value]), np.dtype(ml_dtypes.bfloat16))
        bits = int(got.view(np.uint16)[0])
        if not np.isfinite(float(got[0])):
            assert abs(value) >= (2 - 2**-8) * 2.0**127
            continue
        error = abs(Fraction(value) - Fraction(float(got[0])))
        for other in (bits - 1, bits + 1):
            beside = float(np.array([other & 0xFFFF], np.uint16).view(ml_dtypes.bfloat16)[0])
            if np.isfinite(beside):
                away = abs(Fraction(value) - Fraction(beside))
                assert error < away or (error == away and bits % 2 == 0)


def test_what_has_no_number_stays_so() -> None:
    given = np.array([np.nan, np.inf, -np.inf, 1e300, -0.0])
    got = rounded(given, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    np.testing.assert_array_equal(got, [np.nan, np.inf, -np.inf, np.inf, 0.0])
    assert np.signbit(got[4])


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(CheckpointError, match="arrays of complex128 cannot be saved: choose one of float64"):
        code_of(np.dtype("c16"))
    with pytest.raises(CheckpointError, match="format F8_E4M3 cannot be loaded"):
        array_type("F8_E4M3")
