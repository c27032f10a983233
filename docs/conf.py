"""Sphinx: how the documentation is built. The package is imported from the folder above, it need not be installed."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fsdpx.version import __version__

project = "fsdpx"
author = "the fsdpx authors"
copyright = "the fsdpx authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_google_docstring = False
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"fsdpx {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them
autodoc_preserve_defaults = True


def plain(app, what, name, obj, options, lines):
    """Docstrings are plain text with `code` in back quotes; this makes them what reStructuredText wants."""
    lines[:] = [line if line.startswith("    ") else _escaped(line) for line in lines]


def _escaped(line):
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(f"`{part}`" if part.startswith("`") else re.sub(r"([*|_\\])", r"\\\1", part) for part in parts)


def setup(app):
    app.connect("autodoc-process-docstring", plain)
