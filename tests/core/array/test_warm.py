"""After `warm` a kernel neither compiles nor loads anything; a cache that cannot be written is one warning."""

import sys

import numpy as np
import pytest
from amount import few
from programs import run_program

from fsdpx.core.array import parse_dtype
from fsdpx.core.array.kernels import choice
from fsdpx.core.engine.warmup import OTHER_WARMUPS, warm_up_kernels

COUNT = """
import gc
import numpy as np
from fsdpx.core.array import kernels
from fsdpx.core.engine.warmup import warm_up_kernels

def ready():
    from fsdpx.core.array.jit import CompiledFunction
    made = [f for f in gc.get_objects() if isinstance(f, CompiledFunction)]
    return {(f.function.__module__, f.function.__qualname__, kinds) for f in made for kinds in f.compiled_kinds}
"""


@pytest.mark.parametrize("dtype", few(["float32", "float64", "bf16"], 3))
def test_warm_reaches_every_compiled_kernel(dtype):
    """But what numbers and the optimizer call, by name: initial values come first, and `engine.warm` takes a step."""
    bodies, reached = {body.__code__: name for name, body in choice.import_all_compiled_kernels().items()}, set()
    sys.setprofile(lambda frame, event, argument: reached.add(bodies.get(frame.f_code)))
    try:
        warm_up_kernels([*choice.import_all_compiled_kernels(), *OTHER_WARMUPS], parse_dtype(dtype))
    finally:
        sys.setprofile(None)
    assert {*bodies.values()} - reached == {"normal", "round_randomly"}


@pytest.mark.parametrize("dtype", few(["float32", "float64", "float16", "bf16"], 4))
def test_warm_takes_forms_of_kernels(mode, dtype):
    forms = [f"{name}{form}" for name in ("gated", "gated_backward") for form in ("", " gelu", " gelu tanh")]
    warm_up_kernels(
        [*forms, *(f"{name} tanh" for name in ("bias_gelu", "gelu", "recompute_gelu_and_backward"))], parse_dtype(dtype)
    )


def test_unknown_names_cost_nothing():
    warm_up_kernels(["no such kernel"], np.float32)


def test_a_kernel_is_the_same_code_whoever_asked_for_it_first():
    """Warming asks for the kernels of a model before their files are imported; a rank may have imported them."""
    code = (
        "import sys; from fsdpx.core.array.kernels import choice; choice.get_implementation_name('unknown')\n"
        "print(*(name for name in sys.argv[1:] if choice.get_implementation_name(name) == 'numba'))"
    )
    names = sorted(n for n in choice.import_all_compiled_kernels() if choice.FILES[n].startswith("fsdpx.core."))
    assert run_program(code, *names) == names


def test_a_warm_kernel_compiles_and_loads_nothing():
    """Also kernels whose files nobody has imported are warmed: those of a loss, before its layer computes anything."""
    run_program(COUNT + """
import sys
from fsdpx.core.engine.warmup import list_kernel_warm_up_calls
assert not any(name.startswith("fsdpx.core.array.kernels.loss") for name in sys.modules), "losses are imported"
assert len(list_kernel_warm_up_calls(["cross_entropy", "layer_norm"], np.float32)) == 2
warm_up_kernels(["gelu", "layer_norm", "cross_entropy", "bfloat16"], np.float32)
before = ready()
x, w = np.ones((5, 4), np.float32), np.ones(4, np.float32)
kernels.gelu(np, x)
kernels.layer_norm(np, x, w, None, 1e-5)
kernels.cross_entropy(np, x, np.zeros(5, np.int32))
assert ready() == before, ready() ^ before
kernels.silu(np, x)
assert ready() != before
""")  # fmt: skip


@pytest.mark.parametrize("precision", few(["'float32'", "Precision(compute='bf16')"], 2))
def test_a_step_finds_all_kernels_warm(precision):
    run_program(COUNT + f"from fsdpx import Precision; precision = {precision}" + """
import warnings
from fsdpx import nn, optim
from fsdpx.core.engine.warmup import run_warm_up_calls_in_rotated_order, list_warm_up_calls
from fsdpx.nn.layer import list_kernels
warnings.filterwarnings("ignore", "fsdpx: bf16 is computed as float32")  # on processors without instructions for it
block = nn.TransformerBlock(8, 2, dropout=0.1)
model = nn.Sequential(nn.Embedding(5, 8), block, nn.RMSNorm(8),
    nn.Linear(8, 8), nn.GELU("tanh"), nn.SiLU(), nn.Linear(8, 5))
loss, optimizer = nn.CrossEntropyLoss(), optim.LAMB()
trainer = model.as_distributed(loss=loss, optimizer=optimizer, clip_norm=1.0, precision=precision, backend="fake")
dtypes = trainer.inspect.placement.formats.compute, "float32", "float32"
calls = list_warm_up_calls([*list_kernels(model), *loss.kernel_names], [optimizer], dtypes, True)
run_warm_up_calls_in_rotated_order(calls)
before = ready()
x = np.zeros((3, 4), int)
trainer.step(x, x)
assert ready() == before, ready() ^ before
""")  # fmt: skip


def test_a_read_only_cache_is_said_once_and_kernels_run():
    run_program("""
import errno, os, warnings
os.environ["FSDPX_CACHE"] = "/dev/null/nowhere"
import numpy as np
from numba.core import caching
def read_only(self):
    raise OSError(errno.EROFS, "Read-only file system")
caching._CacheLocator.ensure_cache_path = read_only
from fsdpx.core.array import kernels
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert kernels.relu(np, np.ones(3, np.float32)).tolist() == [1.0] * 3
    assert kernels.add(np, np.ones(3, np.float32), np.ones(3, np.float32)).tolist() == [2.0] * 3
results = [str(c.message) for c in caught]
assert len(results) == 1 and "set FSDPX_CACHE to a folder that can be written" in results[0], results
""")


def test_a_second_process_needs_no_compiler():
    """A third of the time before a first step, and a hundred megabytes."""
    if not pytest.importorskip("fsdpx.ext.native.code_cache").can_store_machine_code():
        pytest.skip("machine code is not kept here")
    code = """
import sys
import numpy as np
from fsdpx.core.engine.warmup import warm_up_kernels
convolutions = "correlate", "correlate_backward_input", "correlate_backward_params"
warm_up_kernels(["gelu", *convolutions, "float16", "bfloat16"], np.float32)
print("numba" in sys.modules, "llvmlite" in sys.modules)
"""
    assert any(run_program(code) == ["False", "False"] for _ in range(2))
