"""Traffic and lifetimes read off programs equal the formulas."""

import pytest
from cases import CHAIN, TIED, requests

from fsdpx.program import Request, Sizes, compile, lifetimes, peak, traffic

N = 4
ELEMENTS = (1000, 2001, 1500, 777)
OWN = tuple(n // N for n in ELEMENTS)
SIZES = Sizes(ELEMENTS, OWN, OWN, 4, 4, {"shard": N, "replica": 1})
WHOLE = sum(ELEMENTS)
MOVED = 4 * (WHOLE - sum(OWN))  # bytes of one all-gather or reduce-scatter of everything


@pytest.mark.parametrize("m", [1, 2, 3])
def test_zero2_moves_one_plus_m(m: int) -> None:
    moved = traffic(compile(requests("step", CHAIN, m, "zero2")), SIZES)
    assert moved["shard", "all_gather"].bytes == MOVED
    assert moved["shard", "reduce_scatter"].bytes == m * MOVED


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("ahead", [0, 1])
def test_fsdp_moves_three_m_less_what_paging_saves(m: int, ahead: int) -> None:
    """The last ahead + 1 pages of a forward stay for its backward, and the last of that for the next forward."""
    moved = traffic(compile(Request("step", CHAIN, m, ahead=ahead)), SIZES)
    page = [4 * (n - o) for n, o in zip(ELEMENTS, OWN, strict=True)]
    saved = m * sum(page[-(ahead + 1) :]) + (m - 1) * sum(page[: ahead + 1])
    assert moved["shard", "all_gather"].bytes == 2 * m * MOVED - saved
    assert moved["shard", "reduce_scatter"].bytes == m * MOVED


def test_kept_gradients_are_reduced_once() -> None:
    moved = traffic(compile(requests("step", CHAIN, 3, "kept-grads")), SIZES)
    assert moved["shard", "reduce_scatter"].bytes == MOVED


def test_ddp_moves_no_parameters() -> None:
    sizes = Sizes(ELEMENTS, ELEMENTS, OWN, 4, 4, {"shard": 1, "replica": N})
    moved = traffic(compile(requests("step", CHAIN, 3, "ddp")), sizes)
    assert list(moved) == [("replica", "all_reduce")]
    assert moved["replica", "all_reduce"].bytes == 2 * MOVED
    assert moved["replica", "all_reduce"].calls == 4


def test_hybrid_reduces_shards_over_replicas() -> None:
    half = tuple(o // 2 for o in OWN)
    sizes = Sizes(ELEMENTS, OWN, half, 4, 4, {"shard": N, "replica": 2})
    moved = traffic(compile(requests("step", CHAIN, 1, "fsdp")), sizes)
    assert moved["replica", "all_reduce"].bytes == 2 * 4 * (sum(OWN) - sum(half))


def test_a_tied_page_is_reduced_once_and_gathered_when_needed() -> None:
    program = compile(requests("step", TIED, 1, "fsdp"))
    words = str(program).split()
    assert words.count("REDUCE0") == 1
    assert words.index("REDUCE0") > words.index("B0.0")


def test_lifetimes_end_with_settle_and_free() -> None:
    program = compile(requests("step", CHAIN, 1, "fsdp"))
    lives = lifetimes(program)
    for life in lives:
        born, dies = program.actions[life.start], program.actions[life.stop]
        page = int(life.name[4:])
        if life.name.startswith("full"):
            assert (born.op, dies.op, born.unit, dies.unit) == ("GATHER", "FREE", page, page)
        else:
            assert (born.op, dies.op, dies.unit) == ("B", "SETTLE", page)
    nbytes = {f"{kind}{p}": 4 * n for kind in ("full", "grad") for p, n in enumerate(ELEMENTS)}
    most, split = peak(lives, nbytes)
    assert most == sum(split.values()) <= 2 * 2 * 4 * max(ELEMENTS)
