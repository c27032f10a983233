"""All checks of a contract of `fsdpx.testing` in one test per class, and one per dtype where several are tried.

pytest takes some milliseconds for each test, as much as most of these checks take, of which there are thousands.
"""

import inspect
from collections import defaultdict
from itertools import product
from typing import Any

import pytest

Cases = list[tuple[str, dict[str, Any]]]
"""Names of checks, and the arguments of each call."""


def is_contract(kind: object) -> bool:
    """Whether it is a class that inherits a contract."""
    return isinstance(kind, type) and any(base.__module__.startswith("fsdpx.testing.") for base in kind.__mro__)


def merge_checks(kind: type) -> type:
    """Return a subclass whose tests run all checks of the class; those that take fixtures stay tests of their own. The
    attribute `dtypes` limits what is tried with the class, such as a wrapper that does not look at elements."""
    body: dict[str, Any] = {}
    cases: dict[Any, Cases] = defaultdict(list)
    for name in filter(lambda name: name.startswith("test"), dir(kind)):
        for values in _list_cases(getattr(kind, name)) or ():
            body[name], dtype = None, values.get("dtype")  # None is not collected by pytest
            if dtype in (None, *getattr(kind, "dtypes", (dtype,))):
                cases[dtype].append((name, values))

    def test_contract(self: Any) -> None:
        _run(kind, self, plain)

    @pytest.mark.parametrize("dtype", list(filter(None, cases)))
    def test_contract_with(self: Any, dtype: str) -> None:
        _run(kind, self, cases[dtype])

    if plain := cases.get(None):
        body["test_contract"] = test_contract
    if any(cases):
        body["test_contract_with"] = test_contract_with
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **body})


def _list_cases(check: Any) -> list[dict[str, Any]] | None:
    """The arguments of each call of a check; None if it has other marks than `parametrize`, or takes fixtures."""
    wanted = {*inspect.signature(check).parameters} - {"self"}
    axes: list[list[dict[str, Any]]] = []
    for mark in getattr(check, "pytestmark", []):
        if mark.name != "parametrize":
            return None
        names, values = mark.args
        names = [names] if isinstance(names, str) else names
        axes.append([dict(zip(names, (value,) if len(names) == 1 else value, strict=True)) for value in values])
    cases = [{name: value for part in parts for name, value in part.items()} for parts in product(*axes)]
    return cases if all({*case} == wanted for case in cases) else None


def _run(kind: type, self: Any, cases: Cases) -> None:
    """Run all of them, also after one has failed."""
    failed: list[BaseException] = []
    for name, values in cases:
        try:
            getattr(kind, name)(self, **values)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"in {kind.__name__}.{name}({', '.join(f'{key}={value}' for key, value in values.items())})")
            failed.append(error)
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise BaseExceptionGroup(f"{len(failed)} of {len(cases)} checks failed", failed)
