"""Names of other libraries that a module of fsdpx is asked for, and names that do not exist at all."""

import ast
import copy
import inspect
import pickle
import re
from types import ModuleType

import pytest

import fsdpx
from fsdpx import data, nn, optim, words

MODULES = [fsdpx, nn, optim, data]
SAID = [
    (nn, "Sequential", "nn.Chain"),
    (nn, "Module", "nn.Composite, or a torch.nn.Module"),
    (nn, "BCEWithLogitsLoss", "nn.BCEWithLogits"),
    (optim, "lr_scheduler", "optimizer=optim.AdamW(lr=optim.schedules.Cosine(...))"),
    (data, "TensorDataset", "data.ArrayDataset"),
    (fsdpx, "FSDP", 'strategy="fsdp"'),
    (fsdpx, "DDP", 'strategy="ddp"'),
    (fsdpx, "init_process_group", "fsdpx.init()"),
]


@pytest.mark.parametrize(("module", "name", "ours"), SAID)
def test_a_name_of_another_library_says_what_to_write(module: ModuleType, name: str, ours: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    text = f"module {module.__name__!r} has no attribute {name!r}; here that is {ours}"
    assert str(caught.value).startswith(text)


def test_a_slip_has_the_nearest_name() -> None:
    with pytest.raises(AttributeError, match=r"^module 'fsdpx\.nn' has no attribute 'Liner'; did you mean 'Linear'\?$"):
        nn.Liner  # noqa: B018


@pytest.mark.parametrize("name", ["Sequential", "nothing_like_it", "__wrapped__", "_Linear"])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_who_asks_whether_a_name_is_there_gets_no_for_an_answer(module: ModuleType, name: str) -> None:
    assert not hasattr(module, name)
    assert getattr(module, name, None) is None
    with pytest.raises(AttributeError):
        inspect.getattr_static(module, name)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_what_looks_at_modules_goes_on_as_before(module: ModuleType) -> None:
    assert {name for name, _ in inspect.getmembers(module)} >= set(module.__all__)
    assert inspect.getmodule(nn.Linear) is not None
    assert inspect.unwrap(module) is module  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(module)
    assert copy.copy(nn.Linear) is pickle.loads(pickle.dumps(nn.Linear)) is nn.Linear


@pytest.mark.parametrize("ours", sorted(set(words.OTHERS.values())))
def test_what_the_table_says_is_there(ours: str) -> None:
    for home, name in re.findall(r"(?<![\w.])(fsdpx|nn|optim|data)\.((?:\w+\.)*\w+)", ours):
        found = {"fsdpx": fsdpx, "nn": nn, "optim": optim, "data": data}[home]
        for part in name.split("."):
            found = getattr(found, part)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_type_checker_does_not_take_any_name(module: ModuleType) -> None:
    """`__getattr__` of a module would tell it that every name is there."""
    found = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.FunctionDef | ast.If)]
    guarded = [ast.unparse(node.test) for node in found if isinstance(node, ast.If) and "__getattr__" in ast.dump(node)]
    assert guarded == ["not TYPE_CHECKING"]
    assert "__getattr__" not in [node.name for node in found if isinstance(node, ast.FunctionDef)]
