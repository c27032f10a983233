"""Names of other libraries that a module of fsdpx is asked for, and names that do not exist at all."""

import ast
import copy
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fsdpx
from fsdpx import data, nn, optim
from fsdpx.core.base import name_hints as words

MODULES = [fsdpx, nn, optim, data]
SAID = [
    (nn, "ModuleList", "nn.Sequential"),
    (nn, "Module", "nn.Composite, or a torch.nn.Module"),
    (nn, "BCELoss", "nn.BCEWithLogitsLoss, without the sigmoid before it"),
    (optim.schedules, "CosineAnnealingLR", "optim.schedules.Cosine"),
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


@pytest.mark.parametrize("name", ["ModuleList", "nothing_like_it", "__wrapped__", "_Linear"])
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


@pytest.mark.parametrize("ours", sorted(set(words.NAMES_ELSEWHERE.values())))
def test_what_the_table_says_is_there(ours: str) -> None:
    for home, name in re.findall(r"(?<![\w.])(fsdpx|nn|optim|data)\.((?:\w+\.)*\w+)", ours):
        found = {"fsdpx": fsdpx, "nn": nn, "optim": optim, "data": data}[home]
        for part in name.split("."):
            found = getattr(found, part)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_type_checker_sees_the_imports_and_no_getattr(module: ModuleType) -> None:
    """`__getattr__` of a module would tell it that every name is there."""
    (choice,) = (node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If))
    assert ast.unparse(choice.test) == "TYPE_CHECKING"
    assert "__getattr__" in ast.dump(choice.orelse[0])
    assert "__getattr__" not in "".join(map(ast.dump, choice.body))


def test_a_name_is_imported_when_it_is_used(tmp_path: Path) -> None:
    """Whatever stands around it; a module does not take the place of a function with its name."""
    package = tmp_path / "odd"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING, Any\nfrom fsdpx.core.base.lazy_names import make_lazy_attributes\n"
        "if TYPE_CHECKING:\n    from json import dumps as dumps, loads as unseen\n"
        "    from odd import part as part\n    from xml import dom as dom\n"
        "    from odd.called.inner import called as called\n    plan: Any\n"
        "else:\n    __getattr__, __dir__, __all__ = make_lazy_attributes(__name__)\n"
    )
    (package / "called").mkdir()
    (package / "called/__init__.py").touch()
    (package / "called/inner.py").write_text("called = 1")
    (package / "part.py").write_text("x = 1")
    (package / "plan.py").write_text("x = 2")
    code = (
        "import sys, odd; assert 'json' not in sys.modules and 'odd.part' not in sys.modules\n"
        "assert dir(odd) == odd.__all__ == ['called', 'dom', 'dumps', 'part', 'plan'], odd.__all__\n"
        "import json; assert odd.dumps is json.dumps is vars(odd)['dumps'] and (odd.part.x, odd.plan.x) == (1, 2)\n"
        "assert odd.dom is sys.modules['xml.dom']\n"
        "import odd.called.inner; assert odd.called.inner.called == 1 and not hasattr(odd, 'unseen')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_layers_that_nobody_asks_for_are_not_loaded() -> None:
    code = (
        "import sys; from fsdpx import nn, optim, data, models; nn.Linear, nn.sharding.linearize, optim.SGD; "
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "fsdpx.nn.linear" in loaded
    heavy = "ext.moe ext.lora ext.fields nn.gpt nn.llama optim.muon data.loader models.pretrained_reader".split()
    assert [name for name in heavy if f"fsdpx.{name}" in loaded] == []


def test_a_function_with_the_name_of_its_module_is_that_function() -> None:
    code = (
        "import fsdpx.nn.layer_list; from fsdpx import nn; "
        "assert callable(nn.sharding.linearize), nn.sharding.linearize"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
