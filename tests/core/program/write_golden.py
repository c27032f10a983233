"""Write the golden programs anew. Look at `git diff tests/golden` before keeping them."""

from pathlib import Path

from cases import everything, kept

folder = Path(__file__).parents[2] / "golden"
for stale in folder.glob("*.txt"):
    stale.unlink()
for name, program in everything().items():
    (folder / f"{name}.txt").write_text(kept(program))
print(f"{len(everything())} programs in {folder}")
