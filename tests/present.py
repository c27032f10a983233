"""Which extensions are there: a test that needs one which is not is skipped by its name."""

from importlib.util import find_spec
from pathlib import Path

import pytest

__all__ = ["ABSENT", "extension_of", "is_present", "needs"]

ABSENT = "the extension {} is not there"


def is_present(name: str) -> bool:
    """name: of a folder in `fsdpx/ext/`, or of one in `fsdpx/` itself, such as "plan"."""
    found = find_spec(f"fsdpx.ext.{name}") or find_spec(f"fsdpx.{name}")
    return found is not None and found.origin is not None  # a folder that holds old .pyc alone is not there


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test, or a case of one, that uses extensions: it is skipped where the files of one are missing."""
    absent = [name for name in names if not is_present(name)]
    return pytest.mark.skipif(bool(absent), reason=ABSENT.format(" and ".join(absent)))


def extension_of(path: Path, tests: Path) -> str | None:
    """Return the extension that a file of tests is for: that of its folder."""
    parts = path.relative_to(tests).parts
    if parts[0] == "ext":
        return parts[1]
    return parts[0] if parts[0] in ("data", "examples", "launch", "models", "plan") else None
