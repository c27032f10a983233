"""Arrays of compiled functions whose addresses are taken stay allocated.

Numba frees an array after the last statement that names it. An address taken before a loop, `at = a.ctypes.data`, does
not count, so the loop would read and write freed memory: other threads then see their arrays change, or the process
aborts later.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import fsdpx

COMPILED = sorted(path for path in Path(fsdpx.__file__).parent.rglob("*.py") if "compiled" in path.as_posix())
ALLOCATES = {"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "copy", "ascontiguousarray"}


def find_freed_arrays(function: ast.FunctionDef) -> set[str]:
    """Names of arrays that the function allocates, whose addresses it takes outside of any loop, or in the loop in
    which they are allocated, without keeping them alive."""
    allocated: dict[str, ast.AST | None] = {}
    addressed: dict[str, list[ast.AST | None]] = {}
    kept: set[str] = set()
    for loop, node in walk_with_loops(function, None):
        if isinstance(node, ast.Assign):
            allocated |= dict.fromkeys(find_allocated_names(node), loop)
        elif name := find_addressed_name(node):
            addressed.setdefault(name, []).append(loop)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "keep_alive":
            kept |= {one.id for one in node.args if isinstance(one, ast.Name)}
    return {name for name, loop in allocated.items() if loop in addressed.get(name, ())} - kept


def walk_with_loops(node: ast.AST, loop: ast.AST | None) -> Iterator[tuple[ast.AST | None, ast.AST]]:
    """Every node below `node`, with the innermost loop around it."""
    for child in ast.iter_child_nodes(node):
        yield loop, child
        yield from walk_with_loops(child, child if isinstance(child, ast.For | ast.While) else loop)


def find_allocated_names(node: ast.Assign) -> Iterator[str]:
    for target in node.targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        for name, value in pairs:
            called = value.func if isinstance(value, ast.Call) else None
            if isinstance(name, ast.Name) and isinstance(called, ast.Attribute) and called.attr in ALLOCATES:
                yield name.id


def find_addressed_name(node: ast.AST) -> str:
    """`name` of the expression `name.ctypes.data`, "" of any other."""
    if isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(holder := node.value, ast.Attribute):
        return holder.value.id if holder.attr == "ctypes" and isinstance(holder.value, ast.Name) else ""
    return ""


def test_no_address_outlives_its_array() -> None:
    found, addresses = {}, 0
    for path in COMPILED:
        for node in ast.walk(ast.parse(path.read_text())):
            addresses += find_addressed_name(node) != ""
            if isinstance(node, ast.FunctionDef) and (names := find_freed_arrays(node)):
                found[f"{path.name}:{node.lineno} {node.name}"] = names
    assert addresses > 20
    assert found == {}


def test_what_is_found() -> None:
    def names(text: str) -> set[str]:
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        return find_freed_arrays(function)

    assert names("def f(n):\n a, b = np.zeros(n), 1\n at = a.ctypes.data\n for i in range(n):\n  run(at)") == {"a"}
    assert names("def f(n):\n a = np.zeros(n)\n for i in range(n):\n  run(a.ctypes.data)") == set()
    assert names("def f(n):\n for i in range(n):\n  a = np.zeros(n)\n  run(a.ctypes.data)") == {"a"}
    assert names("def f(a):\n run(a.ctypes.data)") == set()
    assert names("def f(n):\n a = np.zeros(n)\n run(a.ctypes.data)\n keep_alive(a)") == set()
