"""Delete an extension in a copy of the checkout, and run the tests of the core there.

    python tests/delete_extension.py                 # compression, elastic, moe, offload and plan, one after the other
    python tests/delete_extension.py moe -- -n 2     # one of them; the rest is for pytest

The copy is of what git tracks, with the changes of the working tree. Tests that use the extension are skipped, and the
table counts them; its own are not run. The status is 1 if a test fails that does not name what it needs."""

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
EXTENSIONS = ("compression", "elastic", "moe", "offload", "plan")
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


def run_core_without(name: str, options: list[str]) -> tuple[int, int, str]:
    """Return pytest's status, how many tests say that this extension is missing, and pytest's last line."""
    with tempfile.TemporaryDirectory(prefix=f"without-{name}-") as place:
        Path(place).chmod(0o755)  # some tests act as another user
        copy_checkout(Path(place))
        (Path(place) / "sitecustomize.py").write_text(ALONE)
        inside = Path(place) / "fsdpx" / "ext" / name
        shutil.rmtree(inside if inside.exists() else Path(place) / "fsdpx" / name)
        command = [sys.executable, "-m", "pytest", *OPTIONS, *TESTS, *options]
        piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=place, env={**os.environ, "PYTHONPATH": place}, **piped)
    absent = re.findall(rf"^SKIPPED \[(\d+)\].*{re.escape(ABSENT.format(name))}", done.stdout, re.M)
    print(re.sub(r"^SKIPPED .*\n", "", done.stdout, flags=re.M) if done.returncode else "", end="", flush=True)
    return done.returncode, sum(map(int, absent)), (done.stdout.splitlines() or [""])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", help=f"folders of fsdpx/ext/ or fsdpx/; else {', '.join(EXTENSIONS)}")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    worst = 0
    for name in parser.parse_args(words[:end]).names or EXTENSIONS:
        status, absent, last = run_core_without(name, words[end + 1 :])
        print(f"without {name:16} status {status}, {absent} skipped for want of it: {last}", flush=True)
        worst = max(worst, status)
    return worst


if __name__ == "__main__":
    sys.exit(main())
