"""Passes: each turns one list of actions into a longer one.

compute_*  the bare order of forwards and backwards;
page       parameters as pages: GATHER before use, at most `ahead` pages early, FREE after;
reduce     REDUCE over shards once a page's gradients are complete, SETTLE where memory or order wants the end of it,
           JOIN over replicas after the last one.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from fsdpx.program.action import Action
from fsdpx.program.stage import Stage, expand
from fsdpx.program.verbs import VERBS

__all__ = ["compute_backward", "compute_forward", "compute_step", "page", "reduce", "reduce_carried"]

Actions = list[Action]


def compute_step(stage: Stage, microbatches: int) -> Actions:
    """Microbatches one after the other: all forwards, the loss, all backwards."""
    units = range(len(stage.units))
    actions: Actions = []
    for m in range(microbatches):
        actions += [Action("LOAD", None, m), *(Action("F", u, m) for u in units), Action("LOSS", None, m)]
        actions += [Action("B", u, m) for u in reversed(units)]
    return actions


def compute_forward(stage: Stage, microbatches: int, verb: str, end: str | None) -> Actions:
    """Forwards only, with F (keeps what backward needs) or E (keeps nothing), each microbatch closed by `end`."""
    actions: Actions = []
    for m in range(microbatches):
        actions += [Action("LOAD", None, m), *(Action(verb, u, m) for u in range(len(stage.units)))]
        actions += [Action(end, None, m)] if end else []
    return actions


def compute_backward(stage: Stage, microbatches: int) -> Actions:
    """Backwards of forwards that were run before, from gradients that the caller brings."""
    actions: Actions = []
    for m in range(microbatches):
        actions += [Action("SEED", None, m), *(Action("B", u, m) for u in reversed(range(len(stage.units))))]
    return actions


def page(actions: Actions, stage: Stage, ahead: int, keep: bool, resident: Iterable[int] = ()) -> Actions:
    """Insert GATHER and FREE. The future is known, so what is resident before an action is exactly what that action
    needs and the next `ahead` pages (Belady's rule with prefetch). With `keep` nothing is freed.
    """
    needs = [_pages(a, stage) for a in actions]
    have = dict.fromkeys(resident)
    result: Actions = []
    for i, action in enumerate(actions):
        if needs[i]:
            window = _window(needs, i, ahead)
            if not keep:
                result += [Action("FREE", p) for p in have if p not in window]
                have = {p: None for p in have if p in window}
            result += [Action("GATHER", p) for p in window if p not in have]
            have |= dict.fromkeys(window)
        result.append(action)
    return result if keep else result + [Action("FREE", p) for p in have]


def _pages(action: Action, stage: Stage) -> tuple[int, ...]:
    """Pages whose full parameters an action reads."""
    return stage.units[action.unit].pages if "full:pages" in VERBS[action.op].reads and action.unit is not None else ()


def _window(needs: Sequence[tuple[int, ...]], start: int, ahead: int) -> dict[int, None]:
    """What action `start` needs, and the next `ahead` distinct pages in order of first use."""
    window = dict.fromkeys(needs[start])
    capacity = len(window) + ahead
    for pages in needs[start + 1 :]:
        for p in pages:
            if len(window) >= capacity:
                return window
            window[p] = None
    return window


def reduce(actions: Actions, stage: Stage, each: bool, behind: int, join: bool) -> Actions:
    """Insert REDUCE after the last action that adds into a page's gradient (with `each`: the last of every microbatch)
    and SETTLE at most `behind` reduces of other pages later, before anyone adds into that page again, and at the end.
    With `join` the last SETTLE of a page is followed by its JOIN.
    """
    adders = [[int(s[4:]) for s in expand(a, stage, 1).adds if s.startswith("grad")] for a in actions]
    last = {(p, a.mb if each else None): i for i, a in enumerate(actions) for p in adders[i]}
    rest = Counter(p for p, _ in last)  # reduces of each page still to be settled
    result: Actions = []
    flying: list[int] = []

    def settle(p: int) -> None:
        flying.remove(p)
        rest[p] -= 1
        result.append(Action("SETTLE", p))
        if join and rest[p] == 0:
            result.append(Action("JOIN", p))

    for i, action in enumerate(actions):
        for p in [p for p in flying if p in adders[i]]:
            settle(p)
        result.append(action)
        for p in adders[i]:
            if last[p, action.mb if each else None] == i:
                result.append(Action("REDUCE", p))
                flying.append(p)
        while len(flying) > behind:
            settle(flying[0])
    while flying:
        settle(flying[0])
    return result


def reduce_carried(pages: Sequence[int], behind: int) -> Actions:
    """Reduce gradients that earlier programs left, at most `behind` + 1 at a time."""
    result: Actions = []
    for i, p in enumerate(pages):
        result.append(Action("REDUCE", p))
        if i >= behind:
            result.append(Action("SETTLE", pages[i - behind]))
    return result + [Action("SETTLE", p) for p in pages[max(len(pages) - behind, 0) :]]
