"""Passes: each turns one list of actions into a longer one.

compute_*  the bare order of forwards and backwards;
page       parameters as pages: GATHER before use, FREE after, at most `ahead + 1` pages ahead of time;
reduce     REDUCE once a page's gradients are complete, SETTLE where memory or order wants the end of it.
"""

from collections.abc import Iterable, Sequence

from fsdpx.program.action import Action
from fsdpx.program.stage import Stage, expand
from fsdpx.program.verbs import VERBS

__all__ = ["compute_backward", "compute_forward", "compute_step", "page", "reduce"]

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
    and the next ones need, `ahead + 1` pages in all (Belady's rule with prefetch). With `keep` nothing is freed.
    """
    needs = [_pages(a, stage) for a in actions]
    have = dict.fromkeys(resident)
    result: Actions = []
    for i, action in enumerate(actions):
        if needs[i]:
            window = _window(needs, i, ahead + 1)
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


def _window(needs: Sequence[tuple[int, ...]], start: int, capacity: int) -> dict[int, None]:
    """The next `capacity` distinct pages in order of first use; all that action `start` itself needs."""
    window = dict.fromkeys(needs[start])
    for pages in needs[start + 1 :]:
        for p in pages:
            if len(window) >= capacity:
                return window
            window[p] = None
    return window


def reduce(actions: Actions, stage: Stage, each: bool, behind: int) -> Actions:
    """Insert REDUCE after the last action that adds into a page's gradient (with `each`: the last of every microbatch)
    and SETTLE at most `behind` actions of other pages later, before anyone adds into that page again, and at the end.
    """
    adders = [[int(s[4:]) for s in expand(a, stage, 1).adds if s.startswith("grad")] for a in actions]
    last = {(p, a.mb if each else None): i for i, a in enumerate(actions) for p in adders[i]}
    result: Actions = []
    flying: list[int] = []
    for i, action in enumerate(actions):
        for p in [p for p in flying if p in adders[i]]:
            flying.remove(p)
            result.append(Action("SETTLE", p))
        result.append(action)
        done = [p for p in adders[i] if last[p, action.mb if each else None] == i]
        result += [Action("REDUCE", p) for p in done]
        flying += done
        while each and len(flying) > behind:
            result.append(Action("SETTLE", flying.pop(0)))
    return result + [Action("SETTLE", p) for p in flying]
