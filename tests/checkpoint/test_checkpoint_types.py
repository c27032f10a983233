"""JSON of other types, pipes and folders in place of files, paths that cannot be: one error, the same on all ranks."""

import copy
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import few, in_full
from savers import contents

from fsdpx import Trainer, data, nn, optim, spawn
from fsdpx.__main__ import main
from fsdpx.checkpoint.format import parse
from fsdpx.checkpoint.write import Manifest
from fsdpx.comm import Communicator
from fsdpx.errors import CheckpointError

LARGE = 1 << 70
OTHERS = (None, True, "1", "", "\ud800", 1.5, float("nan"), -1, LARGE, [], [1, 2], ["m", "v"], {}, {"a": 1})
FILES = ("manifest.json", "model.safetensors", "state.safetensors")


def small(comm: Communicator, seed: int = 0) -> Trainer:
    model = nn.Chain(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    return model.as_distributed(loss=nn.MSE(), optimizer=optim.Adam(), comm=comm, seed=seed, strategy="fsdp")


def loader(trainer: Trainer) -> data.DataLoader:
    dataset = data.ArrayDataset(np.ones((8, 2), np.float32), np.ones((8, 1), np.float32))
    return data.DataLoader(dataset, 4, comm=trainer.data)


def saved(comm: Communicator, path: Path) -> None:
    trainer = small(comm)
    trainer.step(np.ones((2, 2)), np.ones((2, 1)))
    trainer.save(path, loader=loader(trainer))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    spawn(saved, 2, tmp_path / "good")
    return tmp_path / "good"


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
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + rest


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
    for at in spots(table):
        for other in OTHERS:
            yield f"manifest {at} {other!r}", good | {"manifest.json": closed(put(table, at, other))}
    extra = put(table, ("files", "model.safetensors", "tensors", "nobody"), 1)
    yield "an extra tensor", good | {"manifest.json": closed(extra)}
    for name in FILES[1:]:
        header, rest = tensors(good[name])
        for at in spots(header):
            for other in OTHERS:
                files = good | {name: with_header(put(header, at, other), rest)}
                yield f"{name} {at} {other!r}", files | {"manifest.json": manifest_of(files)}
    header, rest = tensors(good["state.safetensors"])
    state = json.loads(header["__metadata__"]["fsdpx"])
    for at in spots(state):
        for other in OTHERS:
            header["__metadata__"]["fsdpx"] = json.dumps(put(state, at, other))
            files = good | {"state.safetensors": with_header(header, rest)}
            yield f"state {at} {other!r}", files | {"manifest.json": manifest_of(files)}


TAKEN = [
    (("data", "epoch"), LARGE), (("dynamic",), True), (("optimizer",), "1"), (("optimizer",), ""),
    (("scale",), 1.5), (("seed",), LARGE), (("slots",), ["m", "v"]), *((("fit",), v) for v in (None, {}, {"a": 1})),
]  # fmt: skip
"""Values that are as good as those that stood there."""


@in_full
def test_values_of_other_types_are_refused_alike(good: Path, tmp_path: Path) -> None:
    cases = few(spoilt(contents(good)), 7)
    assert len(cases) > 100

    def body(comm: Communicator) -> list[str]:
        trainer = small(comm, seed=1)
        place, before, found = loader(trainer), trainer.inspect.fingerprint(), []
        for name, files in cases:
            if comm.rank == 0:
                shutil.rmtree(tmp_path / "bad", ignore_errors=True)
                (tmp_path / "bad").mkdir()
                for file, content in files.items():
                    (tmp_path / "bad" / file).write_bytes(content)
            comm.barrier().wait()
            try:
                trainer.load(tmp_path / "bad", loader=place)
            except CheckpointError as error:
                found.append(str(error))
                assert trainer.inspect.fingerprint() == before, name
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


@pytest.mark.parametrize("name", ["manifest", "state"])
def test_the_ones_that_were_taken_or_not_caught(name: str, good: Path) -> None:
    files = contents(good)
    if name == "manifest":
        table = json.loads(files["manifest.json"])
        del table["crc32"]
        for at, other in (
            (("files", "model.safetensors", "bytes"), "100"),
            (("files", "model.safetensors", "head"), 1.0),
            (("files", "model.safetensors", "tensors", "0.bias"), 1.0),
            (("files", "model.safetensors", "tensors", "0.bias"), 1 << 32),
        ):
            with pytest.raises(CheckpointError, match=r"^m: damaged: this is no manifest of a checkpoint$"):
                Manifest.parse(closed(put(table, at, other)), "m")
        return
    header, rest = tensors(files["state.safetensors"])
    state = json.loads(header["__metadata__"]["fsdpx"])
    header["__metadata__"]["fsdpx"] = json.dumps(state | {"slots": [1, 2]})
    (good / "state.safetensors").write_bytes(with_header(header, rest))
    (good / "manifest.json").write_bytes(manifest_of(contents(good)))
    text = refused(lambda comm: small(comm).load(good))
    assert text.endswith("state.safetensors: this state cannot be read: a value is of another type or out of range")


def test_half_a_surrogate_pair_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    for table in ({"\ud800": {}}, {"__metadata__": {"a": "\udc00"}}, {"__metadata__": {"\udc00": "a"}}):
        file = with_header(table, b"")
        with pytest.raises(CheckpointError, match=r"^file: the header .*'.ud.00' in it is no text$"):
            parse(lambda n, file=file: file[:n], len(file), "file")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"0.bias": "\ud800"}}))
    text = refused(lambda comm: small(comm).load_weights(tmp_path))
    assert text.startswith(f"load_weights {tmp_path}: ")
    assert text.endswith(rf"{index}: this is no index of safetensors files: '\ud800' in it is no text")


def refused(body: Callable[[Communicator], Any], ranks: int = 3) -> str:
    """The text of the error that all ranks raise."""

    def attempt(comm: Communicator) -> str:
        with pytest.raises(CheckpointError) as caught:
            body(comm)
        return str(caught.value)

    (text,) = set(spawn(attempt, ranks))
    return text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
@pytest.mark.parametrize("name", FILES)
def test_pipes_and_folders_are_not_waited_for(name: str, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (good / name).unlink()
    for make in (os.mkfifo, lambda path: path.unlink() or path.mkdir()):
        make(good / name)
        text = refused(lambda comm: small(comm).load(good))
        what = "this is a folder, a pipe or a device where a file should be"
        assert text == f"load {good}: rank 0: {good}/{name}: {what}"
        assert main(["ckpt", "verify", str(good)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    if name == "model.safetensors":
        (good / "manifest.json").unlink()
        assert refused(lambda comm: small(comm).load_weights(good)).endswith(f"{good}/{name}: {what}")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs POSIX")
def test_devices_are_no_weights() -> None:
    text = refused(lambda comm: small(comm).load_weights("/dev/zero"))
    assert text == (
        "load_weights /dev/zero: rank 0: /dev/zero: this is a folder, a pipe or a device where a file should be"
    )


ODD = {
    "a\0b": r"the path 'a\x00b' is empty or has characters that no file system takes",
    "\ud800": r"the path '\ud800' is empty or has characters that no file system takes",
    "": "the path '' is empty or has characters that no file system takes",
    5: "the path 5 is of type int: give a str or a pathlib.Path",
    b"a": "the path b'a' is of type bytes: give a str or a pathlib.Path",
    None: "the path None is of type NoneType: give a str or a pathlib.Path",
    "/": "the path / has no name, so nothing can lie beside it: give a folder inside it",
}


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("call", ["save", "load", "load_weights"])
def test_odd_paths_are_the_same_error_on_all_ranks(call: str, odd: Any, tmp_path: Path) -> None:
    """Also where one rank alone has them."""

    def body(comm: Communicator, who: int | None) -> None:
        getattr(small(comm), call)(odd if who in (None, comm.rank) else tmp_path / "a")

    text = ODD[odd]
    if call == "load_weights" and not isinstance(odd, str):
        text = f"{odd!r} is neither a path nor a dict of whole arrays, which every rank gives"
    assert refused(lambda comm: body(comm, None)) == f"{call}: rank 0: {text}"
    assert refused(lambda comm: body(comm, 2)) == f"{call}: rank 2: {text}"
    assert list(tmp_path.iterdir()) == []


def test_whatever_one_rank_raises_is_raised_by_all(good: Path) -> None:
    class Odd:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def load_state_dict(self, state: Any) -> None:
            if self.rank == 1:
                raise KeyError("position")

    def body(comm: Communicator) -> None:
        trainer = small(comm, seed=1)
        before = trainer.inspect.fingerprint()
        try:
            trainer.load(good, loader=Odd(comm.rank))
        finally:
            assert trainer.inspect.fingerprint() == before

    assert refused(body) == f"load {good}: rank 1: KeyError: 'position'"
    text = refused(lambda comm: small(comm).load(good, loader=None if comm.rank else Odd(0)))
    assert text.startswith("load: ranks differ in options: rank 0 has convert=False, verify=True, loader, rank 1 has")
