"""The pictures of the pages: drawn now, they are those that are kept."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


make = SimpleNamespace(**runpy.run_path(str(FOLDER / "make.py")))


@pytest.mark.parametrize("theme", make.THEMES)
@pytest.mark.parametrize("name", [name for name in make.PICTURES if name not in make.TRAINED])
def test_a_picture_shows_what_the_code_says_now(name: str, theme: str) -> None:
    """By what is drawn, not by pixels: those differ between versions of Matplotlib."""
    path = FOLDER / f"{name}-{theme}.png"
    with Image.open(path) as kept:
        assert kept.info["digest"] == make.digest(make.PICTURES[name](theme)), "python docs/pictures/make.py"
        dark = sum(kept.convert("RGB").getpixel((1, 1))) < 3 * 128
    assert dark is (theme == "dark")
    assert path.stat().st_size < 100_000


def test_a_digest_sees_what_changes() -> None:
    drawn = make.step("light")
    before = make.digest(drawn)
    drawn = make.step("light")
    assert make.digest(drawn) == before
    drawn.axes[0].collections[3].set_facecolor("black")
    black = make.digest(drawn)
    drawn.axes[0].texts[-1].set_text("1 s")
    assert len({before, black, make.digest(drawn)}) == 3


def test_each_picture_is_on_a_page_in_both_themes() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    kept = {path.stem for path in FOLDER.glob("*.png")}
    assert kept == {f"{name}-{theme}" for name in make.PICTURES for theme in make.THEMES}
    shown = re.findall(r"pictures/([\w-]+)-light\.png\n:class: only-light\n:alt: .+\n```\n\n"
                       r"```\{image\} \S*pictures/\1-dark\.png\n:class: only-dark\n", text)  # fmt: skip
    assert set(shown) == set(make.PICTURES)
