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
from commands import command, shown

from fsdpx.__main__ import COMMANDS, GROUPS, make_parser
from fsdpx.core.base.messages import SlowTaskReporter, format_table, wrap_for_terminal

COLUMNS = 80


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def show(words: str) -> str:
    """What a command prints in the terminal; its status must be 0."""
    return shown(words, Terminal)


def require_narrow(text: str) -> None:
    assert text.strip()
    for line in text.splitlines():
        assert len(line) <= COLUMNS, line


ACTIONS = ["bench comm", "bench step", "trace merge", "ckpt inspect", "ckpt verify", "ckpt diff", "ckpt convert"]


@pytest.mark.parametrize("name", [*(name for name in COMMANDS if name not in ("bench", "trace", "ckpt")), *ACTIONS])
def test_help_fits_and_says_something_of_every_option(name: str) -> None:
    text = show(f"{name} --help")
    require_narrow(text)
    listed = re.findall(r"^  (\S.*(?:\n {10,}\S.*)*)", text, re.M)
    assert [one for one in listed if not re.search(r"\S(?:  +|\n +)\S", one)] == []


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_and_has_an_example(name: str) -> None:
    text = show(f"{name} --help")
    require_narrow(text)
    examples = re.findall(r"(?:mpiexec -n 4 )?python -m fsdpx (\S+)", text.partition("\n\n")[2])
    assert [name for name in examples if name in COMMANDS] == ([name] if name else list(COMMANDS))


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_understood(name: str) -> None:
    words = shlex.split(COMMANDS[name].example)
    assert make_parser().parse_args(words[words[0] == "mpiexec" :]).command == name


LINES = ["info", "doctor", "show gpt-tiny --ranks 2", "show mlp --mesh pipe=2 --grid --memory 1GiB"]
LINES += ["verify --strategy ddp --precision float32 --steps 2"]


@pytest.mark.parametrize("line", LINES)
def test_lines_fit(line: str) -> None:
    require_narrow(show(line))


def test_a_command_to_copy_goes_on_in_the_next_line() -> None:
    text = show("run -n 2 --dry-run -m fsdpx.examples.gpt")
    assert re.fullmatch(r"FSDPX_RUN=\S+ \\\n  FSDPX_RESTART=0 \\\n  FSDPX_EXPECT_SIZE=2 \\\n  \S+ .*\n", text)


def test_runs_fit(tmp_path: Path) -> None:
    folder = tmp_path / "gpt-20261128-153628"
    folder.mkdir()
    (folder / "config.json").write_text('{"begun": "2026-11-28 15:36:28+0000", "ranks": 128}')
    text = show(f"runs --in {tmp_path}")
    require_narrow(text)
    assert "11-28 15:36" in text


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


def test_a_file_gets_whole_lines_and_a_launcher_those_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank writes into a pipe of its launcher, which most often shows it in a terminal."""
    text = "key  " + " ".join(["value"] * 30)
    assert wrap_for_terminal(text) == text
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    require_narrow(wrap_for_terminal(text))


@pytest.mark.parametrize("line", ["inf", "bench", "plan gpt-tiny", "compile", "plan gpt-tiny --ranks 4"])
def test_errors_fit(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, text = command(line, err=Terminal)  # whatever its output goes to
    assert status == 2
    require_narrow(text)
    said = " ".join(text.split())
    assert said.startswith("fsdpx")
    assert "required: action" not in said
    assert ("did you mean 'info'?" in said) == (line == "inf")


def test_a_text_column_is_aligned_at_its_left_and_goes_below_rows_that_are_too_long() -> None:
    rows = [("verb", "us", "by"), ("send", "1.5", "MPI"), ("reduce", "12.0", "memory")]
    assert format_table(rows, text=True).splitlines() == [
        "verb      us  by", "--------------------", "send     1.5  MPI", "reduce  12.0  memory"
    ]  # fmt: skip
    require_narrow(format_table([*rows, ("gather", "1.0", " ".join(["words"] * 30))], text=True))


def test_a_result_follows_progress_on_a_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    reporter = SlowTaskReporter("searching:")
    reporter.show_progress()
    reporter.update_progress("3 configurations predicted, 2 fit")
    reporter.report_end(None)
    assert terminal.getvalue().endswith("fsdpx: searching: 3 configurations predicted, 2 fit ...\r\x1b[K")


def test_groups_have_all_commands_once() -> None:
    assert sum(map(len, GROUPS.values())) == len(COMMANDS)
