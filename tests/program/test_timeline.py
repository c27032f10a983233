"""The one walker behind simulated times and proofs that ranks come to their end."""

from fsdpx.program import Action, Event
from fsdpx.program.machine import Stuck, Task, walk


def task(name: str, *waits: str, seconds: float = 1.0, way: float = 0.0, lane: str = "", until: str = "") -> Task:
    """A task that completes the key of its name."""
    keys = tuple((key, way) for key in waits)
    return Task(Action(name), name, keys, seconds, lane or None, until or None)


def spans(rows: list[list[Event]]) -> list[list[tuple[float, float]]]:
    return [[(event.start, event.end) for event in row] for row in rows]


def test_a_rank_does_one_task_after_the_other() -> None:
    events, stuck = walk([[task("A"), task("B", seconds=2)], [task("C")]])
    assert events[0] == [Event(0, Action("A"), 0, 1), Event(0, Action("B"), 1, 3)]
    assert spans(events) == [[(0, 1), (1, 3)], [(0, 1)]]
    assert stuck == []


def test_what_comes_from_elsewhere_takes_its_way() -> None:
    events, _ = walk([[task("A", "B", way=0.5)], [task("B", seconds=2)]])
    assert spans(events) == [[(2.5, 3.5)], [(0, 2)]]


def test_tasks_on_a_lane_run_beside_the_rank_one_at_a_time() -> None:
    row = [task("A", lane="x"), task("B", lane="x"), task("C", seconds=5), task("D", lane="y"), task("E", "B")]
    events, _ = walk([row])
    assert spans(events) == [[(0, 1), (1, 2), (0, 5), (5, 6), (5, 6)]]


def test_a_key_of_several_tasks_is_complete_with_the_last() -> None:
    def meet(rank: int) -> Task:
        return Task(Action("M", rank), "met", lane=rank, until="met")

    events, stuck = walk([[task("A", seconds=3), meet(0)], [meet(1), task("B"), task("C", "met")]])
    assert spans(events) == [[(0, 3), (3, 3)], [(0, 3), (0, 1), (3, 4)]]
    assert stuck == []


def test_a_task_may_end_with_another() -> None:
    events, _ = walk([[task("A", lane="x", seconds=0, until="B"), task("C", "B")], [task("B", seconds=4)]])
    assert spans(events) == [[(0, 4), (4, 5)], [(0, 4)]]


def test_who_waits_for_whom() -> None:
    events, stuck = walk([[task("A"), task("B", "A", "D")], [task("C", "B"), task("D")], [task("E", "nobody")]])
    assert spans(events) == [[(0, 1)], [], []]
    assert stuck == [Stuck(0, 1, ("D",), (1,)), Stuck(1, 0, ("B",), (0,)), Stuck(2, 0, ("nobody",), ())]
