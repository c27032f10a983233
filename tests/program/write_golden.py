"""Write the golden programs anew. Look at `git diff tests/golden` before keeping them."""

from pathlib import Path

from cases import golden

folder = Path(__file__).parents[1] / "golden"
for stale in folder.glob("*.txt"):
    stale.unlink()
for name, program in golden().items():
    (folder / f"{name}.txt").write_text(f"{program}\n")
print(f"{len(golden())} programs in {folder}")
