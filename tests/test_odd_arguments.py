"""Odd arguments are errors for users, the same on all ranks. `make thorough` tries all public calls."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from models import alike
from odd_arguments import find_raw_errors, find_uneven_errors, list_calls, make_loader, make_trainer, write_samples

import fsdpx
from fsdpx import nn
from fsdpx.core.base.arguments import describe_hint, fits_hint, wrap_with_type_hint_check
from fsdpx.errors import ConfigError


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("samples")
    write_samples(folder)
    with contextlib.chdir(folder):
        yield folder


@pytest.mark.usefixtures("samples")
def test_odd_arguments_of_some_calls_are_errors_of_the_library() -> None:
    some = "nn.Conv2d nn.UNet nn.MSELoss optim.AdamW data.DataLoader fsdpx.CheckpointConfig save all_reduce".split()
    calls = [*list_calls(some)]
    assert len(calls) == len(some)
    assert [line for call in calls for line in find_raw_errors(call)] == []


UNEVEN = [
    ("distribute", "microbatches"), ("distribute", "mesh"), ("distribute", "device"), ("fit", "epochs"),
    ("fit", "preempt"), ("parameters", "names"), ("save", "dtype"), ("evaluate", "weights"),
]  # fmt: skip


@pytest.mark.usefixtures("samples")
@pytest.mark.parametrize("number", range(len(UNEVEN)))
def test_an_odd_argument_on_one_rank_is_the_same_error_on_all(number: int) -> None:
    """Each call with a third of the odd values, so that each value is tried with two or three calls."""
    assert list(find_uneven_errors(*UNEVEN[number], slice(number % 3, None, 3))) == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"preempt": "x"}, "fit(preempt='x'): "),
        ({"count": np.array(3)}, "fit(count=array(3)): a function, or None is needed"),
        ({"log": []}, "fit(log=[]): a text, or a path, or None is needed"),
        ({"validation": 1}, "fit(validation=1): a list or an iterator, or None is needed"),
    ],
)
def test_fit_names_an_argument_of_another_kind(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        make_trainer().fit(make_loader(), progress=False, **given)


@pytest.mark.parametrize("given", [{"epochs": 2}, {"steps": 1}, {"log": "log"}, {"metrics": {"mse": nn.MSELoss()}}])
def test_ranks_give_fit_the_same_arguments(given: dict[str, Any], tmp_path: Path) -> None:
    def run(comm: Any) -> None:
        trainer, loader = make_trainer(comm), make_loader(comm)
        with contextlib.chdir(tmp_path) if comm.rank else contextlib.nullcontext():
            trainer.fit(loader, validation=loader, progress=False, **(given if comm.rank else {}))

    assert alike(2, run).startswith(f"ConfigError: ranks differ in {next(iter(given))} (rank 0: ")


def test_more_microbatches_than_samples_make_no_longer_step() -> None:
    def run(comm: Any, microbatches: int) -> tuple[list[float], int]:
        trainer = make_trainer(comm, microbatches=microbatches)
        x, y = np.eye(4, dtype=np.float32)[: 2 + comm.rank], np.zeros(2 + comm.rank, int)
        losses = [trainer.step(x, y) for _ in range(3)]
        return losses, trainer.report().times["F"].calls

    (few, least), (many, most) = (fsdpx.spawn(run, 2, count)[0] for count in (3, 10_000))
    assert few == many
    assert least == most
    with pytest.raises(ConfigError, match=r"microbatches=1000000: 65,536 at most"):
        fsdpx.spawn(run, 1, 1_000_000)


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (3, int, True), (np.int8(3), int, True), (np.array(3), int, True), (True, int, False), (3.0, int, False),
        (3, float, True), (np.float32(3), float, True), (False, float, False), ("3", float, False), (1j, float, False),
        (np.bool_(1), bool, True), (1, bool, False), (None, int | None, True), ("a", Literal["a", "b"], True),
        ("c", Literal["a", "b"], False), (np.array([1, 2]), Literal["a"], False), ([1, 2], tuple[int, ...], True),
        ((1, "2"), tuple[int, ...], False), (np.array([1, 2]), Sequence[int], True), ("text", Sequence[str], True),
        (np.zeros((2, 2)), Sequence[int], False), ({1: 2}, Sequence[int], False), ({"a": 1}, Mapping[str, int], True),
        (len, Callable[..., Any], True), (3, Callable[..., Any], False),
        (nn.Tanh(), nn.Layer, True), (3, nn.Layer, False), (object(), Any, True),
    ],
)  # fmt: skip
def test_values_fit_hints(value: Any, hint: Any, fits: bool) -> None:
    assert fits_hint(value, hint) is fits


def test_hints_are_told_in_words() -> None:
    words = "a whole number, or a tuple of whole numbers"
    assert describe_hint(int | tuple[int, ...]) == words
    assert describe_hint(Sequence[str] | None) == "a list of texts, or None"
    assert describe_hint(Literal["a", "b"]) == "one of 'a', 'b'"
    assert describe_hint(nn.Layer | None) == "fsdpx's Layer, or None"
    assert describe_hint(Callable[[int], int]) == "a function"


def test_an_error_of_the_body_stays_where_all_arguments_fit() -> None:
    @wrap_with_type_hint_check
    def divide(a: int, b: int) -> float:
        return a / b

    assert divide(4, 2) == 2
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    with pytest.raises(ConfigError, match=r"divide\(b='x'\): a whole number is needed"):
        divide(1, "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"divide\(a=10{30}\): the number is too large"):
        divide(10**30, 3)
