"""Sphinx: how the documentation is built. The package is imported from the folder above, it need not be installed."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import apipages
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
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them
autodoc_preserve_defaults = True


def plain(app, what, name, obj, options, lines):
    """Docstrings are plain text with `code` in back quotes, and NumPy's sections of one line per entry; this makes them
    what reStructuredText wants."""
    found, section, owner = [], False, name if what == "class" else name.rpartition(".")[0]
    if what == "class":
        lines += apipages.inherit_docstring(obj, links)
    for line, after in zip(lines, [*lines[1:], ""], strict=False):
        entry = re.fullmatch(r"(\S.*?) : (.*)", line) if section else None
        if re.fullmatch(r"-{3,}", after) and line:
            found += [f"**{line}**"]
        elif re.fullmatch(r"-{3,}", line):
            section = True
            found.append("")
        elif entry:
            found.append(f"- {_code(entry[1])}: {_escaped(entry[2], owner)}")
        elif section and after.startswith("    ") and line and not line.startswith(" "):  # its text is in the next line
            found.append(f"- {_code(line)}:")
        elif section and line.startswith("    "):  # an entry goes on
            found.append("  " + _escaped(line.strip(), owner))
        else:
            section = section and line != ""
            found.append(line if line.startswith("    ") else _escaped(line, owner))
            if line.startswith("    ") and found[-2:-1] == [""] and found[-3:-2] and found[-3].endswith(":"):
                found[-3] = found[-3].rstrip(":") + "::"  # a sample of code
    lines[:] = found


def _escaped(line, owner=""):
    parts = re.split(r"(`[^`]+`)", line)
    plain = (
        _code(part.strip("`"), owner) if part.startswith("`") else re.sub(r"([*|_\\])", r"\\\1", part) for part in parts
    )
    return re.sub(r"\bdocs(?:/|: )([\w/-]+)(?:\.md)?\b", r":doc:`/\1`", "".join(plain))


def _code(text, owner=""):
    """Code, and a link if the reference documents it; owner: the class in whose docstring it is."""
    target = links.get(text) or links.get(f"{owner}.{text}")
    return f":py:obj:`{text} <{target}>`" if target else f"``{text}``"


entries, links = [], {}


def make_pages(app):
    """Write the pages of classes and functions."""
    entries[:] = apipages.read_entries(Path(app.srcdir, "reference"))
    links.update(apipages.list_links(entries))
    apipages.write_pages(Path(app.srcdir, apipages.FOLDER), apipages.make_pages(entries))


def complete(app, name, source):
    """Complete pages of the reference: tables of what they declare, and the commands."""
    folder, _, page = name.rpartition("/")
    if folder == "reference":
        source[0] = apipages.link_pages(page, source[0], _escaped)
    if name == "reference/command-line":
        source[0] = source[0].replace("% commands\n", apipages.describe_commands())


side_bars = {}


def show_side_bar(app, name, template, context, doctree):
    """List classes and functions of a page of the reference in the side bar, on this page and theirs."""
    folder, _, page = name.rpartition("/")
    if folder not in ("reference", apipages.FOLDER) or page == "index":
        return
    own = folder == "reference"
    group = page if own else next(entry.page for entry in entries if entry.name == page)
    make = context["toctree"]

    def make_tree(**options):
        key = folder, group
        if key not in side_bars:
            tree = make(**options)
            side_bars[key] = apipages.make_side_bar(tree, group, entries, "api/" if own else "")
        return side_bars[key]

    context["toctree"] = make_tree


def mark_page(app, name, template, context, doctree):
    """Mark the page of a class in the side bar, after the theme has made it."""
    if name.startswith(apipages.FOLDER):
        link = f'"toctree-l3"><a class="reference internal" href="{name.rpartition("/")[2]}.html">'
        tree = context["furo_navigation_tree"].replace(" current-page", "")
        context["furo_navigation_tree"] = tree.replace(link, link.replace("l3", "l3 current current-page"))


def depends(app, doctree):
    """Rebuild a page when what makes its links has changed."""
    for name in ("glossary.md", "terms.py", "conf.py", "apipages.py"):
        app.env.note_dependency(str(Path(app.srcdir, name)))


def aligned(app, doctree):
    """Text in columns keeps its lines; other code is wrapped where the screen is narrower (fsdpx.css)."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "text" and re.search(r"\S {2,}\S|\n {8,}\S", block.astext()):
            block["classes"].append("aligned")


def setup(app):
    app.connect("builder-inited", make_pages)
    app.connect("source-read", complete)
    app.connect("html-page-context", show_side_bar, priority=400)  # the theme has 500
    app.connect("html-page-context", mark_page, priority=600)
    app.connect("autodoc-process-docstring", plain)
    app.connect("doctree-resolved", terms.on_page)
    app.connect("doctree-read", depends)
    app.connect("doctree-read", aligned)
