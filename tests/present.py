"""Which extensions are there: a test that needs one which is not is skipped by its name."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from reading import used_at_import

ABSENT = "the extension {} is not there"
BESIDE = ("data", "examples", "launch", "models", "plan")
"""Extensions whose folders are not in `fsdpx/ext/`."""
TESTS = Path(__file__).parent


def package_of(name: str) -> str:
    return f"fsdpx.{name}" if name in BESIDE else f"fsdpx.ext.{name}"


def named_by_the_core() -> list[str]:
    """Return the extensions whose modules are imported by name only when they are used, even if their own tests are
    missing."""
    package = TESTS.parent / "fsdpx"
    tables = "core/base/extensions.py", "__init__.py", "nn/__init__.py"
    texts = [(package / table).read_text() for table in tables]
    return re.findall(r"\bfsdpx\.ext\.(\w+)", "".join(texts))


@cache
def absent() -> dict[str, str]:
    """Extensions without files, and those that import such a one as soon as they are imported: name -> what is not
    there."""
    names = {*BESIDE, *(path.name for path in (TESTS / "ext").glob("[a-z]*")), *named_by_the_core()}
    found = {name: find_spec(package_of(name)) for name in names}
    # a folder that holds old .pyc alone is not there
    homes = {name: Path(spec.origin).parent for name, spec in found.items() if spec is not None and spec.origin}
    gone = {name: name for name in names if name not in homes}
    if not gone:
        return gone
    used = {
        name: {module for file in home.rglob("*.py") for module in used_at_import(file.read_text(), {})}
        for name, home in homes.items()
    }
    for _ in names:
        for name in used.keys() - gone.keys():
            for other in [*gone]:
                if any(f"{module}.".startswith(f"{package_of(other)}.") for module in used[name]):
                    gone[name] = gone[other]
    return gone


def is_present(name: str) -> bool:
    """name: of a folder in `fsdpx/ext/`, or of one in `fsdpx/` itself, such as "plan"."""
    return name not in absent()


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test, or a case of one, that uses extensions: it is skipped where the files of one are missing."""
    missing = sorted({absent()[name] for name in names if name in absent()})
    return pytest.mark.skipif(bool(missing), reason=ABSENT.format(" and ".join(missing)))


def extension_of(path: Path) -> str | None:
    """Return the extension that a file of tests is for: that of its folder."""
    parts = path.relative_to(TESTS).parts if path.is_relative_to(TESTS) else ("",)
    if parts[0] == "ext":
        return parts[1]
    return parts[0] if parts[0] in BESIDE else None
