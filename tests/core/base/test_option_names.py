"""Names and keywords that are declared for type checkers are those that calls take."""

import ast
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from present import needs

import fsdpx
from fsdpx.core.base.config import _HALVES as HALVES
from fsdpx.core.base.config import PRECISIONS, PRESETS
from fsdpx.core.base.extensions import EXTENSIONS
from fsdpx.core.base.option_names import NAMES
from fsdpx.core.checkpoint.save import SaveChoices
from fsdpx.core.comm.init import BACKENDS
from fsdpx.core.compression import codec_names
from fsdpx.core.program import SCHEDULES
from fsdpx.core.trainer.call_runner import check_weights_choice
from fsdpx.core.trainer.distribute import OPTIONS, PLAN_OPTIONS
from fsdpx.core.trainer.recipe import DistributionChoices, RuntimeKeywords, RuntimeOptions, TrainingChoices
from fsdpx.nn.tensor_plan import SEQUENCES

TABLES = {
    "backend": [*BACKENDS],
    "codec": codec_names(),
    "device": ["cpu", *EXTENSIONS["device"]],
    "precision": [*PRECISIONS, *HALVES],
    "schedule": [*SCHEDULES],
    "sequence": [name for name in SEQUENCES if name],
    "strategy": [*PRESETS, *EXTENSIONS["strategy"], *EXTENSIONS["planner"]],
}


@pytest.mark.parametrize("option", TABLES)
def test_names_are_those_of_the_table(option: str) -> None:
    assert {*get_args(NAMES[option])} == {*TABLES[option]}


def test_every_declared_name_is_taken() -> None:
    for name in get_args(NAMES["dtype"]):
        fsdpx.Precision(name)
        SaveChoices(name)
    for name in get_args(NAMES["weights"]):
        check_weights_choice(name)
    assert {*NAMES} == {*TABLES, "dtype", "weights"}


def list_fields(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__dataclass_fields__}


def test_distribute_takes_what_its_keywords_declare() -> None:
    keywords = get_type_hints(RuntimeKeywords)
    assert {name: hint for name, hint in keywords.items() if name not in PLAN_OPTIONS} == list_fields(RuntimeOptions)
    assert {*keywords} - {*list_fields(RuntimeOptions)} == {*PLAN_OPTIONS}
    hints = get_type_hints(fsdpx.distribute)
    for kind, looser in ((TrainingChoices, {"model", "loss", "optimizer"}), (DistributionChoices, {"planned"})):
        for name in list_fields(kind).keys() - looser:
            assert list_fields(kind)[name] == hints[name], name
    assert {*hints} - {"rarely", "return"} | {*keywords} == {*OPTIONS}


def read_signature(path: Path, name: str) -> str:
    function = next(n for n in ast.walk(ast.parse(path.read_text())) if getattr(n, "name", "") == name)
    return f"({ast.unparse(function.args)}) -> {ast.unparse(function.returns)}"


def test_as_distributed_takes_what_distribute_takes() -> None:
    package = Path(fsdpx.__file__).parent
    signature = read_signature(package / "core/trainer/distribute.py", "distribute")
    assert read_signature(package / "nn/distribution.pyi", "as_distributed") == signature


@needs("launch")
def test_launch_takes_what_its_keywords_declare() -> None:
    from fsdpx.launch.options import LaunchConfig, LaunchKeywords

    wider = {name: str | hint if hint == Path | None else hint for name, hint in list_fields(LaunchConfig).items()}
    assert get_type_hints(LaunchKeywords) == wider


def test_a_schedule_may_be_a_path(tmp_path: Path) -> None:
    """Type checkers ask for a path where a schedule is neither a name nor a function; a text does as well."""
    assert DistributionChoices(schedule=tmp_path / "mine.txt").schedule == str(tmp_path / "mine.txt")
