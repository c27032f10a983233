"""The tutorials run from start to end, as a reader would run them."""

import json
import re
import runpy
import subprocess
import sys

import pytest
from ports import free_port
from trials import MPIEXEC, ROOT, environment

import fsdpx

TUTORIAL = ROOT / "docs/tutorial"
pytestmark = pytest.mark.mpi_skip
WITHOUT_DESTRUCTORS = """
import os, runpy, sys
kept = runpy.run_path(sys.argv[1], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""
"""A program that runs a script and leaves at once: the destructor of PyTorch's DDP may wait for a thread of Gloo that
waits for the interpreter, or end the process."""


def start(*command: str, **variables: str) -> "subprocess.Popen[str]":
    environ = environment(OMP_NUM_THREADS="1", **variables)
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(process: "subprocess.Popen[str]") -> str:
    """The lines that a process prints until its end, but for what fsdpx says of itself."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return "".join(line for line in out.splitlines(keepends=True) if line.startswith("epoch"))


def test_a_script_for_torchrun_and_its_port_print_the_same_losses(tmp_path, monkeypatch, capsys):
    """This process, which has PyTorch already, is the only rank of the port: other processes take seconds to import
    it."""
    torch = pytest.importorskip("torch")
    (shown,) = re.findall(r"^```text\n(epoch.*?)^```", (TUTORIAL / "torchrun.md").read_text(), re.S | re.M)
    monkeypatch.chdir(tmp_path)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    script = sys.executable, "-c", WITHOUT_DESTRUCTORS, str(TUTORIAL / "ddp.py")
    ranks = [start(*script, **where, RANK=rank) for rank in ("0", "1")]
    assert list(map(printed, ranks)) == [shown, ""]
    fsdpx.finalize()
    runpy.run_path(str(TUTORIAL / "ported.py"))
    fsdpx.finalize()
    assert capsys.readouterr().out == shown
    assert printed(start(MPIEXEC, "-n", "2", sys.executable, str(TUTORIAL / "ported.py"))) == shown
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
    page = (TUTORIAL / "course.md").read_text()
    kept = (TUTORIAL / "course.ipynb").read_text()
    made = runpy.run_path(str(TUTORIAL / "notebook.py"))["notebook"](page)
    assert kept == made, "run python docs/tutorial/notebook.py"
    cells = json.loads(kept)["cells"]
    for cell in cells:  # a reader downloads it alone
        inside = {f"attachment:{name}" for name in cell.get("attachments", ())}
        links = set(re.findall(r"\]\(([^)]*)\)", "".join(cell["source"]))) if cell["cell_type"] == "markdown" else set()
        assert {link for link in links if not link.startswith("https:")} == inside, links
    programs = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert programs == [code.strip("\n") for code in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)]
