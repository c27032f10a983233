"""Would weights in oneDNN's own blocked layout make 16-bit products faster? And if they are brought into it first?

    python bench/blocked.py [--rounds 5] [--quick]

One thread. A product takes turns with the same one whose weights lie in the layout that oneDNN asks for ("blocked"),
and with bringing them there and multiplying once ("with reorder"). Ratios above 1: faster than from rows or columns.
"""

import sys
import time
from collections.abc import Callable
from ctypes import c_int, c_int64, c_size_t, c_void_p
from statistics import median
from typing import Any

import numpy as np
from records import arguments, lines, save

from fsdpx.array.blas import onednn
from fsdpx.array.namespace import dtype

SHAPES = [(2048, 512, 1536), (2048, 512, 2048), (2048, 2048, 512), (2048, 256, 1024), (256, 1024, 1024)]
"""Rows, summed, columns: of `small`, `tiny` and `mlp`."""
ANY, OF_WEIGHTS = 1, 131
"""Values of dnnl.h: a layout that the library chooses, and the question for that of the weights."""
ROLES = {"source": onednn.SOURCE, "weights": onednn.WEIGHTS, "result": onednn.RESULT}


def ways(library: onednn.OneDNN, rows: int, summed: int, columns: int) -> tuple[Callable[[], None], ...]:
    """A forward product `x @ w.T`: as it is, with weights in the library's layout, and bringing them into it."""
    half, numbers = dtype("bfloat16"), np.random.default_rng(0)
    x, w = (numbers.standard_normal(s, np.float32).astype(half) for s in ((rows, summed), (columns, summed)))
    out, again = np.empty((rows, columns), half), np.empty((rows, columns), half)
    api, made, engine = library._library, library._made, library._engine
    api.dnnl_primitive_desc_query_md.restype = c_void_p
    api.dnnl_memory_desc_get_size.restype = c_size_t
    of_x, of_w, of_out = (library._layout(array) for array in (x, w.T, again))
    chosen = made(
        "dnnl_memory_desc_create_with_tag",
        2,
        (c_int64 * 2)(summed, columns),
        c_int(onednn.TYPES["bfloat16"]),
        c_int(ANY),
    )
    options = made("dnnl_primitive_attr_create")
    product = made("dnnl_matmul_primitive_desc_create", engine, of_x, chosen, None, of_out, options)
    layout = c_void_p(api.dnnl_primitive_desc_query_md(product, OF_WEIGHTS, 0))
    room = np.empty(api.dnnl_memory_desc_get_size(layout) + 64, np.uint8)
    lies = c_void_p(room.ctypes.data + -room.ctypes.data % 64)
    move = made("dnnl_reorder_primitive_desc_create", of_w, engine, layout, engine, options)

    def memory(layout: Any, address: Any) -> Any:
        return made("dnnl_memory_create", layout, engine, address)

    def ready(described: Any, **operands: Any) -> Callable[[], None]:
        primitive = made("dnnl_primitive_create", described)
        handed = (onednn.Argument * len(operands))(*[onednn.Argument(ROLES[k], v) for k, v in operands.items()])
        arrays = x, w, again, room  # live as long as what computes on them

        def run(alive: tuple[np.ndarray, ...] = arrays) -> None:
            library._check("dnnl_primitive_execute", execute(primitive, library._own.stream, len(handed), handed))

        return run

    execute, blocked = api.dnnl_primitive_execute, memory(layout, lies)
    library._known()
    reorder = ready(move, source=memory(of_w, c_void_p(w.ctypes.data)), result=blocked)
    x_there, out_there = memory(of_x, c_void_p(x.ctypes.data)), memory(of_out, c_void_p(again.ctypes.data))
    own = ready(product, source=x_there, weights=blocked, result=out_there)

    def as_it_is() -> None:
        library.product(out, x, w.T, False, None)

    for run in (reorder, own, as_it_is):
        run()
    if not np.array_equal(out.view(np.uint16), again.view(np.uint16)):
        raise SystemExit("the blocked product differs")
    return as_it_is, own, reorder


def compare(library: onednn.OneDNN, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    found: list[list[float]] = [[], [], []]
    runs = ways(library, *shape)
    for _ in range(3 * rounds):
        for run, times in zip(runs, found, strict=True):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    plain, own, reorder = (median(times) for times in found)
    rate = 2e-9 * np.prod(shape) / plain
    return {"shape": shape, "rate": float(rate), "blocked": plain / own, "with_reorder": plain / (own + reorder)}


def main() -> int:
    options = arguments(__doc__, rounds=5).parse_args()
    library = onednn.found()
    if library is None:
        print("oneDNN is not here: pip install 'fsdpx[onednn]'")
        return 1
    shapes = SHAPES[:1] if options.quick else SHAPES
    found = {"rows": [compare(library, shape, options.rounds) for shape in shapes]}
    save("blocked", options, found)
    for _, text in tables(found):
        print(text)
    return 0


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    head = ["product", "GFLOP/s", "blocked", "with reorder"]
    cells = [
        [" x ".join(map(str, r["shape"])), f"{r['rate']:.0f}", f"{r['blocked']:.2f}", f"{r['with_reorder']:.2f}"]
        for r in found["rows"]
    ]
    return [("products", lines(head, cells))]


if __name__ == "__main__":
    sys.exit(main())
