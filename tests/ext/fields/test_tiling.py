"""A grid is found from where each part begins, however the ranks are numbered."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from grids import bounds, cuts_of, numbered, place_of
from hypothesis import given
from hypothesis import strategies as st
from trainings import demand_refused, make_trainer

import fsdpx
from fsdpx import nn, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError
from fsdpx.ext.fields.rank_grid import find_rank_grid_of_parts
from fsdpx.testing import assert_close


@given(st.data())
def test_parts_in_any_order_are_the_grid_that_they_were_cut_from(data: st.DataObject) -> None:
    """Parts of any sizes; ranks without cells may change places with each other."""
    dims = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    sizes = [data.draw(st.integers(1, 9)) for _ in dims]
    cuts = cuts_of(sizes, dims, data.draw(st.integers(0, 9))).cuts
    order = data.draw(st.permutations(range(int(np.prod(dims)))))
    parts = [tuple(bounds(cuts, place_of(place, dims))) for place in order]
    found = find_rank_grid_of_parts(parts, "zyx"[3 - len(dims) :])
    assert found.dims == dims
    assert sorted(found.ranks) == sorted(order)
    assert [parts[rank] for rank in found.ranks] == [parts[order.index(place)] for place in range(len(order))]


@given(st.data())
def test_parts_that_are_moved_are_no_grid(data: st.DataObject) -> None:
    """A part that lies elsewhere, or is larger, is refused: nothing is guessed."""
    dims = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    cuts = cuts_of([4 * d for d in dims], dims, 0).cuts
    order = data.draw(st.permutations(range(int(np.prod(dims)))))
    parts = [tuple(bounds(cuts, place_of(place, dims))) for place in order]
    rank, dim = data.draw(st.integers(0, len(parts) - 1)), data.draw(st.integers(0, len(dims) - 1))
    (a, b), moved = parts[rank][dim], list(parts[rank])
    moved[dim] = data.draw(st.sampled_from([(a + 1, b + 1), (a - 1, b - 1), (a, b - 1), (a + 1, b), (a - 1, b)]))
    if dims[dim] == len(parts) and moved[dim] == (a, b - 1) and b == 4 * dims[dim]:
        return  # a smaller field
    parts[rank] = tuple(moved)
    with pytest.raises(ConfigError, match=r"^Grid: (the parts (overlap|leave a gap|do not)|rank \d+ begins at -1)"):
        find_rank_grid_of_parts(parts, "zyx"[3 - len(dims) :])


@pytest.mark.parametrize(
    ("shapes", "offsets", "more", "message"),
    [
        (
            [(4, 6)] * 2, [(0, 0), (0, 0)], {},
            "Grid: rank 1 has the same cells as rank 0, y from 0 to 4, x from 0 to 6: offsets= is where each rank's",
        ),
        (
            [(4, 6)] * 2, [(0, 0), (0, 5)], {},
            "the parts overlap: along dim x rank 0 has the cells 0 to 6, and rank 1 those from 5 to 11. shape= and off",
        ),
        (
            [(4, 6)] * 2, [(0, 0), (0, 8)], {},
            "the parts leave a gap: along dim x no rank has the cells 6 to 8, before those of rank 1",
        ),
        ([(4, 6)] * 2, [(1, 6), (1, 0)], {}, "along dim y no rank has the cells 0 to 1, before those of rank 0"),
        ([(4, 6)] * 2, [(-1, 0), (-1, 6)], {}, "rank 0 begins at -1 along dim y: offsets count the field's own cells"),
        ([(4, 6)] * 2, [(0, 0), (4, 6)], {}, "the parts leave a gap: no rank has the cells y from 0 to 4, x from 6 to"),
        (
            [(4, 6), (4, 6), (2, 12)], [(0, 0), (2, 6), (6, 0)], {},
            "along dim y rank 0 has the cells from 0 to 4, and rank 1 those from 2 to 6: use slabs",
        ),
        ([(4, 12), (4, 6), (4, 6)], [(0, 0), (4, 0), (4, 6)], {}, "the parts do not form a Cartesian grid: "),
        ([(4, 6)] * 2, [(0, 0), None], {"dims": (1, 2)}, "rank 0 gives offsets=(0, 0), rank 1 none: all ranks"),
        ([(4, 6)] * 2, [(0,), (6,)], {}, "rank 0: offsets=(0,): say where this rank's part begins along each of the 2"),
        ([(4, 6)] * 2, [(0, 0.5), (0, 6)], {}, "rank 0: shape=(4, 6), offsets=(0, 0.5), "),
        ([(4, 6)] * 2, [(0, 0), (0, 6)], {"dims": (2, 1)}, "dims=(2, 1), and the parts at offsets= are on (1, 2)"),
        ([(4, 6), (4,)], [(0, 0), (4,)], {}, "rank 0 has layout 'yxc' on () ranks, rank 1 'xc' on ()"),
    ],
)  # fmt: skip
def test_what_does_not_tile_is_named_on_all_ranks(shapes: Any, offsets: Any, more: Any, message: str) -> None:
    def run(comm: Communicator) -> None:
        fsdpx.Grid(comm, shapes[comm.rank], offsets=offsets[comm.rank], **more)

    assert len(set(demand_refused(run, message, len(shapes), kind=ConfigError))) == 1


@given(st.data())
def test_a_grid_in_any_order_has_its_cells_where_they_are(data: st.DataObject) -> None:
    dims = data.draw(st.sampled_from([(3,), (2, 2), (1, 3), (3, 2), (2, 1, 2)]))
    cuts = cuts_of([5, 7, 4][: len(dims)], dims, data.draw(st.integers(0, 5))).cuts
    order = data.draw(st.permutations(range(int(np.prod(dims)))))
    whole = np.arange(np.prod([c[-1] for c in cuts])).reshape([c[-1] for c in cuts])

    def run(comm: Communicator) -> None:
        grid = numbered(comm, dims, cuts, order, layout="zyx"[3 - len(dims) :])
        mine = bounds(cuts, place_of(order[comm.rank], dims))
        assert (grid.dims, grid.shape) == (dims, whole.shape)
        assert grid.local_shape == tuple(b - a for a, b in mine)
        own = whole[tuple(slice(a, b) for a, b in mine)]
        np.testing.assert_array_equal(grid.take_local(whole), own)
        np.testing.assert_array_equal(grid.all_gather(own), whole)
        if own.size:
            assert grid.offsets == tuple(a for a, _ in mine)
            assert grid.coords == tuple(place_of(order[comm.rank], dims))

    spawn(run, len(order))


@pytest.mark.parametrize(("strategy", "order"), [("ddp", (5, 2, 0, 4, 1, 3)), ("fsdp", (0, 3, 1, 4, 2, 5))])
def test_training_is_the_same_in_any_order(strategy: str, order: tuple[int, ...]) -> None:
    """Also that of rows of x first, as PETSc and Veros number ranks."""
    dims, cuts = (2, 3), cuts_of((8, 12), (2, 3), 1).cuts
    u = np.random.default_rng(0).standard_normal((1, 8, 12, 2))
    net = nn.Sequential(nn.UNet(2, 2, 2, 4, 1, ("reflect", "circular")), nn.Dropout(0.2), nn.FNO(2, 2, (4, 4), 4, 1))

    def run(comm: Communicator, order: Sequence[int]) -> Any:
        grid = numbered(comm, dims, cuts, order)
        trainer = make_trainer(net, grid, loss=nn.RelativeL2(), clip_norm=0.1, strategy=strategy)
        mine = grid.take_local(u)
        return trainer.step(mine, mine), grid.all_gather(trainer.predict(mine[0]))

    want, *_ = spawn(run, 6, range(6))
    for found in spawn(run, 6, order):
        assert_close(found, want, 1e-13)


def test_dims_say_how_many_ranks_a_member_has() -> None:
    """Two fields over two ranks each, of which the first stands behind the other."""

    def run(comm: Communicator) -> tuple[int, tuple[int, ...]]:
        grid = fsdpx.Grid(comm, (3,), dims=(2,), offsets=(3 * (1 - comm.rank % 2),), layout="x")
        u = np.full(3, comm.rank)
        return grid.member, tuple(grid.all_gather(u).tolist())

    first, second = (0, (1, 1, 1, 0, 0, 0)), (1, (3, 3, 3, 2, 2, 2))
    assert spawn(run, 4) == [first, first, second, second]
