"""What stubs declare for type checkers is what calls take: names, keywords and signatures."""

import ast
import dataclasses
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from present import needs

import fsdpx
from fsdpx.core.base.config import _HALVES as HALVES
from fsdpx.core.base.config import PRECISIONS, PRESETS
from fsdpx.core.base.extensions import EXTENSIONS
from fsdpx.core.checkpoint.save import SaveChoices
from fsdpx.core.comm.init import BACKENDS
from fsdpx.core.compression import list_codec_names
from fsdpx.core.program import SCHEDULES
from fsdpx.core.trainer.call_runner import require_valid_weights_choice
from fsdpx.core.trainer.distribute import OPTIONS, PLAN_OPTIONS
from fsdpx.core.trainer.recipe import DistributionChoices, TrainingChoices
from fsdpx.nn.tensor_plan import SEQUENCES

PACKAGE = Path(fsdpx.__file__).parent
STUB = "core/base/option_names.pyi"

TABLES = {
    "Backend": [*BACKENDS],
    "CodecName": list_codec_names(),
    "Device": ["cpu", *EXTENSIONS["device"]],
    "PrecisionName": [*PRECISIONS, *HALVES],
    "ScheduleName": [*SCHEDULES],
    "SequenceMode": [name for name in SEQUENCES if name],
    "Strategy": [*PRESETS, *EXTENSIONS["strategy"], *EXTENSIONS["planner"]],
}
TAKEN_BY = {"DtypeName": [fsdpx.Precision, SaveChoices], "WeightsChoice": [require_valid_weights_choice]}


def find_node(file: str, name: str) -> Any:
    """Return the definition of this name: the last one, of a function with overloads."""
    nodes = ast.walk(ast.parse((PACKAGE / file).read_text()))
    return [node for node in nodes if getattr(node, "name", "") == name][-1]


def read_fields(file: str, name: str) -> dict[str, str]:
    """Return the annotations of a class by name, as they are written."""
    fields = (node for node in find_node(file, name).body if isinstance(node, ast.AnnAssign))
    return {node.target.id: ast.unparse(node.annotation) for node in fields if isinstance(node.target, ast.Name)}


def read_literals() -> dict[str, list[str]]:
    """Return the names of each `Literal` of the stub."""
    nodes = [node for node in ast.parse((PACKAGE / STUB).read_text()).body if isinstance(node, ast.Assign)]
    return {ast.unparse(node.targets[0]): [*ast.literal_eval(node.value.slice)] for node in nodes}  # type: ignore[attr-defined]


@pytest.mark.parametrize("literal", TABLES)
def test_names_are_those_of_the_table(literal: str) -> None:
    assert {*read_literals()[literal]} == {*TABLES[literal]}, (
        f"type checkers know these names from the Literal {literal} of fsdpx/{STUB}: change it together with the table"
    )


@pytest.mark.parametrize("literal", TAKEN_BY)
def test_every_name_is_taken(literal: str) -> None:
    for name in read_literals()[literal]:
        for call in TAKEN_BY[literal]:
            call(name)


def test_every_list_of_names_is_tested() -> None:
    assert {*read_literals()} == {*TABLES, *TAKEN_BY}


def test_distribute_takes_the_keywords() -> None:
    keywords = read_fields(STUB, "RuntimeArgs")
    options = read_fields("core/trainer/recipe.py", "RuntimeOptions")
    assert {name: hint for name, hint in keywords.items() if name not in PLAN_OPTIONS} == options
    hints, parameters = get_type_hints(fsdpx.distribute), signature(fsdpx.distribute).parameters
    assert {*hints} - {"rarely", "return"} | {*keywords} == {*OPTIONS}
    for kind, looser in ((TrainingChoices, {"model", "loss", "optimizer"}), (DistributionChoices, {"planned"})):
        fields = get_type_hints(kind)
        assert {name: fields[name] for name in kind.__dataclass_fields__.keys() - looser}.items() <= hints.items()
        for field in dataclasses.fields(kind):  # options with a default are declared twice
            assert field.name in ("model", "planned") or field.default == parameters[field.name].default, field.name


def read_signature(file: str, name: str) -> str:
    function = find_node(file, name)
    return f"({ast.unparse(function.args)}) -> {ast.unparse(function.returns)}"


def test_as_distributed_takes_what_distribute_takes() -> None:
    signature = read_signature("core/trainer/distribute.py", "distribute")
    assert read_signature("nn/distribution.pyi", "as_distributed") == signature


def test_generate_takes_the_keywords() -> None:
    arguments = find_node("core/trainer/trainer.py", "generate").args.kwonlyargs
    assert read_fields(STUB, "GenerateArgs") == {one.arg: ast.unparse(one.annotation) for one in arguments}


@needs("launch")
def test_launch_takes_the_keywords() -> None:
    fields = read_fields("launch/options.py", "LaunchConfig")
    wider = {name: hint.replace("Path | None", "str | Path | None") for name, hint in fields.items()}
    assert read_fields("launch/options.py", "LaunchArgs") == wider


def test_a_schedule_may_be_a_path(tmp_path: Path) -> None:
    """Type checkers ask for a path where a schedule is neither a name nor a function; a string does as well."""
    assert DistributionChoices(schedule=tmp_path / "mine.txt").schedule == str(tmp_path / "mine.txt")
