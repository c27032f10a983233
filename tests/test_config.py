"""What users write in several ways: numbers of bytes, and names of 16-bit formats."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import fsdpx
from fsdpx import nn, optim
from fsdpx.__main__ import main
from fsdpx.array.namespace import dtype
from fsdpx.comm.codecs import codec
from fsdpx.comm.local import single
from fsdpx.config import Precision, byte_count, precision
from fsdpx.errors import ConfigError

HALVES = {"float16": np.float16, "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (0, 0), (4096, 4096), ("4096", 4096), ("4096B", 4096), ("1MiB", 1 << 20), ("1 mib", 1 << 20),
        ("0.5GiB", 1 << 29), ("1MB", 10**6), ("2K", 2000), ("2KiB", 2048), (np.int64(7), 7),
    ],
)  # fmt: skip
def test_bytes(given: object, count: int) -> None:
    assert byte_count(given, "room") == count


@pytest.mark.parametrize("given", [-1, 1.5, True, None, "", "MiB", "1 cup", "1e6", "-1MiB"])
def test_what_is_no_number_of_bytes(given: object) -> None:
    with pytest.raises(ConfigError, match=r"^room=.*: a number of bytes is needed, such as 1048576, '1MiB' or '2GB'$"):
        byte_count(given, "room")


def trainer(**options: object) -> fsdpx.Trainer:
    model = nn.Chain(*(nn.Linear(64, 64) for _ in range(8)))
    return model.as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), comm=single(), **options)


def test_units_are_as_large_as_a_text_says() -> None:
    counts = [len(trainer(group_bytes=given).placement.layout.units) for given in ("0", "32KiB", 32 << 10, "1MiB")]
    assert counts == [8, 4, 4, 1]


@pytest.mark.parametrize("name", HALVES)
def test_a_16_bit_format_has_one_name_everywhere(name: str, tmp_path: Path) -> None:
    wanted = np.dtype(HALVES[name])
    assert dtype(name) == wanted
    assert dtype(Precision(params=name, reduce=name).wire) == wanted
    assert Precision(params=name) == Precision(params={"fp16": "float16", "bfloat16": "bf16"}.get(name, name))
    assert dtype(precision(name).sums) == wanted
    assert codec(name, "float32", "float32").dtype == wanted
    made = trainer(precision=name, codec=name)
    assert made.placement.formats.wire == wanted
    made.save(tmp_path / "a", dtype=name)
    assert main(["ckpt", "convert", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", name]) == 0
    for folder in ("a", "b"):
        found = safetensors.numpy.load_file(tmp_path / folder / "model.safetensors")
        assert {value.dtype for value in found.values()} == {wanted}


def test_names_of_other_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown precision 'half': choose one of float64, float32, bf16, fp16"):
        precision("half")
    with pytest.raises(ConfigError, match=r"Precision\(params='int8'\): choose float16, bf16 or None"):
        Precision(params="int8")
