"""Predictions beside a solver: what one rank brings wrong is one error of all ranks, and none waits for it in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainings import make_trainer

import fsdpx
from fsdpx import nn, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import DataError, FsdpxError, ShapeError

CELLS = 3, 4
NETS: dict[str, Callable[[], nn.Layer]] = {
    "near": lambda: nn.Conv2d(1, 1, 3, padding=1),
    "far": lambda: nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular") for _ in range(2))),
    "sums": lambda: nn.Sequential(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 1)),
    "modes": lambda: nn.FNO(1, 1, (2, 2), 2, 1),
}
BAD: dict[str, tuple[Callable[[], Any], type[FsdpxError], str]] = {
    "samples": (lambda: np.ones((1, *CELLS, 1)), DataError, "rank {} brings 1 sample of float32 of 1 channels"),
    "more samples": (lambda: np.ones((5, *CELLS, 1)), DataError, "rank {} brings 5 samples"),
    "cells": (lambda: np.ones((2, 2, 4, 1)), DataError, "rank {}: the input has shape (2, 2, 4, 1)"),
    "dims": (lambda: np.ones(4), DataError, "rank {}: the input has shape (4,)"),
    "channels": (lambda: np.ones((2, *CELLS, 3)), ShapeError, "rank {}: layer"),
    "dtype": (lambda: np.ones((2, *CELLS, 1), complex), DataError, "rank {}: "),
    "nothing": (lambda: None, DataError, "rank {}: got None"),
}


def rows_of(comm: Communicator) -> fsdpx.Grid:
    return fsdpx.Grid(comm, CELLS, dims=(comm.size, 1))


def predictions(comm: Communicator, net: str, strategy: str, bad: dict[tuple[int, int], Any], calls: int) -> list[str]:
    """What each call came to: "" or its error. bad: what ranks bring instead in some of their calls."""
    trainer = NETS[net]().as_distributed(domain=rows_of(comm), strategy=strategy)
    found, whole = [], np.ones((2, *CELLS, 1))
    for call in range(calls):
        try:
            given = bad.get((comm.rank, call), whole)
            assert np.shape(trainer.predict(given)) == np.shape(given)
            found.append("")
        except FsdpxError as error:
            found.append(f"{type(error).__name__}: {error}")
    trainer.close()
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("net", NETS)
def test_what_one_rank_brings_wrong_is_one_error_of_all(net: str, strategy: str) -> None:
    """In the call of the rank, or, where cells of that rank do not reach, in one of the next; then all go on, until
    another rank brings something else wrong five calls later."""
    bad = {(n % 3, 3 + 5 * n): make() for n, (make, _, _) in enumerate(BAD.values())}
    rows = spawn(predictions, 3, net, strategy, bad, 3 + 5 * len(BAD), timeout=60)
    assert not any(error for row in rows for error in row[:3]), rows
    for n, (name, (_, kind, text)) in enumerate(BAD.items()):
        wanted = f"{kind.__name__}: {'predict: ' * ('brings' in text)}{text.format(n % 3)}"
        demand_one_error([row[3 + 5 * n : 8 + 5 * n] for row in rows], wanted, name)


def demand_one_error(rows: list[list[str]], wanted: str, name: str) -> None:
    """All ranks raise the same one in some of these calls, and none in the last."""
    (error,) = {error for row in rows for error in row if error}
    assert error.startswith(wanted), (name, error)
    for row in rows:
        assert any(row), (name, rows)
        assert not row[-1], (name, rows)


@given(st.data())
def test_ranks_that_change_what_they_bring(data: st.DataObject) -> None:
    """All at once is no error; some of them, to something new or to what all have brought before, is one of all."""
    size, calls = data.draw(st.integers(2, 4)), 4
    rows = [data.draw(st.sampled_from([1, 2, 3])) for _ in range(calls)]
    call = data.draw(st.integers(1, calls - 1))
    odd = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    other = data.draw(st.sampled_from([1, 2, 3, 4]).filter(lambda n: n != rows[call]))
    net = data.draw(st.sampled_from(["far", "sums"]))

    def bring(rank: int, k: int) -> Any:
        return np.ones((other if k == call and rank in odd else rows[k], *CELLS, 1))

    bad = {(rank, k): bring(rank, k) for rank in range(size) for k in range(calls)}
    found = spawn(predictions, size, net, "ddp", bad, calls, timeout=60)
    assert len({error for row in found for error in row if error}) == bool(odd)
    for row in found:
        assert [bool(error) for error in row] == [k == call and bool(odd) for k in range(calls)]


def is_refused(trainer: Any, x: np.ndarray) -> bool:
    try:
        trainer.predict(x)
    except DataError:
        return True
    return False


def test_ranks_that_are_ahead_raise_it_up_to_the_same_call() -> None:
    """The last rank returns from a call that the first one makes later, and wrongly; it hears of it in the next."""
    ahead, told = threading.Event(), threading.Event()

    def run(comm: Communicator) -> list[bool]:
        trainer = NETS["near"]().as_distributed(domain=rows_of(comm), strategy="ddp")
        whole, found = np.ones((2, *CELLS, 1)), []
        for call in range(6):
            if (comm.rank, call) == (0, 2):
                assert ahead.wait(60)
            found.append(is_refused(trainer, whole[: 1 if (comm.rank, call) == (0, 2) else 2]))
            if (comm.rank, call) == (2, 2):
                ahead.set()
                assert told.wait(60)
            if comm.rank == 1 and found[-1]:
                told.set()
        return found

    no = [False, False]
    failed = [*no, True, True, *no]
    assert spawn(run, 3, timeout=60) == [failed, failed, [*no, False, True, *no]]


def test_ranks_that_need_nothing_of_each_other_get_in_step_again() -> None:
    """Two ranks have made all their calls before the first one brings something wrong."""
    ahead = threading.Barrier(3)

    def run(comm: Communicator) -> list[bool]:
        trainer = nn.Conv2d(1, 1, 1).as_distributed(domain=rows_of(comm), strategy="ddp")
        whole, found = np.ones((2, *CELLS, 1)), []
        for call in range(8):
            if call == (2 if comm.rank == 0 else 5):
                ahead.wait(60)
            if call == 5:
                ahead.wait(60)
            found.append(is_refused(trainer, whole[: 1 if (comm.rank, call) == (0, 2) else 2]))
        return found

    late = [*[False] * 5, True, False, False]
    assert spawn(run, 3, timeout=60) == [[False, False, True, True, True, True, False, False], late, late]


def test_other_calls_name_it_too() -> None:
    """`step` and `evaluate`, which agree in each call; and the call that follows a prediction which another rank has
    met an error in."""

    def run(comm: Communicator) -> list[str]:
        trainer = make_trainer(NETS["near"](), rows_of(comm), precision=None)
        found, u = [], np.ones((2, *CELLS, 1))
        odd = u[:1] if comm.rank == 2 else u
        for name in ("step", "evaluate", "step"):
            call = getattr(trainer, name)
            call(u, u)
            with pytest.raises(DataError) as error:
                call(odd, odd)
            found.append(str(error.value))
        trainer.predict(u)

        def predict_and_step() -> None:
            trainer.predict(odd)
            trainer.step(u, u)  # of ranks that had all they needed

        with pytest.raises(DataError) as error:
            predict_and_step()
        trainer.step(u, u)
        return [*found, str(error.value)]

    found = spawn(run, 3, timeout=60)
    assert found[0] == found[1] == found[2]
    assert all("rank 2" in text for text in found[0])


@pytest.mark.world
@pytest.mark.parametrize("world", ["node", "mpi"], indirect=True)
@pytest.mark.parametrize("net", NETS)
def test_what_one_process_brings_wrong_is_one_error_of_all(world: Communicator, net: str) -> None:
    if world.size < 2:
        pytest.skip("one rank alone")
    odd, length = world.size - 1, world.size + 2
    bad = {(odd, 3 + length * n): BAD[name][0]() for n, name in enumerate(("samples", "cells"))}
    rows = world.all_gather_value(predictions(world, net, "ddp", bad, 3 + 2 * length))
    for n, (name, start) in enumerate((("samples", "DataError: predict: "), ("cells", "DataError: "))):
        found = [row[3 + length * n : 3 + length * (n + 1)] for row in rows]
        demand_one_error(found, start + BAD[name][2].format(odd), name)
