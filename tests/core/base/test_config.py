"""What users write in several ways: numbers of bytes, and names of 16-bit formats."""

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from models import distributed

import fsdpx
from fsdpx import nn
from fsdpx.__main__ import main
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base.config import Precision, normalize_half_name, parse_byte_count, resolve_precision
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.core.compression import make_gradient_codec
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
    assert parse_byte_count(given, "room") == count


@pytest.mark.parametrize("given", [-1, 1.5, True, None, "", "MiB", "1 cup", "1e6", "-1MiB"])
def test_what_is_no_number_of_bytes(given: object) -> None:
    with pytest.raises(ConfigError, match=r"^room=.*: a number of bytes is needed, such as 1048576, '1MiB' or '2GB'$"):
        parse_byte_count(given, "room")


def trainer(**options: object) -> fsdpx.Trainer:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    return distributed(model, make_single_rank_communicator(), **options)


def test_units_are_as_large_as_a_text_says() -> None:
    made = [trainer(group_bytes=given) for given in ("0", "32KiB", 32 << 10, "1MiB")]
    counts = [len(one.inspect.placement.layout.units) for one in made]
    assert counts == [8, 4, 4, 1]


@pytest.mark.parametrize("name", HALVES)
def test_a_16_bit_format_has_one_name_everywhere(name: str, tmp_path: Path) -> None:
    wanted = np.dtype(HALVES[name])
    assert parse_dtype(name) == wanted
    assert parse_dtype(Precision(param=name, reduce=name).parameter_wire_dtype) == wanted
    assert Precision(param=name) == Precision(param={"fp16": "float16", "bfloat16": "bf16"}.get(name, name))
    assert parse_dtype(resolve_precision(name).parameter_wire_dtype) == wanted
    assert make_gradient_codec(name, "float32", "float32").dtype == wanted
    made = trainer(precision=Precision(param=name), compression=name)
    assert made.inspect.placement.formats.wire == wanted
    assert Precision(compute=name) == Precision(compute=normalize_half_name(name))
    made.save(tmp_path / "a", dtype=name)
    assert main(["ckpt", "convert", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", name]) == 0
    for folder in ("a", "b"):
        found = safetensors.numpy.load_file(tmp_path / folder / "model.safetensors")
        assert {value.dtype for value in found.values()} == {wanted}


def test_names_of_other_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown precision 'fp8': choose one of float64, float32, bf16, bf16-true, "):
        resolve_precision("fp8")
    dtype = ml_dtypes.bfloat16
    words = [("bf16-mixed", "bf16"), ("mixed_bfloat16", "bf16"), (dtype, "bf16"), ("16-mixed", "float16")]
    words += [("half", "float16"), (16, "float16"), (np.float16, "float16"), ("32-true", "float32"), ("no", "float32")]
    words += [(np.dtype("float64"), "float64"), ("double", "float64")]
    for word, ours in words:
        with pytest.raises(ConfigError, match=f"unknown precision .*; here that is precision='{ours}'"):
            resolve_precision(word)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"compute=<class 'ml_dtypes.bfloat16'>.*; here that is 'bf16'"):
        Precision(compute=dtype)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown dtype 'half'; here that is 'float16'"):
        parse_dtype("half")


def test_dtypes_of_pytorch_are_named_in_our_words() -> None:
    torch = pytest.importorskip("torch")
    for dtype, ours in ((torch.bfloat16, "bf16"), (torch.float16, "float16"), (torch.float32, "float32")):
        with pytest.raises(ConfigError, match=f"unknown precision {dtype}; here that is precision='{ours}'"):
            resolve_precision(dtype)
        with pytest.raises(ConfigError, match=f"unknown dtype {dtype}; here that is '{ours}'"):
            parse_dtype(dtype)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"compute": "fp8"}, "compute='fp8'): choose float32 or float64 or bf16 or float16"),
        ({"compute": 16}, "compute=16): choose float32 or float64 or bf16 or float16"),
        ({"param": "int4"}, "param='int4', compute='float32'): choose None or float32 or bf16 or float16"),
        ({"param": "int8"}, "param='int8', compute='float32'): choose None or float32 or bf16 or float16"),
        ({"compute": "bf16", "param": "fp16"}, "param='float16', compute='bf16'): choose None or bf16 or float32"),
        ({"reduce": "float64"}, "reduce='float64', compute='float32'): choose None or float32 or bf16"),
        ({"compute": "bf16", "buffers": "int8"}, "buffers='int8', compute='bf16'): choose None or float32 or float64"),
        ({"master": "bf16"}, "master='bf16', compute='float32'): choose None or float32"),
        ({"compute": "float64", "master": "float32"}, "master='float32', compute='float64'): choose None or float64"),
        ({"rounding": "kahan"}, "rounding='kahan', compute='float32', master=None): choose None"),
        (
            {"compute": "bf16", "master": "bf16", "rounding": "nearest"},
            "rounding='nearest', compute='bf16', master='bf16'): choose None or stochastic or kahan",
        ),
        ({"loss_scale": 0}, "loss_scale=0): a positive number is needed"),
    ],
)
def test_formats_that_a_role_cannot_have(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(f"Precision({said}")):
        Precision(**given)


def test_every_role_can_be_named() -> None:
    said = Precision(compute="bfloat16", param="bf16", reduce="float32", buffers="float32", master="float32")
    made = trainer(precision=said, group_bytes=0).inspect.placement.formats
    single, half = np.dtype("f4"), parse_dtype("bf16")
    assert (made.master, made.gradients, made.statistics) == (single, single, single)
    assert (made.compute, made.wire) == (half, None)
    assert repr(Precision("bf16", master="bf16")) == "Precision(compute='bf16', master='bf16')"
    assert resolve_precision("bf16-true") == Precision("bf16", master="bf16")
