"""What commands print in a terminal of 80 columns."""

import io
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpx.__main__ import COMMANDS, GROUPS, main, make_parser
from fsdpx.core.base.messages import wrap_for_terminal

COLUMNS = 80


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command prints in the terminal; its status must be 0."""
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", str(COLUMNS))
        try:
            status = main(words)
        except SystemExit as end:  # --help
            status = end.code
    assert status == 0
    return terminal.getvalue()


def require_narrow(text: str) -> None:
    assert text.strip()
    for line in text.splitlines():
        assert len(line) <= COLUMNS, line


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_and_has_an_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = show([*filter(None, [name]), "--help"], monkeypatch)
    require_narrow(shown)
    examples = re.findall(r"(?:mpiexec -n 4 )?python -m fsdpx (\S+)", shown.partition("\n\n")[2])
    assert [name for name in examples if name in COMMANDS] == ([name] if name else list(COMMANDS))


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_understood(name: str) -> None:
    words = shlex.split(COMMANDS[name].example)
    assert make_parser().parse_args(words[words[0] == "mpiexec" :]).command == name


@pytest.mark.parametrize("line", ["info", "doctor", "show gpt-tiny --ranks 2", "show mlp --mesh pipe=2 --grid"])
def test_lines_fit(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_narrow(show(line.split(), monkeypatch))


def test_runs_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gpt-20261128-153628"
    folder.mkdir()
    (folder / "config.json").write_text('{"begun": "2026-11-28 15:36:28+0000", "ranks": 128}')
    shown = show(["runs", "--in", str(tmp_path)], monkeypatch)
    require_narrow(shown)
    assert "11-28 15:36" in shown


def test_a_real_terminal_is_asked_for_its_width() -> None:
    ours, theirs = pty.openpty()
    os.close(ours) if not shutil.which("stty") else subprocess.run(["stty", "cols", "60"], stdin=theirs, check=True)
    code = "from fsdpx.core.base.messages import wrap_for_terminal as w; print(w('key    ' + 'value ' * 30))"
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environ, check=True)
    lines = os.read(ours, 4096).decode().splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(" " * 7 + "value") for line in lines[1:]), lines


def test_a_file_gets_whole_lines() -> None:
    assert wrap_for_terminal("key  " + "x" * 200) == "key  " + "x" * 200


def test_groups_have_all_commands_once() -> None:
    assert sum(map(len, GROUPS.values())) == len(COMMANDS)
