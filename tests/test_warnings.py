"""A warning points at the line of the program that called fsdpx, from whatever depth of the library it comes."""

import ast
import functools
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import distributed

import fsdpx
from fsdpx import data, nn, spawn

PACKAGE = Path(fsdpx.__file__).parent
X, Y = np.random.default_rng(0).standard_normal((16, 4)), np.arange(16) % 3


class Unread(nn.Composite):
    """Nothing reads what its second layer gives."""

    def __init__(self) -> None:
        self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

    def compose(self, x: Any) -> Any:
        self.spare(x)
        return self.used(x)


def trainer(model: nn.Layer | None = None, comm: Any = None) -> fsdpx.Trainer:
    return distributed(model or nn.Linear(4, 3), comm, loss=nn.CrossEntropyLoss(), precision="float64")


def loader(x: np.ndarray) -> data.DataLoader:
    return data.DataLoader(data.ArrayDataset(x, Y), 16)


def line(later: int) -> int:
    """The number of a line of the caller's, so many after the call."""
    return inspect.stack()[1].lineno + later


def partial_step() -> int:
    one, wanted = trainer(Unread()), line(1)
    functools.partial(one.step, X)(Y)
    return wanted


def fit() -> int:
    one, wanted = trainer(Unread()), line(1)
    one.fit(loader(X), steps=1, progress=False)
    return wanted


def callback_of_fit() -> int:
    one, other, wanted = trainer(), trainer(Unread()), line(3)

    def call(*_: Any) -> None:
        other.step(X, Y)

    one.fit(loader(X), steps=1, progress=False, callbacks=[call])
    return wanted


def step_without_a_gradient() -> int:
    one, wanted = trainer(Unread()), line(1)
    one.step(X, Y)
    return wanted


def step_of_two_ranks_on_the_same_samples() -> int:
    wanted = line(3)

    def run(comm: Any) -> None:
        trainer(comm=comm).step(X, Y)

    spawn(run, 2)
    return wanted


CALLS = [partial_step, fit, callback_of_fit, step_without_a_gradient, step_of_two_ranks_on_the_same_samples]


@pytest.mark.parametrize("call", CALLS)
def test_a_warning_points_at_the_line_that_called(call: Callable[[], int]) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        wanted = call()
    assert [(one.filename, one.lineno) for one in found] == [(__file__, wanted)], [str(one) for one in found]


def test_an_example_is_a_program() -> None:
    code = compile("from fsdpx.errors import warn\n\nwarn('a')", "mine.py", "exec")
    with pytest.warns(RuntimeWarning, match="a") as found:
        exec(code, {"__name__": "fsdpx.examples.mine"})
    assert (found[0].filename, found[0].lineno) == ("mine.py", 3)


def test_all_warnings_go_one_way() -> None:
    """Another way would have to count the calls between."""
    found = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"\.\s*warn(_explicit)?\b", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit")
    ]
    assert found == ["errors.py"]
