"""Tests that every one of a few ranks runs, each in a thread."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import fsdpx


def on_ranks(size: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test runs on `size` ranks; its first argument is the communicator of each. options: of `fsdpx.spawn`."""

    def declare(test: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            fsdpx.spawn(functools.partial(test, **arguments), size, **options)

        functools.update_wrapper(run, test)
        own = inspect.signature(test)
        run.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])  # type: ignore[attr-defined]
        return run

    return declare
