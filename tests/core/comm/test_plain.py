"""Plain data: what ranks tell each other comes back as it was, and what a stranger sends runs nothing."""

import os
import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from present import is_present

import fsdpx
from fsdpx.core.comm.calls import ReduceOp
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.plain_codec import pack, unpack
from fsdpx.core.trainer.batch import CallRecord
from fsdpx.errors import CommError, ConfigError, ShapeError

VALUES: list[Any] = [
    None, ..., True, False, 0, -1, 255, -256, 2**200, 1.5, float("inf"), 1 + 2j, "", "é\ud800", b"\0\xff", [], (),
    [1, (2, "x")], {"a": 1, (1, 2): {3}, None: frozenset({4})}, Path("/a/b"), np.dtype("float32"),
    np.dtype(ml_dtypes.bfloat16), np.float32(1.5), CallRecord("step", "x", ShapeError, "bad"), ReduceOp.AVG, ShapeError,
]  # fmt: skip


@dataclass
class Bad:
    """A pickle of it writes a file."""

    path: Path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_it_comes_back_as_it_was(value: Any) -> None:
    found = unpack(pack(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "bool", "complex64", "int8", "U3", ">i4"])
def test_arrays_come_back_with_shape_and_format(dtype: str) -> None:
    for array in (np.arange(6).reshape(2, 3).astype(dtype), np.zeros((0, 4), dtype), np.zeros((), dtype)):
        found = unpack(pack(array.T))
        assert (found.shape, found.dtype) == (array.T.shape, array.dtype.newbyteorder("="))
        np.testing.assert_array_equal(found, array.T)


def test_an_error_comes_back_with_its_words() -> None:
    found = unpack(pack(ConfigError("what is wrong")))
    assert isinstance(found, ConfigError)
    assert str(found) == "what is wrong"


FOREIGN = {"own class": Bad(Path("x")), "function": os.mkdir, "lambda": lambda: 1, "class": Path, "object": object()}


@pytest.mark.parametrize("value", FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no plain data: send it by all_gather_object|object"):
        pack(value)


def _text(letter: bytes, text: bytes) -> bytes:
    return letter + len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        b"", b"?", b"i" + (1 << 62).to_bytes(8, "little"), b"l" + (1 << 40).to_bytes(8, "little"), b"NN",
        (b"l" + (1).to_bytes(8, "little")) * 5000 + b"N", _text(b"k", b"os:mkdir"), _text(b"k", b"builtins:eval"),
        _text(b"k", b"fsdpx.errors:FsdpxError.__subclasses__"), _text(b"k", b"fsdpx.ext.gloo.gloo:os.system"),
        _text(b"o", b"fsdpx.core.trainer.batch:CallRecord") + b"N",
        _text(b"a", b"float64") + (2).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little") * 2,
    ],
    ids=range(12),
)  # fmt: skip
def test_what_a_stranger_sends_is_refused(data: bytes) -> None:
    with pytest.raises(CommError, match=r"a rank has sent what is no plain data|at most"):
        unpack(data)


def test_spoilt_bytes_are_refused_or_other_values() -> None:
    whole, dice = pack(VALUES), random.Random(0)
    for _ in range(300):
        spoilt = bytearray(whole)
        spoilt[dice.randrange(len(spoilt))] = dice.randrange(256)
        try:
            unpack(spoilt[: dice.randrange(len(spoilt) + 1)])
        except CommError as error:
            assert "no plain data" in str(error)  # noqa: PT017


def test_a_pickle_that_a_rank_sends_as_a_message_of_control_is_not_run(tmp_path: Path) -> None:
    def body(comm: Communicator) -> list[Any]:
        if comm.rank == 1:
            return comm.all_gather_bytes(pickle.dumps(Bad(tmp_path / "run")))
        return comm.all_gather_value("step")

    # thread ranks hear the first failure
    with pytest.raises(CommError, match="a rank has sent what is no plain data"):
        fsdpx.spawn(body, 2)
    assert not (tmp_path / "run").exists()


def test_no_module_but_those_of_users_objects_unpickles() -> None:
    """Whoever adds a pickle to what ranks tell each other hears of it here."""
    package = Path(fsdpx.__file__).parent
    floors = ("core", *(f"ext/{name}" for name in ("elastic", "observe", "watch") if is_present(name)))
    found = {
        str(path.relative_to(package)) for floor in floors for path in (package / floor).rglob("*.py")
        if "import pickle" in path.read_text()
    }  # fmt: skip
    assert found == {"core/comm/communicator.py"}
    control = [p for p in package.rglob("*.py") if ".all_gather_object(" in p.read_text()]
    assert {str(p.relative_to(package)) for p in control} <= {
        "core/comm/communicator.py", "core/comm/node/node.py", "ext/gpu/nccl.py", "core/comm/desync_check.py",
        "ext/gloo/gloo.py",
        "testing/communicator.py", "testing/optimizer.py",
    }  # fmt: skip
