"""A class name has one meaning in the whole package."""

import ast
from collections import defaultdict
from pathlib import Path

from reading import NAME, Package

PACKAGE = Package.of(Path(__file__).parents[1] / NAME)

TWICE = {
    "Constant": "first values of a parameter (nn.init), and a learning rate (optim.schedules)",
    "Linear": "a layer, and a learning rate (optim.schedules)",
}
"""Class names that users reach through two namespaces, as in PyTorch."""


def classes(package: Package) -> dict[str, list[str]]:
    """Class name -> the files that define it."""
    found = defaultdict(list)
    for file in package.sources:
        for node in package.nodes(file):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(file)
    return found


def test_a_class_name_has_one_meaning() -> None:
    several = {name: files for name, files in classes(PACKAGE).items() if len(files) > 1}
    assert several.keys() == TWICE.keys(), several
