"""The documentation is true: its blocks run and print what it says, its links, targets and command lines exist."""

import contextlib
import importlib
import io
import re
import runpy
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import few
from models import part
from trials import ROOT

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.base import environment
from fsdpx.core.base.config import PRESETS
from fsdpx.core.base.extensions import import_declared_extension, list_extensions
from fsdpx.core.comm import Communicator
from fsdpx.core.engine.operations import OPERATIONS
from fsdpx.core.program import PASSES, VERBS
from fsdpx.core.trainer.call_runner import CallRunner
from fsdpx.core.trainer.inspect import Inspection
from fsdpx.ext.elastic.call_runner import ElasticRunner
from fsdpx.plan import Machine

DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "launch/README.md")]
PAGES += sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?", re.S | re.M)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shell(page: Path) -> list[str]:
    """The commands of a page's ```sh blocks, without comments; those that go on in the next line as one."""
    blocks = re.findall(r"^```sh\n(.*?)^```", re.sub(r" *\\\n *", " ", page.read_text()), re.S | re.M)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("page", few([p for p in PAGES if "```python" in p.read_text()], 2), ids=name)
def test_blocks_run_and_print_what_follows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in re.findall(r"^import (torch|jax|autograd)\b", page.read_text(), re.M):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    fsdpx.finalize()
    scope: dict[str, Any] = {"__name__": "page"}
    try:
        for block in BLOCK.finditer(page.read_text()):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block["code"], name(page), "exec", dont_inherit=True), scope)
            if block["printed"] is not None:
                assert out.getvalue() == block["printed"], block["code"]
    finally:  # a page that fails leaves the tables to the next one as they were
        fsdpx.finalize()
        for verb in [verb for verb, operation in OPERATIONS.items() if operation.__module__ == "page"]:
            del VERBS[verb], OPERATIONS[verb]
        PASSES[:] = [one for one in PASSES if one.__module__ != "page"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_that_are_not_run_say_so(page: Path) -> None:
    for language, first in re.findall(r"^```(\w+)\n(.*)\n", page.read_text(), re.M):
        is_run = not language.startswith("py") or language == "python"
        assert is_run or first.startswith("# not run by the tests: "), first


def names(page: Path) -> set[str]:
    """The dotted names of fsdpx in a page's code spans, those of a `trainer`, and `nn` and `optim` as usual."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    dotted = re.compile(r"(?<![\w./\-\"'])(trainer\.(?:host\.|inspect\.)?\w+|(?:fsdpx|nn|optim)(?:\.\w+)+)")
    found = {one for span in re.findall(r"`([^`\n]+)`", text) for one in dotted.findall(span)}
    return {one for one in found if not one.endswith((".py", ".toml", ".cu"))}


def known(name: str) -> bool:
    first, *rest = name.split(".")
    homes = {"fsdpx": [fsdpx], "trainer": [fsdpx.Trainer], "nn": [nn], "optim": [optim]}
    if first == "trainer" and len(rest) == 2:
        first, rest = rest[0], rest[1:]
        homes |= {"host": [CallRunner, ElasticRunner], "inspect": [Inspection]}
    return any(_reached(home, rest) for home in homes[first])


def _reached(thing: Any, rest: list[str]) -> bool:
    for word in rest:
        if not hasattr(thing, word) and word not in getattr(thing, "__dataclass_fields__", ()):
            try:
                importlib.import_module(f"{thing.__name__}.{word}")
            except (ImportError, AttributeError):
                return False
        thing = getattr(thing, word, None)
    return True


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "0034-names-of-the-field.md"], ids=name)
def test_names_of_the_library_are_in_it(page: Path) -> None:
    """But for the page that tells what names were."""
    assert sorted(name for name in names(page) if not known(name)) == []


WALK = runpy.run_path(str(DOCS / "tutorial" / "walk.py"))


@pytest.mark.parametrize("optimizer", [optim.SGD(lr=0.1, momentum=0.9), optim.AdamW(lr=1e-2)], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_walk_gives_what_the_trainer_gives(ranks: int, optimizer: optim.Optimizer) -> None:
    rng = np.random.default_rng(0)
    layers = [nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3)]
    batches = [(rng.standard_normal((n, 6)), rng.integers(0, 3, n)) for n in (13, 13, 2)]  # the last leaves ranks empty
    loss = nn.CrossEntropyLoss()

    def both(comm: Communicator) -> None:
        losses, full = WALK["train"](comm, layers, loss, optimizer, batches, seed=3)
        trainer = nn.Sequential(*layers).as_distributed(
            loss=loss, optimizer=optimizer, strategy="fsdp", comm=comm, precision="float64", group_bytes=0, seed=3
        )
        for wanted, (x, y) in zip(losses, batches, strict=True):
            mine = part(comm, len(x))
            assert trainer.step(x[mine], y[mine]) == pytest.approx(wanted, rel=1e-12)
        for key, value in trainer.parameters().items():
            np.testing.assert_allclose(value, full[key], rtol=1e-12, atol=1e-15, err_msg=key)

    spawn(both, ranks)


def test_the_walk_runs(capsys: pytest.CaptureFixture[str]) -> None:
    WALK["main"]()
    assert len(capsys.readouterr().out.split()) == 5


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_files_and_make_targets_of_a_page_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []
    files = re.findall(r"`((?:fsdpx|tests|bench|docs|launch)/[\w./-]+)`", page.read_text())
    assert [file for file in files if not (ROOT / file).exists()] == []
    rules = re.findall(r"^([a-z][\w%-]*(?: [\w%-]+)*):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    known = "|".join(target.replace("%", r"\d+") for rule in rules for target in rule.split())
    code = [*re.findall(r"`make ([^`]+)`", page.read_text()), *(c[5:] for c in shell(page) if c.startswith("make "))]
    targets = [word for words in code for word in shlex.split(words) if "=" not in word and word != "-C"]
    assert [target for target in targets if not re.fullmatch(known, target)] == []


class Parsed(Exception):
    """Command line was accepted."""


@cache
def module_lines() -> dict[str, tuple[str, list[str]]]:
    """Every `python -m fsdpx...` of the pages: the whole line -> module and arguments."""
    found = {}
    for page in PAGES:
        code = [*shell(page), *re.findall(r"`([^`\n]*python -m fsdpx[^`\n]*)`", page.read_text())]
        for match in (re.search(r"python -m (fsdpx[\w.]*)( [^|]*)?", line) for line in code):
            if match and match[0] not in ("python -m fsdpx", "python -m fsdpx COMMAND"):
                found[match[0]] = (match[1], shlex.split(match[2] or ""))
    return found


@pytest.mark.parametrize("line", module_lines())
def test_command_lines_parse(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(args: Any = None, **_: Any) -> None:
        if getattr(args, "command", None) == "plan":
            Machine.load(args.machine)  # it comes with fsdpx: readers have no machine.toml yet
        raise Parsed

    monkeypatch.setattr("fsdpx.__main__._run_command", stop)  # what runs after parsing
    monkeypatch.setattr(fsdpx, "init", stop)
    module, arguments = module_lines()[line]
    target = importlib.import_module("fsdpx.__main__" if module == "fsdpx" else module)
    if module in ("fsdpx.examples.custom_layer", "fsdpx.examples.heat", "fsdpx.examples.channel"):
        assert arguments == []  # they take none
    else:
        with pytest.raises(Parsed):
            target.main(arguments)


def test_tables_name_what_there_is() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for extension in list_extensions("verbs"):
        import_declared_extension("verbs", extension)
    assert sorted(re.findall(r"^\| `([A-Z]+)` \|", contributing, re.M)) == sorted(VERBS)
    rows = re.findall(r'^\| `"(\w+)"`(?:, `"(\w+)"`)?', (DOCS / "strategies.md").read_text(), re.M)
    assert set(rows) >= {(preset, "") for preset in PRESETS if preset not in ("zero3", "fsdp")}
    variables = set(re.findall(r'"(FSDPX_\w+)"', Path(environment.__file__).read_text()))
    assert variables == set(re.findall(r"^\| `(FSDPX_\w+?)=", (DOCS / "reference/environment.md").read_text(), re.M))
