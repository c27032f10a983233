"""What the core imports by name: ours, those of installed packages, and those whose files are missing."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import distributed
from parts import GPT, MLP, PACKAGE, loaded_files
from present import needs
from reading import count_code_lines

import fsdpx
from fsdpx import nn
from fsdpx.core.base import extensions
from fsdpx.core.base.extensions import EXTENSIONS
from fsdpx.core.comm import Communicator, open_world, spawn
from fsdpx.errors import ConfigError

THEIRS = '''
import numpy as np
from fsdpx import NoCompression, nn
from fsdpx.core.comm.local import make_single_rank_communicator

class Half(NoCompression):
    """Carries half of each gradient."""
    def reduce_scatter(self, comm, grad, out, counts, scratch, memory, *, what):
        grad *= np.float32(0.5)
        return super().reduce_scatter(comm, grad, out, counts, scratch, memory, what=what)

def open_alone(asked):
    comm = make_single_rank_communicator()
    comm.opened_by = "theirs"
    return comm

class Matrix:
    """A model of theirs."""
    def __init__(self, n): self.n = n

def adapt(model, loss):
    return (nn.Linear(model.n, 1) if isinstance(model, Matrix) else model), loss
'''
POINTS = """
[fsdpx.codec]
half = theirs_of_fsdpx:Half
int8 = theirs_of_fsdpx:Half
[fsdpx.backend]
theirs = theirs_of_fsdpx:open_alone
[fsdpx.library]
theirs_of_fsdpx = theirs_of_fsdpx:adapt
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of a user that adds a codec, a backend and a library."""
    (tmp_path / "theirs_of_fsdpx.py").write_text(THEIRS)
    info = tmp_path / "theirs_of_fsdpx-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs-of-fsdpx\nVersion: 1\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    extensions._read_entry_points_of_kind.cache_clear()
    yield
    extensions._read_entry_points_of_kind.cache_clear()


def train_with(comm: Communicator, codec: str) -> Any:
    """Return by how much a step moves the weight."""
    trainer = distributed(nn.Linear(4, 3, bias=False), comm, compression=codec)
    before = trainer.parameters()["weight"]
    x = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
    trainer.step(x, x[:, :3])
    return trainer.parameters()["weight"] - before


@pytest.mark.usefixtures("installed")
def test_the_codec_of_an_installed_package_is_found_by_its_name() -> None:
    assert extensions.list_extensions("codec") == [*EXTENSIONS["codec"], "half"]
    half, plain = (spawn(train_with, 2, codec)[0] for codec in ("half", "plain"))
    np.testing.assert_allclose(half, 0.5 * plain, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"unknown codec 'hlaf': choose one of plain, .*powersgd, half, or pass"):
        distributed(nn.Linear(2, 2), compression="hlaf")


@needs("compression")
@pytest.mark.usefixtures("installed")
def test_a_package_does_not_replace_what_is_ours() -> None:
    assert extensions.import_declared_extension("codec", "int8") is fsdpx.Int8


@pytest.mark.usefixtures("installed")
def test_the_backend_of_an_installed_package_is_opened_by_its_name() -> None:
    assert open_world("theirs").opened_by == "theirs"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"unknown backend 'others': use one of node, mpi, .*theirs, or None"):
        open_world("others")


@pytest.mark.usefixtures("installed")
def test_models_of_a_library_are_adapted_by_what_is_installed_for_it() -> None:
    from theirs_of_fsdpx import Matrix

    assert fsdpx.distribute(Matrix(5)).predict(np.ones((2, 5), np.float32)).shape == (2, 1)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=needs(*re.findall(r"^fsdpx\.(?:ext\.)?(\w+)", target)))
        for target in sorted({target for names in EXTENSIONS.values() for target in names.values()})
    ],
)
def test_what_is_declared_is_there(target: str) -> None:
    module, _, attribute = target.partition(":")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert not attribute or re.search(rf"\b{attribute}\b", Path(spec.origin).read_text())


@pytest.mark.parametrize("module", ["fsdpx.ext.gone", "fsdpx.ext.gone.file", "fsdpx.core.gone"])
def test_missing_files_are_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTENSIONS["codec"], "gone", f"{module}:Gone")
    missing = "fsdpx.ext.gone" if ".ext.gone" in module else module
    said = f"codec .gone. is an extension whose files are missing: there is no {missing};"
    with pytest.raises(ConfigError, match=said):
        extensions.import_extension_if_declared("codec", "gone")


def test_an_extension_is_told_from_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, needed in (("needs_more", "surely_not_installed"), ("needs_ours", "fsdpx.ext.gone")):
        (tmp_path / f"{name}.py").write_text(f"import {needed}\n")
        monkeypatch.setitem(EXTENSIONS["codec"], name, f"{name}:Codec")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        extensions.import_extension_if_declared("codec", "needs_more")
    for optional in (False, True):
        with pytest.raises(ConfigError, match=r"codec 'needs_ours' is .* missing: there is no fsdpx\.ext\.gone;"):
            extensions.import_extension_if_declared("codec", "needs_ours", optional)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown ranks 'elastc': choose one of elastic"):
        extensions.import_declared_extension("ranks", "elastc")


NAMES = "asynchronous compression coupling elastic fields gloo interop lora meshes moe observe offload watch"
NOT_ASKED_FOR = ("data/", "models/", "plan/", *(f"ext/{name}/" for name in NAMES.split()))


@pytest.mark.parametrize(("program", "most"), [(MLP, 22_150), (GPT, 24_750)], ids=["mlp", "gpt"])
def test_nothing_is_loaded_that_was_not_asked_for(program: str, most: int) -> None:
    """A training step, a save and a load read the core alone, and machine code on disk. Lines of code are counted."""
    files = loaded_files(program)
    assert [file for file in files if file.startswith(NOT_ASKED_FOR)] == []
    assert sum(count_code_lines((PACKAGE / file).read_text()) for file in files) <= most


def test_a_job_reads_no_list_of_installed_packages() -> None:
    code = f"{MLP}\nimport sys; assert 'importlib.metadata' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


GONE = """
import sys
sys.modules |= dict.fromkeys(("fsdpx.ext.compression", "fsdpx.ext.fields", "fsdpx.ext.offload"))
"""
USED = """
def refused(use):
    try:
        use()
    except fsdpx.errors.ConfigError as error:
        return str(error).partition(";")[0]

for use in (
    lambda: fsdpx.distribute(model, loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), compression="topk"),
    lambda: fsdpx.Int8, lambda: fsdpx.Grid, lambda: fsdpx.OffloadConfig, lambda: nn.Conv2d, lambda: fsdpx.plan(model),
):
    print(refused(use), file=sys.stderr)
"""


@needs("plan")
def test_without_the_files_of_extensions_the_core_trains_and_names_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", GONE + MLP + USED], capture_output=True, text=True, check=True)
    what = "codec 'topk'", "fsdpx.Int8", "fsdpx.Grid", "fsdpx.OffloadConfig", "fsdpx.nn.Conv2d", "fsdpx.plan"
    missing = "compression", "compression", "fields", "offload", "fields", "fields"
    said = "{} is an extension whose files are missing: there is no fsdpx.ext.{}"
    for line, *one in zip(done.stderr.splitlines(), what, missing, strict=True):
        assert line.startswith(said.format(*one))
