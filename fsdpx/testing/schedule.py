"""`ScheduleContract`, a base class with tests that every pipeline schedule must pass."""

from collections.abc import Iterator
from pathlib import Path

from fsdpx.core.program import (
    PipelineSchedule,
    ProgramRequest,
    ScheduleFunction,
    StageCosts,
    check,
    compile,
    count_in_flight,
    make_schedule,
    make_stages,
    require_pipeline_programs_finish,
    simulate,
    validate,
)
from fsdpx.testing.threads import run_interleaved

__all__ = ["ScheduleContract"]


class ScheduleContract:
    """Tests for a pipeline schedule. Inherit from this class, define `make`, and run the tests with pytest:

        class TestMine(ScheduleContract):
            def make(self): return mine
            def max_in_flight(self, ranks, microbatches, rank): return ranks - rank

    Every test runs with all combinations of `ranks` and `microbatches`."""

    ranks: tuple[int, ...] = (1, 2, 3, 4, 7)
    """Numbers of pipeline ranks to test."""
    microbatches: tuple[int, ...] = (1, 2, 3, 4, 9)
    """Numbers of microbatches per step to test."""
    per_rank: int | None = None
    """Number of stages per rank. If None, use the schedule's default."""

    def make(self) -> str | Path | ScheduleFunction:
        """Return the schedule to test: a function, a name or a path that `distribute(schedule=)` accepts. Must be
        overridden."""
        raise TypeError(f"{type(self).__name__} must define make(), which returns the schedule to be tested")

    def max_in_flight(self, ranks: int, microbatches: int, rank: int) -> int | None:
        """Return the maximum number of (stage, microbatch) pairs whose activations a rank may hold at the same time.
        Return None if there is no limit.

        Parameters
        ----------
        ranks : number of pipeline ranks
        microbatches : number of microbatches per step
        rank : pipeline rank, counted from 0
        """
        return None

    def test_schedule_is_valid_at_every_size(self) -> None:
        """Check that `fsdpx.core.program.validate` accepts the schedule."""
        for made in self._iterate_schedules():
            validate(made)

    def test_repeated_calls_give_same_schedule(self) -> None:
        """Check that two calls of the schedule function give equal schedules. This is necessary because each rank calls
        the function itself."""
        for made, repeated in zip(self._iterate_schedules(), self._iterate_schedules(), strict=True):
            assert made == repeated

    def test_thread_ranks_may_share_one_instance(self) -> None:
        given, wanted = self.make(), make_schedule(self.make(), 2, 3, self.per_rank)
        for made in run_interleaved(*[lambda: make_schedule(given, 2, 3, self.per_rank)] * 2):
            assert made == wanted

    def test_every_microbatch_goes_forward_and_backward_through_every_stage(self) -> None:
        for made in self._iterate_schedules():
            actions = [(a.op, a.unit, a.mb) for row in made.ranks for a in row]
            for stage in range(made.stages):
                for mb in range(made.microbatches):
                    done = sorted(op for op, *at in actions if at == [stage, mb])
                    assert done in (["B", "F"], ["F", "I", "W"]), f"{made.name}: stage {stage}, microbatch {mb}: {done}"

    def test_gradients_are_added_in_the_order_of_microbatches(self) -> None:
        """Check that gradients are added in microbatch order. Otherwise, the results of different schedules would not
        be bit-identical."""
        for made in self._iterate_schedules():
            for row in made.ranks:
                for stage in {a.unit for a in row}:
                    order = [a.mb for a in row if a.unit == stage and a.op in ("B", "W")]
                    assert order == list(range(made.microbatches)), f"{made.name}: stage {stage} adds {order}"

    def test_no_rank_waits_forever(self) -> None:
        """Check that a step takes at most the sum of the costs of all its forward passes, backward passes and messages,
        for several choices of these costs. A step meets this limit if, at every moment, a rank computes or a message is
        in flight."""
        for made in self._iterate_schedules():
            for costs in (StageCosts(1, 1, 1), StageCosts(3, 1, 1, 0.5), StageCosts(1, 5, 2), StageCosts(1, 0, 4, 2)):
                work = sum(costs.cost_of(action) for row in made.ranks for action in row)
                messages = costs.communication * sum(len(row) for row in made.ranks)
                assert max(event.end for event in simulate(made, costs)) <= work + messages

    def test_compiled_programs_complete(self) -> None:
        """Check that the compiled programs of all ranks, including messages, gathers and reductions, run to completion.
        The model has one unit per stage. The last stage also reads the output of the first stage, which skips the
        stages in between."""
        for made in self._iterate_schedules():
            n = made.stages
            units = [((u,), (u, 1) if u == n - 1 > 1 else (u,), (u + 1,)) for u in range(n)]
            stages = make_stages(units, [True] * n, [0], [n], range(n), made.home)
            programs = [
                compile(ProgramRequest("step", stage, made.microbatches, order=row))
                for stage, row in zip(stages, made.ranks, strict=True)
            ]
            require_pipeline_programs_finish(programs)
            for program in programs:
                check(program)

    def test_activations_in_flight_stay_in_bounds(self) -> None:
        for made in self._iterate_schedules():
            for rank, most in enumerate(count_in_flight(made)):
                bound = self.max_in_flight(len(made.ranks), made.microbatches, rank)
                assert bound is None or most <= bound, f"{made.name}: {most} in flight on rank {rank}, not {bound}"

    def _iterate_schedules(self) -> Iterator[PipelineSchedule]:
        for ranks in self.ranks:
            for microbatches in self.microbatches:
                yield make_schedule(self.make(), ranks, microbatches, self.per_rank)
