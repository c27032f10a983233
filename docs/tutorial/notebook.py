"""The course as a notebook: `python docs/tutorial/notebook.py` makes course.ipynb of course.md."""

import base64
import json
import re
from pathlib import Path

PAGE = Path(__file__).with_name("course.md")


def cells(text: str) -> list[dict[str, object]]:
    """Text and programs of a page, in turns; what programs print is left out, the notebook prints it itself. Pictures
    are those of a light page."""
    found: list[dict[str, object]] = []
    text = re.sub(r"```\{image\} (\S+)\n:class: only-light\n:alt: (.*)\n```", r"![\2](\1)", text)
    text = re.sub(r"```\{image\} \S+\n:class: only-dark\n.*\n```\n\n", "", text)
    text = re.sub(r"\n```text\n.*?^```\n", "", text, flags=re.S | re.M)
    for i, piece in enumerate(re.split(r"^```python\n(.*?)^```\n", text, flags=re.S | re.M)):
        source = piece.strip("\n").splitlines(keepends=True)
        if source and i % 2:
            found.append(
                {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}
            )
        elif source:
            found.append(markdown(piece.strip("\n")))
    return [{"id": f"cell-{i}", **cell} for i, cell in enumerate(found)]


def markdown(text: str) -> dict[str, object]:
    """A cell of text that needs no file beside it, as readers download the notebook alone: links to pages become
    names, and pictures lie in the cell."""
    text = re.sub(r"(?<!!)\[([^\]]+)\]\((?:\.\./)*([\w/-]+)\.md[^)]*\)", r"\1 (`docs/\2.md`)", text)
    pictures = re.findall(r"!\[[^\]]*\]\((\S+)\)", text)
    cell: dict[str, object] = {"cell_type": "markdown", "metadata": {}}
    if pictures:
        files = {path: PAGE.parent / path for path in pictures}
        data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in files.values()}
        cell["attachments"] = {name: {"image/png": content} for name, content in data.items()}
        for path, file in files.items():
            text = text.replace(f"]({path})", f"](attachment:{file.name})")
    return cell | {"source": text.splitlines(keepends=True)}


def notebook(text: str) -> str:
    """The page as nbformat 4.5 has it."""
    text, count = re.subn(r"This page is also available as a notebook, .*?\. ", "", text)
    assert count == 1, "the sentence that offers the notebook has changed"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells(text), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(PAGE.read_text()))
