"""What the core and each extension weigh, and what the core knows of extensions.

    python tests/parts.py

"imports" counts files of an extension that files of the core import: at run time, lazily or for types. "core" counts
lines of the core that use an extension's words, "spine" those of the files that every step goes through, and "branch"
those of the spine with a branch. A word that the core shares with an extension ("field" of a dataclass) is left out of
its list, and `OTHER_SENSES` has the places where a word of the list means something else.

    python tests/parts.py half     # prints the lines of the spine that are counted for an extension
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from reading import count_code_lines, folder_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fsdpx"
CORE = "core", "nn", "optim", "errors"
WORDS = {
    "ext/fields": r"\b(grids?|halos?|ghosts?|ghost_cells|rims?|place\.field|(?<!white )space)\b",
    "ext/offload": r"\b(offload\w*|disk|FETCH|STORE|EVICT|records)\b",
    "ext/compression": r"\b(codecs?|compress(ed|ion)|Int8|TopK|topk|PowerSGD|error feedback)\b",
    "ext/asynchronous": r"\b(pace\w*|own speed|Gossip|gossip|DiLoCo|diloco|local_sgd|asynchronous)\b",
    "core/array/shapes": r"\b(holds_no_data|holds_data|shape-only|ShapeArray|record_traffic)\b",
    "ext/observe": r"\b(record(er|ing)|trace[sd]?|tracer|chrome)\b",
    "ext/half": r"\b(halves|half|bf16|bfloat16|float16|16.bit|rounded|Rounded)\b",
    "ext/elastic": r"\b(elastic\w*|survivors?|survive\w*)\b",
    "ext/gpu": r"\b(gpus?|GPUs?|cuda|CUDA|cupy|CuPy|nccl|NCCL|streams?|device_map|on_gpu)\b",
}
"""Words by which a line of the core is seen to be about an extension. Arrays without data belong to the core, which
checks every model with them, and are counted beside the extensions. Two that stood here are the core's own: `clock`,
the observer of `core/engine/clock.py` that every engine has, and `wire`, the dtype in which a communicator sends
summands and the engine parameters."""
OTHER_SENSES = {
    # records of calls, "records" as a verb, and measurements on disk
    "ext/offload": r"CallRecord|call records|these records|first_error\(records|enumerate\(records|records (the|which)|"
    r"checks and records|(cached on|read them from|result is stored on) disk",
    # imports of the core's codec interface, and its table of codecs by page
    "ext/compression": r"from fsdpx\.core\.compression.*|CodecRules|CodecRoute|codecs\.",
    # a traceback; the layers that a composition calls; arrays that a codec keeps between steps
    "ext/observe": r"trace: (object|TracebackType)|error, trace\)|trace: ComposeTrace|self\.tracing.*|trace = Compose|"
    r"trace\.(inputs|steps|ties|get)|\"trace\"(: LedgerKind| if kept)",
    # without the extension, communicators transfer and add 16-bit numbers, and kernels convert them; half of a whole;
    # rounded to a multiple, or in the dtype of an array
    "ext/half": r"^core/comm/.*|kernels\.half import.*|(half|halves) (of|as|the size)|the half that|halves, I|"
    r"(each|other|one|first|second|both|input-gradient|weight-gradient) (half|halves)|rounded (up|which|so)|"
    r"(correctly|first|are|not) rounded",
    # the callback of `generate` for each token
    "ext/gpu": r"\bstream(:| :|,|\()",
}
"""Where a word of an extension's list means something else in the core, in a line that begins with its place."""
SPINE = (
    *("core/state", "core/engine", "core/trainer", "core/program", "optim", "nn/layer.py", "nn/container.py"),
    *("nn/layer_list.py", *(f"core/comm/{name}.py" for name in ("calls", "communicator", "backend", "mesh"))),
)
"""Where a path inside the package begins that belongs to the spine."""
BRANCH = re.compile(r"\b(if|elif|else|and|or)\b")
MLP = """
import sys, tempfile
import numpy as np
import fsdpx
from fsdpx import nn, optim
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
trainer = fsdpx.distribute(model, loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=1e-3), strategy="fsdp")
x, y = np.zeros((4, 8), np.float32), np.zeros(4, np.int64)
with tempfile.TemporaryDirectory() as folder:
    for _ in range(10):
        trainer.step(x, y)
    trainer.save(f"{folder}/saved")
    trainer.load(f"{folder}/saved")
"""
GPT = """
import sys, tempfile
import numpy as np
import fsdpx
from fsdpx import nn, optim
folder = tempfile.mkdtemp()
def train(comm):
    trainer = fsdpx.distribute(
        nn.GPT(vocab=32, d_model=16, n_layers=4, n_heads=2, seq_len=8), loss=nn.CrossEntropyLoss(),
        optimizer=optim.AdamW(lr=1e-3), mesh=fsdpx.Mesh(pipe=2, tensor=2), microbatches=2, comm=comm,
    )
    x = np.zeros((4, 8), np.int64)
    for _ in range(10):
        trainer.step(x, x)
    trainer.save(f"{folder}/saved")
    trainer.load(f"{folder}/saved")
    trainer.close()
fsdpx.spawn(train, 4)
"""
"""Two programs that train, save and load. Who runs them asks which files of fsdpx are loaded then."""


def part_of(file: Path) -> str:
    """The part of the core or the extension of a file, "core/comm" or "data"."""
    inner = file.relative_to(PACKAGE).as_posix()
    return folder_of(inner) or inner.removesuffix(".py")


def is_core(part: str) -> bool:
    return part.split("/")[0] in CORE


def is_spine(file: Path) -> bool:
    inner = file.relative_to(PACKAGE).as_posix()
    return any(inner == name or inner.startswith((f"{name}/", f"{name}_", f"{name}.py")) for name in SPINE)


def leaks(files: list[Path], part: str) -> list[tuple[str, str]]:
    """The lines of these files that use one of an extension's words in its sense, each with its place."""
    other, found = re.compile(OTHER_SENSES.get(part, "(?!)")), []
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            where = f"{file.relative_to(PACKAGE)}:{number}"
            if re.search(WORDS[part], other.sub("", f"{where}: {line}").removeprefix(where)):
                found.append((where, line))
    return found


def imports(file: Path) -> set[str]:
    """The modules of fsdpx that a file imports, as paths inside the package."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    names = (name.removeprefix("fsdpx.").replace(".", "/") for name in found if name.startswith("fsdpx."))
    return {name for name in names if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists()}


def loaded_files(program: str) -> list[str]:
    """Return the files of fsdpx that a fresh process has loaded after `program`, as paths inside the package.

    The first run on a machine compiles kernels, which loads the compiler: then a second one counts."""
    tell = (
        "\nprint(*(module.__file__ for name, module in sys.modules.items() if name.partition('.')[0] == 'fsdpx' and"
        " getattr(module, '__file__', None)))"
    )

    def run_program() -> list[str]:
        command = [sys.executable, "-c", program + tell]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        files = [Path(name) for name in done.stdout.split("\n")[-2].split() if name.endswith(".py")]
        return [file.relative_to(PACKAGE).as_posix() for file in files]

    loaded = run_program()
    return run_program() if "ext/native/compile.py" in loaded else loaded


def main() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    for part in (part for part in WORDS if part.split("/")[-1] in sys.argv[1:]):
        spine = [file for file in files if is_core(part_of(file)) and is_spine(file)]
        print(*(f"{where}: {line.strip()}" for where, line in leaks(spine, part)), sep="\n")
    if sys.argv[1:]:
        return
    count = {file: len(file.read_text().splitlines()) for file in files}
    core = [file for file in files if is_core(part_of(file))]
    lines, number, arrows = Counter[str](), Counter[str](), Counter[str]()
    for file in files:
        lines[part_of(file)] += count[file]
        number[part_of(file)] += 1
    for file in core:
        for name in imports(file):
            target = PACKAGE / f"{name}.py" if (PACKAGE / f"{name}.py").exists() else PACKAGE / name / "__init__.py"
            if not is_core(part_of(target)) and part_of(target) not in ("ext", "__init__"):
                arrows[part_of(target)] += 1
    spine = [file for file in core if is_spine(file)]
    print(f"{'part':24}{'lines':>8}{'files':>7}{'imports':>9}{'core':>7}{'spine':>7}{'branch':>8}")
    for part in WORDS.keys() - lines.keys():  # a folder of a part
        inner = [file for file in files if file.is_relative_to(PACKAGE / part)]
        lines[part], number[part] = sum(count[file] for file in inner), len(inner)
    for part in sorted(lines, key=lambda part: (not is_core(part), -lines[part])):
        row = f"{part:24}{lines[part]:8,}{number[part]:7}{arrows[part] or '':>9}"
        if part in WORDS:
            inside = [line for _, line in leaks(spine, part)]
            row += f"{len(leaks(core, part)):7}{len(inside):7}{sum(map(bool, map(BRANCH.search, inside))):8}"
        print(row)
    total = sum(count[file] for file in core)
    print(f"\ncore {total:,} lines in {len(core)} files; all {sum(count.values()):,} in {len(files)}")
    code = {file: count_code_lines(file.read_text()) for file in files}
    print(f"without comments and docstrings: core {sum(code[file] for file in core):,}, all {sum(code.values()):,}")
    print(f"spine {sum(count[file] for file in spine):,} lines in {len(spine)} files")
    for name, program in (("an MLP", MLP), ("GPT, pipe 2 x tensor 2", GPT)):
        files_loaded = [PACKAGE / file for file in loaded_files(program)]
        of_extensions = [file for file in files_loaded if not is_core(part_of(file)) and file.parent != PACKAGE]
        size = f"{sum(count[file] for file in files_loaded):,} lines in {len(files_loaded)} files"
        print(f"{name} that trains, saves and loads reads {size}, {len(of_extensions)} of them extensions")


if __name__ == "__main__":
    main()
