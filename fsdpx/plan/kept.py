"""Searches that were made before, in the cache of the user: the same question is answered at once."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from fsdpx import environment, files
from fsdpx.native.image import digest_of, seal, unsealed
from fsdpx.plan.found import Plan

__all__ = ["kept"]

OURS = ("fsdpx", "numpy", "builtins", "copyreg", "collections", "functools", "pathlib", "_codecs")
"""Modules whose code is known by the version of fsdpx and NumPy; code of all others may change between two searches."""


class _PlanPickler(pickle.Pickler):
    """Writes all but the model, which is given again where it is read."""

    def __init__(self, file: Any, model: Any = None) -> None:
        super().__init__(file, 5)
        self._model = model

    def persistent_id(self, value: Any) -> str | None:
        return "model" if self._model is not None and value is self._model else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__.partition(".")[0] not in OURS:
            raise pickle.PicklingError(f"{value} is code of others")
        return NotImplemented


class _PlanUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, model: Any) -> None:
        super().__init__(io.BytesIO(content))
        self._model = model

    def persistent_load(self, name: str) -> Any:
        return self._model


class _Digesting:
    def __init__(self) -> None:
        self.digest = hashlib.blake2b(_sources().encode(), digest_size=16)

    def write(self, data: Any) -> None:
        self.digest.update(data)


@functools.cache
def _sources() -> str:
    """What tells this version of fsdpx from others: all of it, since every layer and every pass counts."""
    return np.__version__ + digest_of(sorted(Path(__file__).parents[1].rglob("*.py")))


def kept(model: Any, question: tuple[Any, ...], find: Callable[[], Plan], say: Callable[[str], None] | None) -> Plan:
    """What `find` gives, or gave when the same was asked: of the same model, question and version of fsdpx.

    It is kept in `FSDPX_CACHE/plan`. A damaged file, or one that another user could have written, is passed over with a
    warning. Where layers or options are made by code outside of fsdpx, nothing is kept."""
    asked, content = _Digesting(), io.BytesIO()
    try:
        _PlanPickler(asked).dump((model, question))
    except (pickle.PicklingError, TypeError, AttributeError):
        return find()
    file = environment.read().cache / "plan" / f"{asked.digest.hexdigest()}.plan"
    before = unsealed(file)
    if before is not None:
        found: Plan = _PlanUnpickler(zlib.decompress(before), model).load()
        if say is not None:
            say(f"found before, {file}")
        return found
    found = find()
    with suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
        _PlanPickler(content, model).dump(found)
        files.folder(file.parent, private=False)
        seal(file, zlib.compress(content.getvalue(), 1))
    return found
