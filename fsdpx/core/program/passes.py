"""Compiler passes. They expand actions of pipeline stages into actions of units (groups of layers), and insert the
all-gathers, gradient reductions and recomputation that units need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from fsdpx.core.program.pipeline import Stage, list_slots_of_verb_table_word
from fsdpx.core.program.verbs import VERBS, Action

__all__ = [
    "append_entries_to_prefetch",
    "expand_stages_to_units",
    "insert_gathers",
    "insert_recompute",
    "insert_reduces",
    "make_leftover_reduces",
    "order_sequentially",
]

Actions = list[Action]
T = TypeVar("T")


def order_sequentially(microbatches: int) -> tuple[Action, ...]:
    """Return the order of a step without pipeline parallelism: each microbatch runs forward and backward before the
    next one, all in stage 0."""
    return tuple(Action(op, 0, m) for m in range(microbatches) for op in "FB")


def expand_stages_to_units(order: Sequence[Action], stage: Stage, end: str | None) -> Actions:
    """Expand actions of pipeline stages into actions of their units (groups of layers), and insert the sends and
    receives between stages.

    The receives of an action are posted before the preceding action, so that the messages arrive while the preceding
    action runs. The outputs of a stage are sent as soon as they are computed.

    Parameters
    ----------
    order : actions F, E, B, I and W of this rank's stages; their `unit` is the index of the stage
    stage : the part of the model on this rank
    end : operation that ends the forward pass of each microbatch on the rank that computes the loss (LOSS or SCORE);
        None if there is none
    """
    units, steps = dict(stage.own_stages), [_ScheduleStep(action, stage) for action in order]
    loaded: set[int | None] = set()
    result: Actions = []
    for i, step in enumerate(steps):
        result += step.recvs if i == 0 or not step.can_receive_early(steps[i - 1]) else []
        result += steps[i + 1].recvs if i + 1 < len(steps) and steps[i + 1].can_receive_early(step) else []
        if step.forward and stage.used_inputs and step.mb not in loaded:
            loaded.add(step.mb)
            result.append(Action("LOAD", None, step.mb))
        result += step.before
        for u in units[step.stage] if step.forward else reversed(units[step.stage]):
            op = stage.get_unit_op_for_stage_op(step.op, u)
            result += [*([Action(op, u, step.mb)] if op else []), *step.after.get(u, [])]
        if step.forward and end and stage.has_loss and step.stage == stage.own_stages[-1][0]:
            result.append(Action(end, None, step.mb))
    return result


class _ScheduleStep:
    """One action of a pipeline stage and its messages: the received messages, the messages to send before the stage's
    units (groups of layers) run, and the messages to send after each unit."""

    def __init__(self, action: Action, stage: Stage) -> None:
        assert action.unit is not None
        self.op, self.stage, self.mb = action.op, action.unit, action.mb
        self.forward, self.after = action.op in "FE", dict[int, Actions]()
        own_edges = [e for e in stage.edges if e.gradient is not self.forward and action.op != "W"]
        own_edges = [e for e in own_edges if self.forward or e.value not in stage.constant]
        here = (stage.rank, self.stage)
        self.recvs = [Action("RECV", e.number, self.mb) for e in own_edges if (e.receiver, e.target) == here]
        self.before: Actions = []
        units = dict(stage.own_stages)[self.stage]
        for edge in [e for e in own_edges if (e.sender, e.source) == here]:
            # a forward action sends the outputs of its units; a backward action sends the gradients of its units'
            # inputs, starting from the last unit
            edge_units = [
                u for u in units if edge.value in (stage.units[u].gives if self.forward else stage.units[u].inputs)
            ]
            sends = self.after.setdefault(edge_units[0], []) if edge_units else self.before
            sends.append(Action("SEND", edge.number, self.mb))

    def can_receive_early(self, before: _ScheduleStep) -> bool:
        """Return whether the receives of this action can be posted before the preceding action, `before`. They cannot
        be posted early if this action is a backward pass and `before` works on the same microbatch, because the
        gradient would arrive in a buffer that `before` still uses."""
        return self.forward or before.mb != self.mb


def insert_recompute(actions: Actions, units: Collection[int]) -> Actions:
    """Insert activation recomputation for the units (groups of layers) whose IDs are in `units`. Replace their forward
    actions by C, which keeps only the inputs. Right before their backward actions, insert R, which repeats the forward
    pass."""
    result: Actions = []
    for action in actions:
        chosen = action.unit in units
        if chosen and action.op in ("B", "I"):
            result.append(Action("R", action.unit, action.mb))
        result.append(Action("C", action.unit, action.mb) if chosen and action.op == "F" else action)
    return result


def insert_gathers(actions: Actions, stage: Stage, ahead: int, keep: bool, resident: Iterable[int] = ()) -> Actions:
    """Insert the actions GATHER, which all-gathers the parameters of a page (flat buffer), and FREE, which frees the
    gathered parameters.

    While an action runs, the gathered pages are those that the action needs and the next `ahead` pages that later
    actions need. All other pages are freed, unless `keep` is true. This is Belady's rule with prefetch; it can be
    applied because all future uses are known. The pages in `resident` are gathered before the first action."""
    needs = [_list_pages_used_by_action("full", VERBS[a.op].reads, a, stage) for a in actions]
    have = dict.fromkeys(resident)
    result: Actions = []
    for i, action in enumerate(actions):
        if needs[i]:
            window = append_entries_to_prefetch(needs[i], needs[i + 1 :], ahead)
            if not keep:
                result += [Action("FREE", p) for p in have if p not in window]
                have = {p: None for p in have if p in window}
            result += [Action("GATHER", p) for p in window if p not in have]
            have |= dict.fromkeys(window)
        result.append(action)
    return result if keep else result + [Action("FREE", p) for p in have]


def _list_pages_used_by_action(kind: str, words: Iterable[str], action: Action, stage: Stage) -> list[int]:
    """Return the IDs of the pages (flat parameter buffers) whose slots (named buffers) of kind `kind` an action uses.
    `words` lists slots of the action in the notation of the table `VERBS`, such as "full:pages"."""
    slots = (
        slot
        for word in words
        if word.startswith(f"{kind}:")
        for slot in list_slots_of_verb_table_word(word, action, stage, 1)
    )
    return [slot.at for slot in slots if slot.at is not None]


def append_entries_to_prefetch(now: Iterable[T], later: Iterable[Iterable[T]], ahead: int) -> dict[T, None]:
    """Return the entries of `now`, followed by the first `ahead` distinct entries from the lists in `later` that are
    not in `now`. The result is a dict whose keys are these entries, in the order of their first use."""
    window = dict.fromkeys(now)
    capacity = len(window) + ahead
    for some in later:
        for action in some:
            if len(window) >= capacity:
                return window
            window[action] = None
    return window


def insert_reduces(actions: Actions, stage: Stage, each: bool, behind: int, join: bool) -> Actions:
    """Insert the reductions of gradients: REDUCE starts the reduce-scatter of a page (flat parameter buffer), and
    SETTLE waits for the reduce-scatter and adds its result.

    REDUCE follows the last action that adds to a page's gradient or, if `each` is true, the last such action of each
    microbatch. SETTLE follows later, under three conditions: at most `behind` reductions are pending at a time, no
    action adds to the same gradient before its SETTLE, and no reduction is pending when the program ends. If `join` is
    true, the last SETTLE of a page is followed by JOIN, which sums over replicas."""
    added = [_list_pages_used_by_action("grad", VERBS[a.op].adds, a, stage) for a in actions]
    rounds = [a.mb if each else None for a in actions]
    last = {(p, rounds[i]): i for i, pages in enumerate(added) for p in pages}
    complete = [[p for p in pages if last[p, rounds[i]] == i] for i, pages in enumerate(added)]
    result = _interleave_reduces(zip(([a] for a in actions), added, complete, strict=True), behind)
    settled = {a.unit: i for i, a in enumerate(result) if join and a.op == "SETTLE"}
    ends = {i: [Action("JOIN", p)] for p, i in settled.items()}
    return [x for i, a in enumerate(result) for x in (a, *ends.get(i, []))]


def make_leftover_reduces(pages: Sequence[int], behind: int) -> Actions:
    """Return the actions that reduce the gradients left unreduced by earlier programs. At most `behind` reductions are
    pending at a time."""
    return _interleave_reduces([([], [], [p]) for p in pages], behind)


def _interleave_reduces(steps: Iterable[tuple[Actions, Sequence[int], Sequence[int]]], behind: int) -> Actions:
    """Insert reductions of gradients into a list of actions. At most `behind` reductions are pending at a time.

    A page is a flat parameter buffer. Each of `steps` has three entries: actions, the pages whose gradients these
    actions add to, and the pages whose gradients are complete after these actions."""
    result: Actions = []
    pending: list[int] = []
    for actions, added, complete in steps:
        result += [Action("SETTLE", p) for p in pending if p in added]
        pending = [p for p in pending if p not in added] + list(complete)
        result += [*actions, *(Action("REDUCE", p) for p in complete)]
        over = max(len(pending) - behind, 0)
        result += [Action("SETTLE", p) for p in pending[:over]]
        pending = pending[over:]
    return result + [Action("SETTLE", p) for p in pending]
