"""The floors of the house: no file is part of a circle, nothing is too large, one file each opens and reads."""

import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from reading import NAME, Package, count_code_lines, folder_of, used_at_import

from fsdpx.core.base.lazy_names import _map_names_to_modules

ROOT = Path(__file__).parents[1]
PACKAGE = Package.of(ROOT / NAME)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

OPENED_ELSEWHERE = {
    "the kernel's own files, such as those of /proc": (
        "ext/gpu/visible_devices.py find_loaded_mpi_library_path read_text",
        "core/comm/mpi/mpi_init_watchdog.py get_process_start_time open",
        "core/comm/node/shared_windows.py get_shared_memory_id read_text",
        "core/comm/mpi/start.py _identify_job read_bytes", "core/comm/mpi/start.py _identify_job read_text",
        "core/comm/mpi/start.py _find_files_mapped_by_processes read_text",
        "core/base/processor.py read_cpuinfo_field read_text",
        "core/state/footprint.py _find_control_group_limits read_text",
        "core/state/footprint.py _parse_kilobyte_lines read_text",
        "core/state/footprint.py find_memory_budget read_text", "ext/watch/rank_exits.py get_process_state read_text",
        "__main__.py main open",
    ),
    "sources of this package, and of modules that are imported anyway": (
        "ext/gpu/kernels.py _build_module read_text", "ext/native/code_cache.py hash_files read_bytes",
        "examples/finetune.py load_or_train_model read_text",
    ),
    "what this job has just made, under a random name or in its private folder": (
        "core/comm/node/shared_file.py _open_named_file open",
        "core/comm/node/shared_file.py _open_descriptor_of_process open",
        "launch/rank_status.py open_pipe_that_reveals_rank_death mkfifo",
        "launch/rank_status.py open_pipe_that_reveals_rank_death open",
        "launch/rank_status.py open_and_unlink_lifeline_pipe open", "examples/finetune.py write_conversations open",
        "core/checkpoint/save.py _write_checksum_file touch", "core/checkpoint/format.py create_zero_filled_file open",
    ),
    "they look at the open file or folder themselves": (
        "core/checkpoint/format.py open_regular_file open", "core/checkpoint/format.py sync_folder open",
        "core/comm/mpi/mpi_init_watchdog.py _list_folder_if_private open",
    ),
    "output that the user names, which may well be a pipe, as /dev/stdout is": (
        "launch/bench.py _print_and_write_on_rank0 write_text", "launch/bench.py _require_writable_on_rank0 open",
    ),
    "the folder of a test": ("testing/chaos.py record_step open", "testing/chaos.py read_starts read_text"),
}  # fmt: skip
"""Where files are opened past `fsdpx/core/base/safe_files.py`, "file function call", by the reason why they may be."""

SHARE, FIELDS, LINES = 0.18, 15, 65


def none(wrong: list[str]) -> None:
    """All that is wrong is shown, one below the other."""
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def test_there_are_no_more_lines_of_code_than_the_ceiling() -> None:
    lines, most = sum(map(count_code_lines, PACKAGE.sources.values())), int((ROOT / ".ceiling").read_text())
    assert lines <= most, f"{lines} lines of code, and .ceiling allows {most}: make room, or write a decision"


def test_no_circle_of_files() -> None:
    grimp = pytest.importorskip("grimp", reason="import-linter is not installed: pip install '.[dev]'")
    graph = grimp.build_graph(NAME)
    TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}).prepare()


def test_program_needs_the_standard_library_only() -> None:
    files = [file for file in PACKAGE.sources if file.startswith("core/program/")]
    assert files
    none([f"{f} imports {m}" for f in files for m in sorted(PACKAGE.foreign(f) - sys.stdlib_module_names)])


def test_what_is_imported_nowhere_is_no_dependency() -> None:
    names = {line.partition(">=")[0].replace("-", "_") for line in PROJECT["project"]["dependencies"]}
    assert names == names & {name for file in PACKAGE.sources for name in PACKAGE.foreign(file)}


def test_every_folder_is_in_the_core_or_an_extension() -> None:
    """`make lint` holds the imports of all files against the contracts in pyproject.toml."""
    layers, core, *_ = PROJECT["tool"]["importlinter"]["contracts"]
    floors = {name.strip() for layer in layers["layers"] for name in re.split("[|:]", layer)}
    extensions = set(core["forbidden_modules"])
    parts = {folder_of(file) or file.removesuffix(".py") for file in PACKAGE.sources}
    for part in parts - {"core", "ext", "__init__", "__main__"}:
        name = f"{NAME}.{part.replace('/', '.')}"
        assert (name in floors) != (name in extensions or name.startswith(f"{NAME}.ext.")), name


def test_tests_of_the_core_begin_without_extensions() -> None:
    """Which they would import as soon as they are collected. Contracts (`testing`) and what feeds a trainer (`data`)
    are no tests' subject."""
    places = {NAME: "__init__.py", "nn": "nn/__init__.py", "optim": "optim/__init__.py"}
    homes = {}
    for part, file in places.items():
        module = NAME if part == NAME else f"{NAME}.{part}"
        homes |= {f"{part}.{name}": home for name, home in _map_names_to_modules(module, PACKAGE.sources[file]).items()}
    outside = tuple(f"{NAME}.{name}" for name in ("ext", "plan", "models", "launch", "examples"))
    tests = Package.of(ROOT / "tests").sources
    wrong = [
        f"{file} imports {module}: import it in the test, and mark that with needs()"
        for file in tests
        if file.startswith(("core/", "nn/", "optim/"))
        for module in sorted(used_at_import(tests[file], homes))
        if module.startswith(outside)
    ]
    none(wrong)


def test_no_folder_is_too_large() -> None:
    lines = PACKAGE.lines()
    most = SHARE * sum(lines.values())
    none([f"{name} has {n} lines, and may have {most:.0f}" for name, n in lines.items() if name and n > most])


def test_no_class_has_too_many_fields() -> None:
    found = PACKAGE.fields().items()
    none([f"{where} has {len(names)}: {', '.join(sorted(names))}" for where, names in found if len(names) > FIELDS])


def test_no_function_is_too_long() -> None:
    none([f"{where} has {n} lines" for where, n in PACKAGE.lengths().items() if n > LINES])


def test_one_file_reads_the_environment() -> None:
    """`launch` hands all variables on to the processes it starts, and reads none."""
    assert PACKAGE.environment("core/base/environment.py")
    found = [where for file in {*PACKAGE.sources} - {"core/base/environment.py"} for where in PACKAGE.environment(file)]
    none([where for where in found if not (where.startswith("launch/") and where.endswith(" whole"))])


def test_files_that_others_may_have_written_are_opened_in_one_file() -> None:
    """Past `fsdpx.core.base.safe_files`."""
    files = [PACKAGE.opened(file) for file in PACKAGE.sources if file != "core/base/safe_files.py"]
    found = {where: line for places in files for where, line in places.items()}
    allowed = [where for places in OPENED_ELSEWHERE.values() for where in places]
    none([f"{line}: use fsdpx.core.base.safe_files" for where, line in found.items() if where not in allowed])
    none([f"{where} is allowed and gone" for where in allowed if where not in found])


def test_import_loads_nothing_heavy() -> None:
    """In whatever way, one after the other: what the first did not load must not be loaded by the others either."""
    ways = "import fsdpx; from fsdpx import nn, optim, data; import fsdpx.core.comm; from fsdpx import distribute"
    heavy = "mpi4py", "numba", "cupy", "torch", "fsdpx.ext.elastic.call_runner"
    code = f"{ways}; import sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_all_there() -> None:
    import fsdpx

    none([name for name in fsdpx.__all__ if getattr(fsdpx, name, None) is None])
    assert set(fsdpx.__all__) <= set(dir(fsdpx))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fsdpx.nothing  # noqa: B018


def test_tests_that_make_check_leaves_out_exist() -> None:
    lines = (ROOT / "tests" / "long_tests.txt").read_text().splitlines()[1:]
    assert lines == sorted(set(lines))
    gone = []
    for line in lines:
        file, *classes, function = line.split("::")
        names = [] if function.startswith("test_contract") else [*classes, function]  # see merge_checks of contracts.py
        source = (ROOT / file).read_text()
        if not all(re.search(rf"^\s*(class|def) {name}\b", source, re.MULTILINE) for name in names):
            gone.append(f"{line} is no test")
    none(gone)
