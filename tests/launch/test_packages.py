"""The recipes for Spack and EasyBuild have the names and versions of pyproject.toml."""

import ast
import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from trials import ROOT

import fsdpx

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SPACK = ROOT / "launch" / "spack" / "package.py"
(EASYCONFIG,) = (ROOT / "launch" / "easybuild").glob("*.eb")
VARIANTS = {"cuda12": "cuda", "cuda13": None}
"""Names of Spack's variants that are not those of our extras. The version of CUDA is a matter of py-cupy's own."""
NO_VARIANTS = {
    "mpich", "openmpi",  # of py-mpi4py: ^mpich
    "mkl", "onednn",  # wheels, which fsdpx finds next to Python
    "test", "dev", "docs",
}  # fmt: skip


def translate_to_spack(text: str) -> tuple[str, str]:
    """A requirement of pip as Spack's package with versions, and as the condition of its marker."""
    one = Requirement(text)
    name = one.name.lower().replace("_", "-")
    bounds = {part.operator: part.version for part in one.specifier}
    assert set(bounds) <= {">=", "<"}
    *head, last = bounds.get("<", "0").split(".")  # <0.6 is :0.5, which has all of 0.5 in it
    most = ".".join([*head, str(int(last) - 1)]) if "<" in bounds else ""
    conditions = {"": "", "python_version < '3.13'": "^python@:3.12", "python_version >= '3.13'": "^python@3.13:"}
    package = {"cupy-cuda12x": "cupy"}.get(name, name)
    return f"py-{package}@{bounds['>=']}:{most}", conditions[str(one.marker or "").replace('"', "'")]


def read_spack_calls(directive: str) -> list[tuple[str, dict[str, Any]]]:
    """The first argument and the keywords of each call of a directive in the recipe."""
    calls = [node for node in ast.walk(ast.parse(SPACK.read_text())) if isinstance(node, ast.Call)]
    named = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == directive]
    read = ast.literal_eval
    return [(read(node.args[0]), {word.arg: read(word.value) for word in node.keywords}) for node in named]


def read_easyconfig() -> dict[str, Any]:
    found: dict[str, Any] = {"SOURCE_TAR_GZ": "%(name)s-%(version)s.tar.gz"}
    exec(EASYCONFIG.read_text(), found)
    return found


def test_spack_needs_what_pip_needs() -> None:
    project = PROJECT["project"]
    wanted = {("python@" + project["requires-python"].removeprefix(">=") + ":", "")}
    wanted |= {translate_to_spack(text) for text in [*PROJECT["build-system"]["requires"], *project["dependencies"]]}
    extras = {VARIANTS.get(name, name): text for name, text in project["optional-dependencies"].items()}
    variants = {name: texts for name, texts in extras.items() if name is not None and name not in NO_VARIANTS}
    needs = {"cuda": "+cuda", "gloo": "+gloo"}
    for name, texts in variants.items():
        wanted |= {(translate_to_spack(text)[0] + needs.get(name, ""), f"+{name}") for text in texts}
    found = read_spack_calls("depends_on")
    assert {(spec, more.get("when", "")) for spec, more in found} == wanted
    assert len(found) == len(wanted)
    assert [spec for spec, more in found if more.get("type") == "build"] == ["py-setuptools@77:"]
    assert {name for name, _ in read_spack_calls("variant")} == set(variants)


def test_recipes_have_the_version_and_the_license() -> None:
    assert read_spack_calls("version") == [(fsdpx.__version__, {})]
    assert read_spack_calls("license") == [(PROJECT["project"]["license"], {})]
    recipe = read_easyconfig()
    assert recipe["version"] == fsdpx.__version__
    toolchain = f"{recipe['toolchain']['name']}-{recipe['toolchain']['version']}"
    assert EASYCONFIG.stem == f"{recipe['name']}-{recipe['version']}-{toolchain}"
    for text in (SPACK.read_text(), EASYCONFIG.read_text()):
        assert fsdpx.__version__ in text.partition("class ")[0]  # the commands to copy


def test_easybuild_has_versions_that_pip_would_take() -> None:
    recipe, lines = read_easyconfig(), EASYCONFIG.read_text()
    bundled = re.findall(r"\),  # (.*)", lines)
    there = dict(recipe["builddependencies"]) | dict(recipe["dependencies"])
    there |= dict(pair.split() for comment in bundled for pair in comment.split(", "))
    python = there["Python"]
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(python)
    for text in [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]:
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate({"python_version": python.rpartition(".")[0]}):
            assert one.specifier.contains(there[one.name]), text


@pytest.mark.parametrize("path", [SPACK, EASYCONFIG], ids=["spack", "easybuild"])
def test_recipes_invent_no_address_and_no_checksum(path: Any) -> None:
    assert not re.search(r"https?://|sha256|checksums *=", path.read_text())
