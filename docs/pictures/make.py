"""Makes the pictures of the pages, each on a light and on a dark page: `python docs/pictures/make.py [NAME ...]`.

All are drawn from what the code says: programs that the simulator runs, parts of fields, contracts of imports. A file
keeps a digest of its figure (`digest`), with which tests compare what is drawn now."""

import sys
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

import fsdpx
from fsdpx.launch.drawing import lanes
from fsdpx.nn import models
from fsdpx.observe.plots import THEMES, figure, save
from fsdpx.plan import Machine
from fsdpx.plan.prediction import prepared

HERE = Path(__file__).parent


# -- one step under three strategies -----------------------------------------------------------------------------------

THREE = {
    "DDP: each rank holds the whole model; gradients are summed over the ranks (numbers: layers)": {"strategy": "ddp"},
    "FSDP: each rank holds a half; layers are gathered before use, and freed": {"strategy": "fsdp"},
    "Pipe: each rank holds half of the layers; activations travel (numbers: microbatches)": {
        "strategy": "ddp",
        "mesh": fsdpx.Mesh(pipe=2),
        "microbatches": 4,
    },
}


def step(theme: str) -> Any:
    """Four layers of 1,024 on two ranks."""
    machine, batch, panels = Machine.load(HERE / "two-laptops.toml"), ((1024, 1024), "float32"), []
    for title, options in THREE.items():
        dry = prepared(models.mlp(4, 1024, True), (batch, batch), 2, gpu=False, **options)
        panels.append(lanes(dry, dry.on(machine), title))
    return figure(panels, theme)


PICTURES = {"step": step}


# -- files -------------------------------------------------------------------------------------------------------------


def digest(drawn: Any) -> str:
    """Of what is drawn: words, corners in the numbers of the axes to four digits, and colours; not how Matplotlib lays
    it out, which differs between versions."""
    lines = [_words(text) for text in drawn.texts]
    lines += [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
    for axes in drawn.axes:
        lines += [_words(text) for text in (axes.title, *axes.texts)]
        lines += [f"{_numbers(line.get_xydata())} {line.get_color()}" for line in axes.lines]
        for box in axes.patches:
            lines.append(f"{_corners(box.get_path(), box.get_patch_transform())} {_numbers(box.get_facecolor())}")
        for many in axes.collections:
            colours = _numbers(many.get_facecolor())
            lines += [f"{_corners(path)} {colours}" for path in many.get_paths()]
        lines += [_numbers(image.get_array()) for image in axes.images]
    return blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _words(text: Any) -> str:
    end = [text.xyann, text.xy] if hasattr(text, "xyann") else [text.get_position()]
    return f"{text.get_text()} {text.get_color()} {_numbers(end)}"


def _corners(path: Any, transform: Any = None) -> str:
    """Without their order: versions of Matplotlib close paths in different ways."""
    points = path.vertices if transform is None else transform.transform(path.vertices)
    return " ".join(sorted({_numbers(point) for point in points}))


def _numbers(values: Any) -> str:
    return ",".join(f"{value:.4g}" for value in np.asarray(values, float).ravel() + 0.0)


def write(name: str, theme: str) -> Path:
    """Write one picture, in 64 colours."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    drawn, content, path = PICTURES[name](theme), BytesIO(), HERE / f"{name}-{theme}.png"
    save(drawn, content)
    info = PngInfo()
    info.add_text("digest", digest(drawn))
    image = Image.open(content).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    image.save(path, optimize=True, pnginfo=info)
    return path


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        for theme in THEMES:
            path = write(name, theme)
            print(f"{path.relative_to(HERE.parents[1])}: {path.stat().st_size:,} bytes")
