"""Headers, digests, roundings; bytes and values of other types that are wrong are one error, the same on all ranks."""

import copy
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from amount import examples, few
from fuzz import FILES, Fuzz, held
from hypothesis import given, settings
from hypothesis import strategies as st
from savers import contents, refused

from fsdpx import Trainer, data, nn, optim, spawn
from fsdpx.__main__ import main
from fsdpx.core.checkpoint import format as layout
from fsdpx.core.checkpoint.write import Manifest
from fsdpx.core.comm import Communicator
from fsdpx.errors import CheckpointError

NUMBERS = "f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", ml_dtypes.bfloat16
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


def parsed(file: bytes) -> Any:
    return layout.parse_header(lambda n: file[:n], len(file), "file")


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from([*map(np.dtype, NUMBERS)]), SHAPES), max_size=6), st.booleans())
def test_a_header_is_that_of_the_library(tensors: dict[str, Any], named: bool) -> None:
    arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in tensors.items() if name != "__metadata__"}
    metadata = {"format": "pt"} if named else None
    data = safetensors.numpy.save(arrays, metadata)
    entries = {name: (layout.dtype_to_code(a.dtype), a.shape) for name, a in arrays.items()}
    made = layout.make_file_header(entries, metadata)
    assert made.header == data[: len(made.header)]
    assert made.size == len(data)
    assert parsed(data).tensors == made.tensors
    assert all(layout.code_to_dtype(entry.code) == arrays[name].dtype for name, entry in made.tensors.items())


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
    "'a' occurs twice": file_of(TWICE, bytes(4)),
    "no JSON of unique names": file_of(b"{,,,,,,}"),
    "no JSON of unique names: 'utf-8'": file_of(b'{"\xff":1}'),
    "__metadata__ must map texts to texts": file_of({"__metadata__": {"a": 1}}),
    "unknown dtype 'F31'": file_of({"a": entry(0, 4, dtype="F31")}, bytes(4)),
    "unknown dtype \\[\\]": file_of({"a": entry(0, 4, dtype=[])}, bytes(4)),
    "does not have 4 bytes": file_of({"a": entry(0, 4, shape=[2])}, bytes(4)),
    "does not have -4 bytes": file_of({"a": entry(4, 0, shape=[1])}, bytes(4)),
    "must be lists of integers": file_of({"a": entry(0, 4, shape=[True])}, bytes(4)),
    "shape \\[-1, -1\\].* must be lists": file_of({"a": entry(0, 4, shape=[-1, -1])}, bytes(4)),
    "shape 4 and": file_of({"a": entry(0, 4, shape=4)}, bytes(4)),
    "needs dtype, shape and data_offsets": file_of({"a": {"dtype": "F32"}}, bytes(4)),
    "an overlap before tensor 'b'": file_of({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "a hole before tensor 'b'": file_of({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)),
    "a hole before tensor 'a'": file_of({"a": entry(4, 8)}, bytes(8)),
    "truncated: 73 bytes, its tensors need 77": file_of({"a": entry(0, 8)}, bytes(4)),
    "3 bytes after the last tensor": file_of({"a": entry(0, 4)}, bytes(7)),
    "is not valid text": file_of({"\ud800": entry(0, 4)}, bytes(4)),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_with_a_header_is_said(message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^file: .*{message}"):
        parsed(BAD[message])


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a":1' + b"0" * 100_000 + b"}"])
def test_deep_and_long_headers_end_in_an_error(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="no JSON of unique names"):
        parsed(file_of(b'{"x":' + text))


@given(st.binary(max_size=300), st.lists(st.integers(0, 9000), max_size=8), st.integers(1, 4), st.randoms())
def test_sums_of_parts_are_the_crc_of_the_whole(data: bytes, cuts: list[int], ranks: int, random: Any) -> None:
    data *= random.choice([1, 30])
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    sums = [layout.PartialCrc() for _ in range(ranks)]
    for start, stop in zip(edges, edges[1:], strict=False):
        random.choice(sums).add_bytes(start, data[start:stop])
    total = 0
    for one in sums:
        total ^= one.get_crc_share(len(data))
    assert layout.compute_crc_from_xor(total, len(data)) == zlib.crc32(data)


@given(st.floats(allow_nan=False, width=64), st.integers(0, 255), st.integers(-60, -8))
def test_bf16_is_the_nearest_of_a_float64(x: float, top: int, exponent: int) -> None:
    """Also just beside a tie, where rounding to float32 in between would go wrong."""
    tie = 1 + top / 128 + 1 / 256
    for value in (x, tie * (1 + 2.0**exponent), tie * (1 - 2.0**exponent)):
        got = layout.cast_array(np.array([value]), np.dtype(ml_dtypes.bfloat16))
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
    got = layout.cast_array(given, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    np.testing.assert_array_equal(got, [np.nan, np.inf, -np.inf, np.inf, 0.0])
    assert np.signbit(got[4])


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(CheckpointError, match="arrays of complex128 cannot be saved: choose one of float64"):
        layout.dtype_to_code(np.dtype("c16"))
    with pytest.raises(CheckpointError, match="format F8_E4M3 cannot be loaded"):
        layout.code_to_dtype("F8_E4M3")


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Fuzz:
    return Fuzz(tmp_path_factory.mktemp("fuzz"))


@settings(max_examples=examples(240))
@given(seed=st.integers(0, 2**32))
def test_mutated_files_are_refused_or_the_same(fuzz: Fuzz, seed: int) -> None:
    fuzz.refused(seed)


def test_some_are_refused(fuzz: Fuzz) -> None:
    assert sum(fuzz.refused(seed) for seed in range(10)) > 7


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
    with suppress(CheckpointError):
        assert sum(entry.nbytes for entry in parsed(file_of(table, data)).tensors.values()) == len(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_file_or_an_error(data: bytes) -> None:
    with suppress(CheckpointError):
        parsed(data)
        assert data[8:9] == b"{"


LARGE = 1 << 70
OTHERS = (None, True, "1", "", "\ud800", 1.5, float("nan"), -1, LARGE, [], [1, 2], ["m", "v"], {}, {"a": 1})


def small(comm: Communicator, seed: int = 0) -> Trainer:
    model = nn.Sequential(nn.Linear(2, 3))
    return model.as_distributed(loss=nn.MSELoss(), optimizer=optim.Adam(), comm=comm, seed=seed, strategy="fsdp")


def loader(trainer: Trainer) -> data.DataLoader:
    dataset = data.ArrayDataset(np.ones((8, 2), np.float32), np.ones((8, 3), np.float32))
    return data.DataLoader(dataset, 4, comm=trainer.data_group)


def saved(comm: Communicator, path: Path) -> None:
    trainer = small(comm)
    trainer.step(np.ones((2, 2)), np.ones((2, 3)))
    trainer.save(path, loader=loader(trainer))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    spawn(saved, 2, tmp_path / "good")
    return tmp_path / "good"


def changes(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Where in a JSON value another one stands, and which. The first of several tensors or files has all of them; the
    others, which are read alike, have three of them at each place, by turns."""
    seen: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for turn, at in enumerate(spots(value)):
        first = seen.setdefault(tuple("" if "." in str(key) else key for key in at), at)
        yield from ((at, other) for n, other in enumerate(OTHERS) if at is first or n % 5 == turn % 5)


def spots(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a JSON value another one can stand."""
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from spots(inner, (*at, key))


def put(value: Any, at: tuple[Any, ...], other: Any) -> Any:
    if not at:
        return other
    value = copy.deepcopy(value)
    inner = value
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = other
    return value


def tensors(file: bytes) -> tuple[Any, bytes]:
    """The header of a safetensors file as JSON, and the bytes of its tensors."""
    length = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:length]), file[length:]


def with_header(table: Any, rest: bytes) -> bytes:
    text = json.dumps(table).encode()
    return file_of(text + b" " * (-len(text) % 8), rest)


def closed(table: Any) -> bytes:
    """A manifest of any JSON, with a digest that fits."""

    def dump(value: Any) -> bytes:
        return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode(errors="surrogatepass")

    return dump(table | {"crc32": zlib.crc32(dump(table))}) if isinstance(table, dict) else dump(table)


def manifest_of(files: dict[str, bytes]) -> bytes:
    """The manifest that belongs to these files, whatever is in them."""
    table = json.loads(files["manifest.json"])
    del table["crc32"]
    for name, record in table["files"].items():
        length = 8 + int.from_bytes(files[name][:8], "little")
        record.update(bytes=len(files[name]), head=zlib.crc32(files[name][:length]))
    return closed(table)


def spoilt(good: dict[str, bytes]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """A checkpoint with one value of its JSON replaced by another one, all digests as they should be."""
    table = json.loads(good["manifest.json"])
    del table["crc32"]
    for at, other in changes(table):
        yield f"manifest {at} {other!r}", good | {"manifest.json": closed(put(table, at, other))}
    extra = put(table, ("files", "model.safetensors", "tensors", "nobody"), 1)
    yield "an extra tensor", good | {"manifest.json": closed(extra)}
    for name in FILES[1:]:
        header, rest = tensors(good[name])
        for at, other in changes(header):
            files = good | {name: with_header(put(header, at, other), rest)}
            yield f"{name} {at} {other!r}", files | {"manifest.json": manifest_of(files)}
    header, rest = tensors(good["state.safetensors"])
    state = json.loads(header["__metadata__"]["fsdpx"])
    for at, other in changes(state):
        header["__metadata__"]["fsdpx"] = json.dumps(put(state, at, other))
        files = good | {"state.safetensors": with_header(header, rest)}
        yield f"state {at} {other!r}", files | {"manifest.json": manifest_of(files)}


TAKEN = [
    (("data", "epoch"), LARGE), (("dynamic",), True), (("optimizer",), "1"), (("optimizer",), ""),
    (("scale",), 1.5), (("seed",), LARGE), (("slots",), ["m", "v"]), *((("fit",), v) for v in (None, {}, {"a": 1})),
]  # fmt: skip
"""Values that are as good as those that stood there."""


def test_values_of_other_types_are_refused_alike(good: Path, tmp_path: Path) -> None:
    cases = few(spoilt(contents(good)), 7)
    assert len(cases) > 100
    (tmp_path / "bad").mkdir()

    def body(comm: Communicator) -> list[str]:
        trainer = small(comm, seed=1)
        place, before, found = loader(trainer), held(trainer), []
        there: dict[str, bytes] = {}
        for name, files in cases:
            if comm.rank == 0:
                for file, content in files.items() - there.items():
                    (tmp_path / "bad" / file).write_bytes(content)
                there = files
            comm.barrier().wait()
            try:
                trainer.load(tmp_path / "bad", loader=place)
            except CheckpointError as error:
                found.append(str(error))
                assert held(trainer) == before, name
            else:
                found.append("")
                trainer = small(comm, seed=1)
        return found

    first, second = spawn(body, 2)
    assert first == second
    taken = {name for (name, _), text in zip(cases, first, strict=True) if not text}
    assert taken <= {f"state {at} {other!r}" for at, other in TAKEN}
    for text in set(first) - {""}:
        assert text.startswith(f"load {tmp_path}/bad: ") or text.startswith(f"{tmp_path}/bad"), text


def test_a_manifest_with_wrong_values_is_refused(good: Path) -> None:
    table, bias = json.loads((good / "manifest.json").read_text()), ("tensors", "0.bias")
    del table["crc32"]
    for at, other in ((("bytes",), "100"), (("head",), 1.0), (bias, 1.0), (bias, 1 << 32)):
        with pytest.raises(CheckpointError, match=r"^m: damaged: this is no manifest of a checkpoint$"):
            Manifest.parse(closed(put(table, ("files", "model.safetensors", *at), other)), "m")


def test_a_state_with_wrong_values_is_refused(good: Path) -> None:
    header, rest = tensors((good / "state.safetensors").read_bytes())
    state = json.loads(header["__metadata__"]["fsdpx"])
    header["__metadata__"]["fsdpx"] = json.dumps(state | {"slots": [1, 2]})
    (good / "state.safetensors").write_bytes(with_header(header, rest))
    (good / "manifest.json").write_bytes(manifest_of(contents(good)))
    text = refused(3, lambda comm: small(comm).load(good))
    assert text.endswith("state.safetensors: this state cannot be read: a value is of another type or out of range")


def test_half_a_surrogate_pair_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    for table in ({"\ud800": {}}, {"__metadata__": {"a": "\udc00"}}, {"__metadata__": {"\udc00": "a"}}):
        file = with_header(table, b"")
        with pytest.raises(CheckpointError, match=r"^file: the header .*'.ud.00' in it is not valid text$"):
            parsed(file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"0.bias": "\ud800"}}))
    text = refused(3, lambda comm: small(comm).load_parameters(tmp_path))
    assert text.startswith(f"load_parameters {tmp_path}: ")
    assert text.endswith(rf"{index}: this is no index of safetensors files: '\ud800' in it is not valid text")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
@pytest.mark.parametrize("name", FILES)
def test_pipes_and_folders_are_not_waited_for(name: str, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (good / name).unlink()
    for make in (os.mkfifo, lambda path: path.unlink() or path.mkdir()):
        make(good / name)
        text = refused(3, lambda comm: small(comm).load(good))
        what = "this is a folder, a pipe or a device where a file should be"
        assert text == f"load {good}: rank 0: {good}/{name}: {what}"
        assert main(["ckpt", "verify", str(good)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    if name == "model.safetensors":
        (good / "manifest.json").unlink()
        assert refused(3, lambda comm: small(comm).load_parameters(good)).endswith(f"{good}/{name}: {what}")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs POSIX")
def test_devices_are_no_weights() -> None:
    text = refused(3, lambda comm: small(comm).load_parameters("/dev/zero"))
    what = "this is a folder, a pipe or a device where a file should be"
    assert text == f"load_parameters /dev/zero: rank 0: /dev/zero: {what}"


ODD = {
    "a\0b": r"the path 'a\x00b' is empty or has characters that no file system takes",
    "\ud800": r"the path '\ud800' is empty or has characters that no file system takes",
    "": "the path '' is empty or has characters that no file system takes",
    5: "the path 5 is of type int: give a str or a pathlib.Path",
    b"a": "the path b'a' is of type bytes: give a str or a pathlib.Path",
    None: "the path None is of type NoneType: give a str or a pathlib.Path",
    "/": "the path / has no name, so nothing can be written next to it: name a subfolder",
}


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("call", ["save", "load", "load_parameters"])
def test_odd_paths_are_the_same_error_on_all_ranks(call: str, odd: Any, tmp_path: Path) -> None:
    """Also where one rank alone has them."""

    def body(comm: Communicator, who: int | None) -> None:
        getattr(small(comm), call)(odd if who in (None, comm.rank) else tmp_path / "a")

    text = ODD[odd]
    if call == "load_parameters" and not isinstance(odd, str):
        text = f"{odd!r} is neither a path nor a dict of full arrays, which every rank passes"
    assert refused(3, lambda comm: body(comm, None)) == f"{call}: rank 0: {text}"
    assert refused(3, lambda comm: body(comm, 2)) == f"{call}: rank 2: {text}"
    assert list(tmp_path.iterdir()) == []


def test_whatever_one_rank_raises_is_raised_by_all(good: Path) -> None:
    def body(comm: Communicator) -> None:
        trainer = small(comm, seed=1)
        before = trainer.inspect.compute_fingerprint()
        error = KeyError("position") if comm.rank == 1 else None
        try:
            trainer.load(good, loader=SimpleNamespace(load_state_dict=Mock(side_effect=error, return_value=None)))
        finally:
            assert trainer.inspect.compute_fingerprint() == before

    assert refused(3, body) == f"load {good}: rank 1: KeyError: 'position'"
    loader = SimpleNamespace(load_state_dict=print)
    text = refused(3, lambda comm: small(comm).load(good, loader=None if comm.rank else loader))
    assert text.startswith("load: ranks differ in options: rank 0 has convert=False, verify=True, loader, rank 1 has")
