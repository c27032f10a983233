"""What type checkers see in programs of users: pyright and mypy accept the right ones and refuse each marked mistake.

A line that must be refused ends in `# error: WORD`, and the message of each checker there contains the word."""

import importlib.util
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = {path.name: path.read_text() for path in sorted((ROOT / "tests" / "typed_programs").glob("*.py"))}
MARK = re.compile(r"# error: (\S+)$")

Errors = Iterator[tuple[str, int, str]]
"""File, line, and what a checker says there."""


def list_marks(programs: Mapping[str, str]) -> dict[tuple[str, int], str]:
    """File and line of each mistake -> the word that must be in the message."""
    lines = [(name, *at) for name, text in programs.items() for at in enumerate(text.splitlines(), 1)]
    return {(name, number): found[1] for name, number, line in lines if (found := MARK.search(line))}


def run_checker(*command: str) -> str:
    done = subprocess.run((sys.executable, "-m", *command), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def run_mypy(folder: Path, names: Sequence[str]) -> Errors:
    """Errors inside of the package are left to a run of mypy over it, whose cache this one shares."""
    for line in run_checker("mypy", "--no-error-summary", *(str(folder / name) for name in names)).splitlines():
        path, number, kind, text = (part.strip() for part in line.split(":", 3))
        if kind == "error" and Path(path).name in names and not path.startswith("fsdpx/"):
            yield Path(path).name, int(number), text


def run_pyright(folder: Path, names: Sequence[str]) -> Errors:
    """basedpyright is pyright in a wheel, with Node.js in another one: no download when it first runs."""
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)], "include": list(names)}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    options = "--outputjson", "--project", str(folder), "--pythonpath", sys.executable
    for one in json.loads(run_checker("basedpyright", *options))["generalDiagnostics"]:
        yield Path(one["file"]).name, one["range"]["start"]["line"] + 1, one["message"]


@pytest.mark.parametrize(("checker", "module"), [(run_mypy, "mypy"), (run_pyright, "basedpyright")])
def test_programs_of_users(checker, module, tmp_path) -> None:
    pytest.importorskip(module, reason=f"{module} is not installed: pip install '.[dev]'")
    has_torch = importlib.util.find_spec("torch") is not None
    programs = {name: text for name, text in PROGRAMS.items() if has_torch or name != "torch_module.py"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    errors, marks = defaultdict[tuple[str, int], str](str), list_marks(programs)
    for name, line, said in checker(tmp_path, [*programs]):
        errors[name, line] += f" {said}"
    unexpected = [f"{name}:{line} {errors[name, line]}" for name, line in sorted(errors.keys() - marks.keys())]
    missing = [
        f"{name}:{line} no error with the word {word!r}: {errors.get((name, line), 'none')}"
        for (name, line), word in marks.items()
        if word.lower() not in errors.get((name, line), "").lower()
    ]
    assert not unexpected + missing, "\n".join(unexpected + missing)
