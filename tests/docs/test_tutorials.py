"""The tutorials run from start to end, as a reader would run them."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from amount import in_full

import fsdpx

TUTORIAL = Path(__file__).parents[2] / "docs/tutorial"
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
pytestmark = pytest.mark.mpi_skip


def printed(folder: Path, *command: str) -> list[str]:
    """The lines that a command prints, but for what fsdpx says of itself."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "FSDPX_"))}
    kept |= {"OMP_NUM_THREADS": "1", "FSDPX_TUNE": "0", "PYTHONPATH": str(TUTORIAL.parents[1])}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("epoch")]


@in_full
def test_a_script_for_torchrun_and_its_port_print_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank is this process, which has PyTorch already; each other process takes seconds to import it."""
    torch = pytest.importorskip("torch")
    (shown,) = re.findall(r"^```text\n(epoch.*?)^```", (TUTORIAL / "torchrun.md").read_text(), re.S | re.M)
    theirs = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(TUTORIAL / "ddp.py")]
    assert printed(tmp_path, *theirs) == shown.splitlines()
    monkeypatch.chdir(tmp_path)
    fsdpx.finalize()
    runpy.run_path(str(TUTORIAL / "ported.py"))
    fsdpx.finalize()
    assert capsys.readouterr().out == shown
    assert MPIEXEC is not None
    assert printed(tmp_path, MPIEXEC, "-n", "2", sys.executable, str(TUTORIAL / "ported.py")) == shown.splitlines()
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
    load_file = pytest.importorskip("safetensors.torch").load_file
    net.load_state_dict(load_file(tmp_path / "net/model.safetensors"))
    for name, value in torch.load(tmp_path / "net.pt").items():
        assert (value - net.state_dict()[name]).abs().max() < 1e-5, name


def test_the_page_on_torchrun_shows_parts_of_its_scripts() -> None:
    """GitHub shows no literalinclude, so the page repeats what differs between the scripts."""
    page = (TUTORIAL / "torchrun.md").read_text()
    sections = {"## The PyTorch script": "ddp.py", "## The fsdpx script": "ported.py"}
    for heading, script in sections.items():
        text = page.partition(heading)[2]
        (shown,) = re.findall(r"^```py\n# not run.*?\n(.*?)^```", text.partition("\n## ")[0], re.S | re.M)
        assert f"[{script}]({script})" in text
        assert shown in (TUTORIAL / script).read_text()


def test_the_notebook_of_the_course_is_made_of_its_page() -> None:
    """`python docs/tutorial/notebook.py` makes it; each program of the page is a cell."""
    spec = importlib.util.spec_from_file_location("notebook", TUTORIAL / "notebook.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    page = (TUTORIAL / "course.md").read_text()
    kept = (TUTORIAL / "course.ipynb").read_text()
    assert kept == made.notebook(page), "run python docs/tutorial/notebook.py"
    cells = json.loads(kept)["cells"]
    for cell in cells:  # a reader downloads it alone
        inside = {f"attachment:{name}" for name in cell.get("attachments", ())}
        links = set(re.findall(r"\]\(([^)]*)\)", "".join(cell["source"]))) if cell["cell_type"] == "markdown" else set()
        assert {link for link in links if not link.startswith("https:")} == inside, links
    programs = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert programs == [code.strip("\n") for code in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)]
