"""Lazy imports of packages: names are imported when first used, and declared once for both type checkers and Python."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["LazyMethod", "make_lazy_attributes"]


def make_lazy_attributes(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the functions `__getattr__` and `__dir__` and the list `__all__` for a package, derived from the imports
    in its source.

    Every `from MODULE import NAME as NAME` in the package's `__init__.py` declares a name; names declared under `if
    TYPE_CHECKING` are imported when first used. `NAME: TYPE` declares a subpackage that can be called like a function;
    TYPE is its type for type checkers. If a subpackage and an object in it have the same name (`fsdpx.launch`), the
    name refers to the subpackage.

    Parameters
    ----------
    package : `__name__` of the package
    """
    module = sys.modules[package]
    homes = _map_names_to_modules(package, module.__loader__.get_source(package))  # type: ignore[union-attr]
    names = sorted(homes)

    def import_name(name: str) -> Any:
        if name not in homes:
            from fsdpx.core.base.name_hints import make_attribute_error

            raise make_attribute_error(package, name, names)
        from fsdpx.core.base.extensions import import_extension_module

        full_name = f"{package}.{name}"
        if homes[name] == package:
            return import_extension_module(full_name, full_name)
        home = import_extension_module(homes[name], full_name)
        inside = getattr(home, name, home)
        imported = (
            import_extension_module(f"{homes[name]}.{name}", full_name) if inside is home else inside
        )  # the name may refer to a submodule
        return vars(module).setdefault(name, imported)

    return import_name, names.copy, names


def _map_names_to_modules(package: str, source: str) -> dict[str, str]:
    """Return a dict {name: module} that maps each name declared in a package's source to the module to import it
    from."""
    homes: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            homes |= {alias.name: node.module for alias in node.names if alias.name == alias.asname}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            homes[node.target.id] = package
    return homes


class LazyMethod:
    """A descriptor for a method whose function is imported from another module when it is first used.

    Parameters
    ----------
    function : "module:name" of the function
    """

    def __init__(self, function: str) -> None:
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        module, _, name = self._function.partition(":")
        function = getattr(import_module(module), name)
        setattr(self._owner, self._name, function)
        return function.__get__(instance, owner)
