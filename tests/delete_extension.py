"""Delete an extension and its tests in a copy of the checkout, and run the core there: a training job, requests for the
deleted extension, and the tests of the core.

    python tests/delete_extension.py                           # compression, elastic, moe, offload and plan, in turn
    python tests/delete_extension.py moe -- -n 2               # one of them; the rest is for pytest
    python tests/delete_extension.py -- --collect-only -q      # only import the tests, which takes a minute

The copy contains the files that git tracks, with the changes of the working tree. Tests that use the extension are
skipped, and the table counts them. The exit status is nonzero if the job fails, if a request for the deleted extension
does not name the missing module, or if a test fails without naming a missing module."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from present import ABSENT

ROOT = Path(__file__).parents[1]
TRAIN = """
import numpy as np, fsdpx
from fsdpx import nn, optim
def train(comm, **options):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    options = {"strategy": "fsdp", "loss": nn.CrossEntropyLoss(), "optimizer": optim.AdamW(lr=0.1), **options}
    trainer = fsdpx.distribute(model, comm=comm, **options)
    x = np.random.default_rng(comm.rank).standard_normal((8, 8), np.float32)
    losses = [trainer.step(x, (x[:, 0] > 0).astype(int)) for _ in range(10)]
    trainer.close()
    return losses
"""
JOB = """
losses = fsdpx.spawn(train, 2)
assert losses[0] == losses[1] and losses[0][-1] < losses[0][0] / 2, losses
"""
REQUESTS = {
    "compression": ('fsdpx.spawn(lambda comm: train(comm, compression="int8"), 2)', "fsdpx.Int8()"),
    "elastic": ("fsdpx.spawn(lambda comm: train(comm, elastic=True), 2)", "fsdpx.ElasticConfig()"),
    "moe": ("nn.MoE(8, 16, experts=2)", "nn.Llama(vocab=32, d_model=8, n_layers=1, n_heads=2, seq_len=4, experts=2)"),
    "offload": ('fsdpx.OffloadConfig("/tmp")',),
    "plan": (
        'fsdpx.spawn(lambda comm: train(comm, strategy="auto", batch=(np.zeros((4, 8)), np.zeros(4, int))), 2)',
        "fsdpx.plan(nn.Linear(2, 2), ranks=2)",
        "fsdpx.dry_run(nn.Linear(2, 2), ranks=2)",
    ),
}
"""Extension -> expressions that request it."""
ALONE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
"""
"""For all processes of the copy: an editable installation would find there what is missing here."""
TESTS = ["tests/core", "tests/nn", "tests/optim"]
OPTIONS = ["-m", "not world and not jobs", "--hypothesis-profile=check", "-p", "no:cacheprovider", "-rsfE"]


def copy_checkout(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def list_failed_programs(name: str, place: str, environment: dict[str, str]) -> list[str]:
    """Run the job and the requests for this extension in the copy. Return the failures: the job, or requests that do
    not raise an error of fsdpx that names the missing module."""
    failed = []
    for program in (JOB, *REQUESTS.get(name, ())):
        command = [sys.executable, "-c", TRAIN + program]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
        last = (done.stderr.splitlines() or [""])[-1]
        said = re.search(rf"^fsdpx\.errors\.\w+: .*there is no fsdpx\.(ext\.)?{name}\b", done.stderr, re.M)
        print(f"    {program.strip().splitlines()[0]}: {(said[0] if said else last) if done.returncode else 'runs'}")
        if (done.returncode != 0) if program is JOB else not said:
            failed.append(f"{program}{done.stderr}")
    return failed


def run_core_without(name: str, options: list[str]) -> tuple[int, int, str]:
    """Return the status, how many tests say that this extension is missing, and pytest's last line."""
    with tempfile.TemporaryDirectory(prefix=f"without-{name}-") as place:
        Path(place).chmod(0o755)  # some tests act as another user
        copy_checkout(Path(place))
        (Path(place) / "sitecustomize.py").write_text(ALONE)
        inside = Path(place) / "fsdpx" / "ext" / name
        shutil.rmtree(inside if inside.exists() else Path(place) / "fsdpx" / name)
        for tests in (Path(place) / "tests" / "ext" / name, Path(place) / "tests" / name):
            shutil.rmtree(tests, ignore_errors=True)
        environment = {**os.environ, "PYTHONPATH": place}
        failed = list_failed_programs(name, place, environment)
        print(*failed, sep="\n", end="", flush=True)
        command = [sys.executable, "-m", "pytest", *OPTIONS, *TESTS, *options]
        piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=place, env=environment, **piped)
    absent = re.findall(rf"^SKIPPED \[(\d+)\].*{re.escape(ABSENT.format(name))}", done.stdout, re.M)
    print(re.sub(r"^SKIPPED .*\n", "", done.stdout, flags=re.M) if done.returncode else "", end="", flush=True)
    lines = [line for line in done.stdout.splitlines() if line]
    return done.returncode or int(bool(failed)), sum(map(int, absent)), (lines or [""])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", help=f"folders of fsdpx/ext/ or fsdpx/; else {', '.join(REQUESTS)}")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    worst = 0
    for name in parser.parse_args(words[:end]).names or REQUESTS:
        status, absent, last = run_core_without(name, words[end + 1 :])
        print(f"without {name:16} status {status}, {absent} skipped for want of it: {last}", flush=True)
        worst = max(worst, status)
    return worst


if __name__ == "__main__":
    sys.exit(main())
