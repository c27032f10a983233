"""Sphinx: how the documentation is built. The package is imported from the folder above, it need not be installed."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import terms
from docutils import nodes

from fsdpx.core.base.version import __version__

project = "fsdpx"
author = "the fsdpx authors"
copyright = "the fsdpx authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_design"]
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"fsdpx {release}"
html_static_path = ["_static"]
html_css_files = ["fsdpx.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them
autodoc_preserve_defaults = True


def plain(app, what, name, obj, options, lines):
    """Docstrings are plain text with `code` in back quotes, and NumPy's sections of one line per entry; this makes them
    what reStructuredText wants."""
    found, section = [], False
    for line, after in zip(lines, [*lines[1:], ""], strict=False):
        entry = re.fullmatch(r"(\S.*?) : (.*)", line) if section else None
        if re.fullmatch(r"-{3,}", after) and line:
            found += [f"**{line}**"]
        elif re.fullmatch(r"-{3,}", line):
            section = True
            found.append("")
        elif entry:
            found.append(f"- ``{entry[1]}``: {_escaped(entry[2])}")
        elif section and line.startswith("    "):  # an entry goes on
            found.append("  " + _escaped(line.strip()))
        else:
            section = section and line != ""
            found.append(line if line.startswith("    ") else _escaped(line))
            if line.startswith("    ") and found[-2:-1] == [""] and found[-3:-2] and found[-3].endswith(":"):
                found[-3] = found[-3].rstrip(":") + "::"  # a sample of code
    lines[:] = found


def _escaped(line):
    parts = re.split(r"(`[^`]+`)", line)
    plain = (f"`{part}`" if part.startswith("`") else re.sub(r"([*|_\\])", r"\\\1", part) for part in parts)
    return re.sub(r"\bdocs/([\w/-]+)\.md\b", r":doc:`/\1`", "".join(plain))


def depends(app, doctree):
    """Rebuild a page when what makes its links has changed."""
    for name in ("glossary.md", "terms.py", "conf.py"):
        app.env.note_dependency(str(Path(app.srcdir, name)))


def aligned(app, doctree):
    """Text in columns keeps its lines; other code is wrapped where the screen is narrower (fsdpx.css)."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "text" and re.search(r"\S {2,}\S", block.astext()):
            block["classes"].append("aligned")


def setup(app):
    app.connect("autodoc-process-docstring", plain)
    app.connect("doctree-resolved", terms.on_page)
    app.connect("doctree-read", depends)
    app.connect("doctree-read", aligned)
