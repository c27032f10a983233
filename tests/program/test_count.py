"""Traffic and lifetimes read off programs equal the formulas."""

import pytest
from cases import CHAIN, TIED, pipe, requests, twins

from fsdpx.program import Lifetime, Program, Request, Sizes, compile, lifetimes, traffic

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


def test_each_move_has_the_bytes_of_its_format() -> None:
    """Parameters in 2 bytes, gradients in 4, those that TIE sums in 8; messages as they are."""
    ties = {0: (("peers", "all_gather", 50),)}
    edges = {(edge.number, 0): 100 + edge.number for edge in twins(range(4))[0].edges}
    sizes = Sizes(
        [90] * 5, [30] * 5, [10] * 5, 2, 4, {"shard": 3, "replica": 3}, ties=ties, tie_itemsize=8, edges=edges
    )
    first = pipe("1f1b", 1)[0]
    moved = {key: (found.calls, found.bytes) for key, found in traffic(first, sizes).items()}
    sends, recvs = ([a.unit for a in first.actions if a.op == op] for op in ("SEND", "RECV"))
    assert moved == {
        ("shard", "all_gather"): (1, 60 * 2),
        ("shard", "reduce_scatter"): (1, 60 * 4),
        ("replica", "all_reduce"): (1, 2 * 20 * 4),
        ("peers", "all_gather"): (1, 50 * 8),
        ("pipe", "send"): (1, 100 + sends[0]),
        ("pipe", "recv"): (1, 100 + recvs[0]),
    }


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
    lives = buffers(program, "full", "grad")
    assert [life.slot.kind for life in lives].count("grad") == len(ELEMENTS)
    for life in lives:
        born, dies, page = program.actions[life.start], program.actions[life.stop], life.slot.at
        if life.slot.kind == "full":
            assert (born.op, dies.op, born.unit, dies.unit) == ("GATHER", "FREE", page, page)
        else:
            assert (born.op, dies.op, dies.unit) == ("B", "SETTLE", page)
    for at in range(len(program.actions)):
        alive = [life.slot.kind for life in lives if life.start <= at <= life.stop]
        assert alive.count("full") <= 2
        assert alive.count("grad") <= 2


def buffers(program: Program, *kinds: str) -> list[Lifetime]:
    return [life for life in lifetimes(program) if life.slot.kind in kinds]


def ends(program: Program, kind: str) -> list[tuple[str, str]]:
    """First and last action of each life of a kind of buffer."""
    return [(str(program.actions[x.start]), str(program.actions[x.stop])) for x in buffers(program, kind)]


def test_scratch_lives_until_its_slot_is_read_or_taken() -> None:
    program = compile(requests("step", CHAIN, 2, "fsdp"))
    assert {life.slot.kind for life in lifetimes(program)} == {"full", "grad", "wire", "carry", "trade", "join"}
    assert ends(program, "wire")[:3] == [("GATHER0", "F0.0"), ("GATHER1", "F1.0"), ("GATHER2", "F2.0")]
    assert ends(program, "carry") == [(f"REDUCE{p}", f"SETTLE{p}") for p in (3, 2, 1, 0, 3, 2, 1, 0)]
    assert ends(program, "join") == [(f"JOIN{p}", f"JOIN{p}") for p in (3, 2, 1, 0)]
    # SETTLE and the next REDUCE add into the part: only JOIN takes it
    assert ends(program, "trade") == [(f"REDUCE{p}", f"JOIN{p}") for p in (3, 2, 1, 0, 3, 2, 1, 0)]


def test_scratch_that_nobody_ends_lives_to_the_last_action() -> None:
    program = compile(requests("accumulate", CHAIN, 1, "fsdp"))
    assert ends(program, "trade") == [(f"REDUCE{p}", str(program.actions[-1])) for p in (3, 2, 1, 0)]


def test_what_another_program_fills_or_empties_is_not_lent() -> None:
    assert ends(compile(requests("local", CHAIN, 1, "ddp")), "grad") == []
    assert ends(compile(requests("update", CHAIN, 1, "ddp")), "grad") == []
    assert ends(compile(requests("predict", CHAIN, 1, "ddp")), "full") == []
