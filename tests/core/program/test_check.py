"""Programs are checked before they run, slot by slot; their counts, and the golden ones."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from amount import examples
from cases import CHAIN, PLACEMENTS, STAGES, TIED, demand_refusals, everything, golden, kept, pipe, requests, twins
from hypothesis import given, settings
from hypothesis import strategies as st
from models import distributed
from present import needs

import fsdpx
from fsdpx import nn
from fsdpx.core.program.compiler import Program, ProgramRequest, compile
from fsdpx.core.program.pipeline import SPECIAL_WORDS, Stage, get_buffer_slots_of_action, make_stages
from fsdpx.core.program.traffic import SlotLifetime, TrafficSizes, count_traffic, find_lifetimes
from fsdpx.core.program.verbs import SLOTS, VERBS, Action, Slot, get_buffer_slot, parse_actions
from fsdpx.core.program.verifier import check
from fsdpx.errors import ProgramError

PROGRAMS = golden()


# two microbatches of a chain, and one where a stage has more to show
LEFT_OUT = [f"step-{s}-{p}-2" for s in ("skip", "frozen", "trunk") for p in PLACEMENTS]
LEFT_OUT += [f"step-chain-{p}-1" for p in PLACEMENTS]


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - LEFT_OUT))
def test_deleted_or_repeated_actions_are_rejected(name: str) -> None:
    demand_refusals(name, PROGRAMS[name], check)


def test_message_names_the_action_and_points_at_it() -> None:
    program = compile(requests("step", CHAIN, 1, "fsdp"))
    without = tuple(a for a in program.actions if str(a) != "GATHER2")
    with pytest.raises(ProgramError) as caught:
        check(replace(program, actions=without))
    text = str(caught.value)
    assert "F2.0, needs full2, which is empty" in text
    line, arrow = text.splitlines()[1:]
    assert line[arrow.index("^") :].startswith("F2.0")


def test_a_gradient_may_not_be_added_to_while_its_reduce_is_under_way() -> None:
    program = compile(requests("step", CHAIN, 2, "fsdp"))
    early = list(program.actions)
    settle = early.index(Action("SETTLE", 3))
    moved = early.pop(settle)
    again = next(i for i, a in enumerate(early) if str(a) == "B3.1")
    early.insert(again + 1, moved)
    with pytest.raises(ProgramError, match="needs the memory of grad3, where sum3 is still stored"):
        check(replace(program, actions=tuple(early)))


def test_different_collective_order_is_named() -> None:
    program = compile(requests("step", CHAIN, 1, "ddp"))
    check(program, program)
    other = list(program.actions)
    first, second = other.index(Action("GATHER", 0)), other.index(Action("GATHER", 1))
    other[first], other[second] = other[second], other[first]
    with pytest.raises(ProgramError, match="collective 0 is GATHER0 in program 0 but GATHER1 in program 1"):
        check(program, replace(program, actions=tuple(other)))


def test_parse_refuses_what_is_no_action() -> None:
    with pytest.raises(ProgramError, match="'f3' is no action"):
        parse_actions("F0.0 f3")


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    """Chains with skips, tied pages, frozen pages and units without parameters."""
    units = draw(st.integers(1, 6))
    pages, trainable, rows = 0, [], []
    for u in range(units):
        own = list(range(pages, pages + draw(st.integers(0, 2))))
        trainable += [draw(st.booleans()) for _ in own]
        tied = draw(st.sets(st.integers(0, pages - 1), max_size=1)) if pages else set()
        pages += len(own)
        skip = draw(st.sets(st.integers(1, u - 1), max_size=1)) if u > 1 else set()
        rows.append(((*own, *sorted(tied)), tuple(dict.fromkeys((u, *sorted(skip)))), (u + 1,)))
    return Stage.single_stage_from_units(rows, trainable, [0], [units])


@given(stages(), st.integers(1, 3), st.sampled_from(list(PLACEMENTS)), st.integers(0, 4))
@settings(max_examples=examples(150), derandomize=True, database=None, deadline=None)
def test_whatever_is_compiled_passes(stage: Stage, microbatches: int, placement: str, ahead: int) -> None:
    for kind in ("step", "accumulate", "local", "update", "evaluate", "predict", "forward", "backward"):
        check(compile(requests(kind, stage, microbatches, placement, ahead)))


@given(stages(), st.integers(1, 3), st.integers(0, 4))
@settings(max_examples=examples(100), derandomize=True, database=None, deadline=None)
def test_no_more_pages_are_resident_than_asked_for(stage: Stage, microbatches: int, ahead: int) -> None:
    program = compile(ProgramRequest("step", stage, microbatches, ahead=ahead))
    resident: set[int] = set()
    widest = max((len(u.pages) for u in stage.units), default=0)
    for action in program.actions:
        if action.op == "GATHER":
            resident.add(action.unit)
        elif action.op == "FREE":
            resident.discard(action.unit)
        assert len(resident) <= ahead + max(widest, 1)


@pytest.mark.parametrize("name", STAGES)
def test_programs_of_accumulation_follow_each_other(name: str) -> None:
    """What one program leaves is what the next one begins with."""
    stage = STAGES[name]
    for keep, each in PLACEMENTS.values():
        first = compile(ProgramRequest("accumulate", stage, 1, keep, each))
        check(first)

        def pages(slots: frozenset[Slot], kind: str) -> frozenset[int]:
            return frozenset(slot.at for slot in slots if slot.kind == kind and slot.at is not None)

        left = first.ends - {Slot("mean")}
        second = ProgramRequest(
            "step", stage, 1, keep, each, resident=pages(left, "full"), grads=pages(left, "grad"),
            parts=pages(left, "part"), has_loss_weight=True,
        )  # fmt: skip
        program = compile(second)
        assert program.begins == left
        check(program)


UNITS = [((0,), (0,), (1,)), ((1, 2), (1,), (2,)), ((3,), (2,), (3,))], [True, False, True, True], [0], [3]
"""Three units, of which the second one has a page that is not trained."""
STAGE = Stage.single_stage_from_units(*UNITS, units_with_statistics=[1], pages_with_codec_memory=[1, 2])


def texts(slots: tuple[Slot, ...]) -> list[str]:
    return [str(slot) for slot in slots]


def test_slots_print_as_kind_number_and_microbatch() -> None:
    slots = Slot("full", 3), Slot("act", 5, 0), Slot("seed", None, 0), Slot("mean")
    assert texts(slots) == ["full3", "act5.0", "seed.0", "mean"]


def test_buffers_keep_number_and_microbatch() -> None:
    assert get_buffer_slot(Slot("sum", 3)) == Slot("grad", 3)
    assert get_buffer_slot(Slot("tied", 0)) == Slot("part", 0)
    assert get_buffer_slot(Slot("act", 5, 1)) == Slot("act", 5, 1)
    assert all(SLOTS[kind.buffer].buffer == kind.buffer for kind in SLOTS.values())
    assert all(SLOTS[kind.buffer].in_slab == kind.in_slab for kind in SLOTS.values())


def test_every_kind_of_the_table_is_a_kind_of_slot() -> None:
    words = {word for verb in VERBS.values() for word in (*verb.takes, *verb.reads, *verb.adds, *verb.gives)}
    assert {word.partition(":")[0] for word in words} - set(SPECIAL_WORDS) <= set(SLOTS)
    assert {scratch.kind for verb in VERBS.values() for scratch in verb.scratch} <= set(SLOTS)


def test_a_forward_moves_statistics_and_a_backward_reads_them() -> None:
    forward, backward = (get_buffer_slots_of_action(Action(op, 1, 0), STAGE, 1) for op in "FB")
    assert texts(forward.gives) == ["act2.0", "saved1.0"]
    assert texts(forward.adds) == ["stats1"]
    assert texts(backward.reads) == ["full1", "full2", "stats1"]
    assert texts(backward.adds) == ["grad2", "dact1.0"]
    assert get_buffer_slots_of_action(Action("F", 0, 0), STAGE, 1).adds == ()
    assert texts(get_buffer_slots_of_action(Action("E", 1, 0), STAGE, 1).reads) == ["full1", "full2", "stats1"]


def test_a_reduce_touches_the_part_and_the_memory_of_its_codec() -> None:
    assert texts(get_buffer_slots_of_action(Action("REDUCE", 2), STAGE, 1).adds) == ["part2", "memory2"]
    assert texts(get_buffer_slots_of_action(Action("REDUCE", 0), STAGE, 1).adds) == ["part0"]
    assert texts(get_buffer_slots_of_action(Action("UPDATE", 2), STAGE, 1).adds) == ["shard2", "slots2"]


@pytest.mark.parametrize("kind", ["step", "local", "update", "predict", "backward"])
def test_what_lasts_is_there_before_and_after(kind: str) -> None:
    given = {"grads": frozenset({0, 2, 3}), "has_loss_weight": True} if kind == "update" else {}
    program = compile(ProgramRequest(kind, STAGE, **given))
    check(program)
    lasting = {"shard0", "shard1", "shard2", "shard3", "slots0", "slots2", "slots3", "memory2", "stats1"}
    assert lasting <= set(texts(tuple(program.begins)))
    assert lasting <= set(texts(tuple(program.ends)))


def test_each_rank_of_a_pipe_has_what_lasts_of_its_own_units() -> None:
    stages = make_stages(*UNITS, [0, 0, 1], (0, 1), units_with_statistics=[1], pages_with_codec_memory=[0, 3])
    begins = [compile(ProgramRequest("predict", stage)).begins for stage in stages]
    found = [{str(slot) for slot in slots if slot.kind in ("memory", "stats")} for slots in begins]
    assert found == [{"memory0", "stats1"}, {"memory3"}]


@pytest.mark.parametrize("kind", ["accumulate", "local", "evaluate", "predict", "forward", "backward"])
def test_only_a_step_is_committed(kind: str) -> None:
    program = compile(ProgramRequest(kind, STAGE, scales=("SCALE", "COMMIT")))
    check(program)
    assert "COMMIT" not in str(program)


def test_a_program_that_all_ranks_commit_says_so() -> None:
    program = compile(ProgramRequest("step", STAGE, scales=("SCALE", "COMMIT")))
    assert texts(program.results) == ["mean", "scale", "agreed"]
    check(program)
    hasty = replace(program, actions=tuple(a for a in program.actions if a.op != "COMMIT"))
    with pytest.raises(ProgramError, match="ends without agreed"):
        check(hasty)


N = 4
ELEMENTS = (1000, 2001, 1500, 777)
OWN = tuple(n // N for n in ELEMENTS)
SIZES = TrafficSizes(ELEMENTS, OWN, OWN, 4, 4, {"shard": N, "replica": 1})
WHOLE = sum(ELEMENTS)
MOVED = 4 * (WHOLE - sum(OWN))  # bytes of one all-gather or reduce-scatter of everything


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("ahead", [0, 1])
def test_fsdp_moves_three_m_less_what_paging_saves(m: int, ahead: int) -> None:
    """The last ahead + 1 pages of a forward stay for its backward, and the last of that for the next forward."""
    moved = count_traffic(compile(ProgramRequest("step", CHAIN, m, ahead=ahead)), SIZES)
    page = [4 * (n - o) for n, o in zip(ELEMENTS, OWN, strict=True)]
    saved = m * sum(page[-(ahead + 1) :]) + (m - 1) * sum(page[: ahead + 1])
    assert moved["shard", "all_gather"].bytes == 2 * m * MOVED - saved
    assert moved["shard", "reduce_scatter"].bytes == m * MOVED


def test_each_move_has_the_bytes_of_its_format() -> None:
    """Parameters in 2 bytes, gradients in 4, those that TIE sums in 8; messages as they are."""
    ties = {0: (("peers", "all_gather", 50),)}
    edges = {(edge.number, 0): 100 + edge.number for edge in twins(range(4))[0].edges}
    widths, amounts = {"shard": 3, "replica": 3}, {"edge": edges}
    sizes = TrafficSizes([90] * 5, [30] * 5, [10] * 5, 2, 4, widths, ties=ties, tie_itemsize=8, amounts=amounts)
    first = pipe("1f1b", 1, "hybrid")[0]
    moved = {key: (found.calls, found.bytes) for key, found in count_traffic(first, sizes).items()}
    sends, recvs = ([a.unit for a in first.actions if a.op == op] for op in ("SEND", "RECV"))
    assert moved == {
        ("shard", "all_gather"): (1, 60 * 2),
        ("shard", "reduce_scatter"): (1, 60 * 4),
        ("replica", "all_reduce"): (1, 2 * 20 * 4),
        ("peers", "all_gather"): (1, 50 * 8),
        ("pipe", "send"): (1, 100 + sends[0]),
        ("pipe", "recv"): (1, 100 + recvs[0]),
    }


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


def buffers(program: Program, *kinds: str) -> list[SlotLifetime]:
    return [life for life in find_lifetimes(program) if life.slot.kind in kinds]


def ends(program: Program, kind: str) -> list[tuple[str, str]]:
    """First and last action of each life of a kind of buffer."""
    return [(str(program.actions[x.start]), str(program.actions[x.stop])) for x in buffers(program, kind)]


def test_scratch_lives_until_its_slot_is_read_or_taken() -> None:
    program = compile(requests("step", CHAIN, 2, "hybrid"))
    assert {life.slot.kind for life in find_lifetimes(program)} == {"full", "grad", "wire", "carry", "trade", "join"}
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


FOLDER = Path(__file__).parents[2] / "golden"
GOLDEN = everything()


@pytest.mark.parametrize("name", GOLDEN)
def test_program_text_is_the_golden_one(name: str) -> None:
    program = GOLDEN[name]
    check(program)
    assert kept(program) == (FOLDER / f"{name}.txt").read_text(), "run `make replay` and look at the difference"
    assert parse_actions(str(program)) == program.actions


@needs("asynchronous", "offload")
def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(GOLDEN)


@needs("asynchronous", "offload")
def test_every_verb_is_in_some_golden_file() -> None:
    there = {action.op for path in FOLDER.glob("*.txt") for action in parse_actions(path.read_text())}
    assert there == set(VERBS)


def test_no_program_joins_gradients_of_one_replica() -> None:
    """A part is the whole gradient then: nothing renames it, and all who need a gradient read the part."""
    for stage, kind in product(STAGES.values(), ("step", "update")):
        for placement in PLACEMENTS:
            program = compile(requests(kind, stage, 2, placement))
            check(program)
            joins = {a.unit for a in program.actions if a.op == "JOIN"}
            assert joins == (set(stage.trained_pages) if placement == "ddp" else set())


@pytest.mark.parametrize(("strategy", "ranks", "joins"), [("fsdp", 2, False), ("ddp", 1, False), ("ddp", 2, True)])
def test_a_trainer_joins_where_there_are_several_replicas(strategy: str, ranks: int, joins: bool) -> None:
    programs = fsdpx.spawn(lambda comm: distributed(nn.Linear(3, 2), comm, strategy=strategy).program, ranks)
    assert ["JOIN" in str(program) for program in programs] == [joins] * ranks
