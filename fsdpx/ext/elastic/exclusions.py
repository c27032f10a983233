"""Options that cannot be combined with elastic training. For each of these options, the error message gives the reason
and an alternative."""

from __future__ import annotations

from fsdpx.core.state.sync_policy import SYNCHRONOUS
from fsdpx.core.trainer.option_rules import EXCLUSIONS, ExcludedPair, make_condition_finder

__all__ = ["ELASTIC"]

ELASTIC = "elastic training"

EXCLUSIONS += (
    ExcludedPair(ELASTIC, "`backend`", lambda c:
        "" if c.get_option("backend") in (None, "mpi") else f"backend={c.get_option('backend')!r}: ",
        "elastic ranks use MPI messages only", "leave backend out"),
    ExcludedPair(ELASTIC, "`offload`",
        make_condition_finder("offload: ", lambda c: c.get_option("offload") is not None),
        "elastic ranks keep copies of each other's state in memory", "leave elastic out"),
    ExcludedPair(ELASTIC, "`trace`", make_condition_finder("trace: ", lambda c: c.get_option("trace") is not None),
        "elastic ranks come and go, but a trace needs fixed ranks", "leave trace or elastic out"),
    ExcludedPair(ELASTIC, "`replay`", make_condition_finder("replay: ", lambda c: bool(c.get_option("replay"))),
        "elastic ranks come and go, but recorded steps need fixed buffers", "leave replay or elastic out"),
    ExcludedPair(ELASTIC, "`domain`", make_condition_finder("domain: ", lambda c: c.get_option("domain") is not None),
        "the solver decides which rank has which part of a field, so the ranks cannot change", "leave elastic out"),
    ExcludedPair(ELASTIC, "local or asynchronous training", lambda c:
        "" if c.sync_choice is SYNCHRONOUS else f"strategy={c.get_option('strategy')!r}: ",
        "elastic ranks take every step together", "leave elastic out, or choose 'hybrid'"),
)  # fmt: skip
