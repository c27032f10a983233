"""Where cells of a whole field lie in the arrays of the ranks of a grid."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainings import demand_error

import fsdpx
from fsdpx import spawn
from fsdpx.core.comm import Communicator
from fsdpx.data import FieldDataset
from fsdpx.errors import ConfigError, DataError


@given(st.data())
def test_an_index_of_the_field_is_one_of_each_part(data: st.DataObject) -> None:
    """All cells of a region are found once, on the rank that has them, whatever ghost cells arrays bring."""
    n, g = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 2))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))), n]
    start, stop = data.draw(st.integers(-n, n)), data.draw(st.integers(-n, n))
    index = data.draw(
        st.sampled_from([slice(start, stop, data.draw(st.integers(1, 4))), slice(None), min(start, n - 1)])
    )
    whole = np.arange(n)

    def run(comm: Communicator) -> list[int]:
        a, b = cuts[comm.rank : comm.rank + 2]
        grid = fsdpx.Grid(comm, (b - a,), dims=(3,), layout="x", ghosts=g)
        assert (grid.take_local(whole) == whole[a:b]).all()
        mine = np.pad(whole[a:b], g, constant_values=-1)
        here = grid.take_local((index,))
        return [] if here is None else np.atleast_1d(mine[here]).tolist()

    found = [cell for rank in spawn(run, 3) for cell in rank]
    assert found == np.atleast_1d(whole[index]).tolist()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((1,), "Grid.take_local(1,): give a number or a slice for each of the 2 dims"),
        ((1, 9), "Grid.take_local: dim x has 6 cells, and no cell 9"),
        ((slice(3, 0, -1), 0), "Grid.take_local: dim y: slice(3, 0, -1) goes backwards"),
    ],
)
def test_indices_that_no_field_has(index: tuple[object, ...], message: str) -> None:
    grid = fsdpx.Grid.from_shape((4, 6), (1, 1))
    demand_error(DataError, lambda: grid.take_local(index), message)


@pytest.mark.parametrize(
    "gather", [lambda grid: grid.all_gather(np.zeros((4, 3))), lambda grid: FieldDataset("a.npy", grid)]
)
def test_a_grid_without_ranks_gathers_nothing(gather: Callable[[fsdpx.Grid], object]) -> None:
    grid = fsdpx.Grid.from_shape((4, 6), (1, 2))
    demand_error(ConfigError, lambda: gather(grid), f"{grid}: only sizes are known; pass it to a plan or a dry run")
