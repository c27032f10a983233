"""Makes the pictures of the pages, each on a light and on a dark page: `python docs/pictures/make.py [NAME
...]`.

All are drawn from what the code says: programs that the simulator runs, parts of fields, contracts of imports, and
from measured results. A file keeps a digest of its figure (`digest`), with which tests compare what is drawn now."""

import json
import re
import sys
import textwrap
import tomllib
import zlib
from contextlib import redirect_stdout
from dataclasses import replace
from hashlib import blake2b
from importlib.util import module_from_spec, spec_from_file_location
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

import fsdpx
from fsdpx import nn
from fsdpx.core.program import StageCosts, compute_bubble, count_in_flight, make_schedule, simulate
from fsdpx.examples import models
from fsdpx.ext.fields.halo import make_halo_spec_per_dim
from fsdpx.ext.observe.plots import MEMORY, THEMES, StepLanes, get_color, make_step_figure, save_figure
from fsdpx.launch.show import make_step_lanes, write_trace_of_dry_run
from fsdpx.nn.shard_specs import FieldPartition
from fsdpx.plan import Machine
from fsdpx.plan.prediction import dry_run_one_rank_per_group, predict_from_dry_runs

HERE = Path(__file__).parent


# -- one step under three strategies -----------------------------------------------------------------------------------

THREE = {
    "DDP: each rank holds the whole model; gradients are summed over the ranks (numbers: layers)": {"strategy": "ddp"},
    "FSDP: each rank holds half of each layer; layers are gathered before use and freed after it": {"strategy": "fsdp"},
    "Pipeline: each rank holds half of the layers and sends activations (numbers: microbatches)": {
        "strategy": "ddp",
        "mesh": fsdpx.Mesh(pipe=2),
        "microbatches": 4,
    },
}


def step(theme: str) -> Any:
    """Four layers of 1,024 on two ranks."""
    machine, batch, panels = Machine.load(HERE / "two-laptops.toml"), ((1024, 1024), "float32"), []
    for title, options in THREE.items():
        dry = dry_run_one_rank_per_group(models.make_mlp(4, 1024, True), (batch, batch), 2, gpu=False, **options)
        panels.append(make_step_lanes(dry, predict_from_dry_runs(dry, machine), title))
    return make_step_figure(panels, theme)


# -- schedules of a pipe -----------------------------------------------------------------------------------------------


def schedules(theme: str) -> Any:
    """Of four ranks and eight microbatches, where F, I and W take as long and messages no time."""
    panels, costs = [], StageCosts(forward=1, backward_input=1, backward_params=1)
    for name in ("1f1b", "interleaved", "zb-h1", "zb-h2", "zbv"):
        made = make_schedule(name, ranks=4, microbatches=8)
        shorter = 1 if made.stages == 4 else 4 / made.stages  # of the same model
        events = [replace(e, start=e.start * shorter, end=e.end * shorter) for e in simulate(made, costs)]
        idle = compute_bubble(simulate(made, costs), made, costs)
        alive = ", ".join(f"{n * shorter:g}" for n in count_in_flight(made))
        title = f"{name}: {idle:.0%} idle; maximum number of microbatches in flight on each rank: {alive}"
        panels.append(StepLanes(title, events, [f"rank {rank}" for rank in range(4)]))
    return make_step_figure(panels, theme)


# -- a field over a grid of ranks --------------------------------------------------------------------------------------

OWNERS = ("forward", "gather", "backward", "reduce")
REACH, APART = 2, 1.2
"""Cells that a convolution of 5 x 5 reaches, and cells between what ranks need."""
SAID = {
    0.0: "wall: no halo cells\nbeyond it",
    3.0: "a rank's part of the\nsolver's field",
    7.0: "pale: halo cells received\nfrom the rank of that color",
    11.5: "periodic dimension: rank 1\nowns the halo to the left\nof rank 0",
}


def field(theme: str) -> Any:
    """Four uneven parts of 13 x 16 cells, walls along one dim, and the other periodic: each with the cells that a
    convolution needs of others, in the colors of those that have them."""
    parts = FieldPartition(((0, 6, 13), (0, 10, 16)))
    windows = [(1, -REACH, 2 * REACH + 1)] * 2
    needed = [_owners(reach) for reach in make_halo_spec_per_dim(parts, windows, parts, ("zeros", "circular"))]
    each, high = 9.25 / 33.4, 19.2
    drawn = _empty(9.25, each * high + 0.4, theme)
    share = each * high / (each * high + 0.4)
    axes = drawn.add_axes((0, 0, 1, share), xlim=(-9.9, 23.5), ylim=(high - 0.6, -0.6))
    axes.axis("off")
    for rank, (p, q) in enumerate(np.ndindex(2, 2)):
        top, left = (parts.cuts[d][n] + n * (2 * REACH + APART) for d, n in enumerate((p, q)))
        _part(axes, theme, rank, (needed[0][p], needed[1][q]), (top, left))
    for y, words in SAID.items():
        axes.text(-9.6, y, words, color=get_color("ink", theme), fontsize=9.5, va="top")
    title = "13 x 16 cells on 2 x 2 ranks, and the halos of a 5 x 5 convolution"
    drawn.text(0.01, (1 + share) / 2, title, color=get_color("ink", theme), fontsize=11, weight="bold", va="center")
    return drawn


def _owners(reach: Any) -> list[list[tuple[int, int]]]:
    """For each rank of a line the owners of the cells that it needs, and where these lie, from its first own cell."""
    found: list[list[tuple[int, int]]] = [[], []]
    for piece in reach.list_halo_transfers():
        places = np.arange(reach.count_needed_cells(piece.receiver))[piece.into]
        first = reach.needs[piece.receiver][0] - reach.cuts[piece.receiver]
        found[piece.receiver] += [(int(place) + first, piece.sender) for place in places]
    return found


def _part(axes: Any, theme: str, rank: int, needed: Any, corner: tuple[int, int]) -> None:
    """The part of a rank with its halo."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    squares, colors, own = [], [], []
    for y, p in needed[0]:
        for x, q in needed[1]:
            top, left = corner[0] + y, corner[1] + x
            squares.append([(left, top), (left + 1, top), (left + 1, top + 1), (left, top + 1)])
            mine = (p, q) == divmod(rank, 2)
            colors.append(to_rgba(get_color(OWNERS[2 * p + q], theme), 1.0 if mine else 0.4))
            own += [(left, top)] if mine else []
    look = {"edgecolors": get_color("page", theme), "linewidths": 0.8}
    axes.add_collection(PolyCollection(squares, facecolors=colors, **look))
    (left, top), (right, bottom) = own[0], own[-1]
    ink = get_color("ink", theme)
    x, y = [left, right + 1, right + 1, left, left], [top, top, bottom + 1, bottom + 1, top]
    axes.plot(x, y, color=ink, linewidth=1.2)
    wall = top if rank < 2 else bottom + 1
    axes.plot([left - REACH, right + 1 + REACH], [wall, wall], color=ink, linewidth=4, solid_capstyle="butt")
    words = f"rank {rank}\n{bottom + 1 - top:.0f} x {right + 1 - left:.0f} cells"
    middle, fill = ((left + right + 1) / 2, (top + bottom + 1) / 2), get_color(OWNERS[rank], theme)
    box = {"boxstyle": "round,pad=0.3", "facecolor": fill, "edgecolor": "none"}
    axes.text(*middle, words, color="white", fontsize=10, ha="center", va="center", weight="bold", bbox=box)


def _empty(width: float, height: float, theme: str) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=get_color("page", theme))


# -- a mesh over ranks ------------------------------------------------------------------------------------------------

SQUARES, RADIUS, SPREAD = 10, 0.017, 0.7
"""Squares of two triangles along each side of the mesh; radius of a node; how far apart parts are drawn."""
SAID_OF_MESH = {
    0.02: "dots: nodes, in the color\nof the rank that owns them",
    0.32: "faded: ghosts, copies of\nnodes of another rank",
    0.62: "lines: edges whose receiver\nthe rank owns",
    0.92: "each message-passing step\nsends the values of ghosts",
}


def mesh(theme: str) -> Any:
    """A triangulation on four ranks: each with its nodes and edges, and the ghosts that these edges read."""
    cells, points = _load_mesh_heat(SQUARES).make_cells(0, 1)
    edges = np.concatenate([cells[:, pair].T for pair in ([0, 1], [1, 2], [2, 0])], axis=1)

    def split(comm: Any) -> Any:
        made = fsdpx.Partition.from_replicated_graph(comm, edges, len(points), positions=points, undirected=True)
        return made.graph, made.numbers

    graphs = fsdpx.spawn(split, 4)
    owners = np.empty(len(points), int)
    for rank, (_, numbers) in enumerate(graphs):
        owners[numbers] = rank
    drawn = _empty(9.25, 5.2, theme)
    axes = drawn.add_axes((0, 0, 1, 0.93), xlim=(-1.4, 1.65), ylim=(1.3, -0.3), aspect="equal")
    axes.axis("off")
    for rank, (graph, numbers) in enumerate(graphs):
        _part_of_mesh(axes, theme, rank, graph, points + SPREAD * (points[numbers].mean(axis=0) - 0.5), owners)
    for y, words in SAID_OF_MESH.items():
        axes.text(-1.35, y, words, color=get_color("ink", theme), fontsize=9.5, va="top")
    title = f"A mesh of {len(points)} nodes on 4 ranks, and the ghosts that each rank receives"
    drawn.text(0.01, 0.965, title, color=get_color("ink", theme), fontsize=11, weight="bold", va="center")
    return drawn


def _part_of_mesh(axes: Any, theme: str, rank: int, graph: Any, places: Any, owners: Any) -> None:
    """The nodes, edges and ghosts of a rank."""
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Circle

    at = places[graph.numbers]
    lines = [at[[a, b]] for a, b in zip(graph.senders, graph.receivers, strict=True)]
    axes.add_collection(LineCollection(lines, colors=get_color("faint", theme), linewidths=0.9, zorder=1))
    own = np.arange(len(at)) < graph.nodes
    for mine, alpha in ((True, 1.0), (False, 0.4)):
        dots = [Circle(point, RADIUS) for point in at[own == mine]]
        fills = [get_color(OWNERS[owner], theme) for owner in owners[graph.numbers[own == mine]]]
        page = get_color("page", theme)
        axes.add_collection(PatchCollection(dots, facecolors=page, edgecolors="none", zorder=2))
        looks = [to_rgba(fill, alpha) for fill in fills]
        axes.add_collection(PatchCollection(dots, facecolors=looks, edgecolors="none", zorder=3))
    words = f"rank {rank}: {graph.nodes} nodes, {graph.ghosts} ghosts"
    box = {"boxstyle": "round,pad=0.3", "facecolor": get_color(OWNERS[rank], theme), "edgecolor": "none"}
    x, y = at[own].mean(axis=0)
    y = at[:, 1].min() - 0.06 if y < 0.5 else at[:, 1].max() + 0.06
    axes.text(x, y, words, color="white", fontsize=9, ha="center", va="center", weight="bold", bbox=box)


def mesh_error(theme: str) -> Any:
    """Temperatures of `docs/solvers/mesh_heat.py` and of the network that learned its steps, and the difference."""
    from mpi4py import MPI

    with redirect_stdout(StringIO()):
        heat, guess = _load_mesh_heat().main(MPI.COMM_SELF)
    panels = {
        "solver, five steps later": (heat.u, "inferno", (0, 1)),
        "network, five steps later": (guess, "inferno", (0, 1)),
        "error": (guess - heat.u, "RdBu_r", (-np.abs(guess - heat.u).max(), np.abs(guess - heat.u).max())),
    }
    drawn, ink = _empty(9.25, 3.6, theme), get_color("ink", theme)
    for at, (name, (u, colors, limits)) in enumerate(panels.items()):
        axes = drawn.add_axes((0.015 + 0.33 * at, 0.03, 0.31, 0.31 * 9.25 / 3.6), xlim=(0, 1), ylim=(0, 1))
        axes.axis("off")
        _draw_triangles(axes, heat.points[heat.cells], u[heat.cells].mean(axis=1), colors, limits)
        words = f"network minus solver, at most {limits[1]:.1g}" if name == "error" else name
        axes.text(0, 1.03, words, color=ink, fontsize=9.5)
    title = f"Heat on an unstructured mesh of {heat.u.size} nodes, and a network that learned its steps"
    drawn.text(0.01, 0.95, title, color=ink, fontsize=11, weight="bold", va="center")
    return drawn


def _draw_triangles(axes: Any, corners: Any, values: Any, colors: str, limits: tuple[float, float]) -> None:
    """Draw triangles (triangles, 3, 2) in colors of their values."""
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize

    fills = colormaps[colors](Normalize(*limits)(values))
    axes.add_collection(PolyCollection(corners, facecolors=fills, edgecolors=fills, linewidths=0.3))


def _load_mesh_heat(squares: int | None = None) -> Any:
    """Load `docs/solvers/mesh_heat.py`, with another number of squares if given."""
    spec = spec_from_file_location("mesh_heat", HERE.parent / "solvers" / "mesh_heat.py")
    assert spec is not None
    assert spec.loader is not None
    made: Any = module_from_spec(spec)
    spec.loader.exec_module(made)
    made.SQUARES = squares or made.SQUARES
    return made


# -- memory and bytes of strategies ------------------------------------------------------------------------------------

RANKS, LAYERS, WIDTH, SAMPLES, LONG = 8, 8, 512, 32, 256
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "fsdp": {"strategy": "fsdp"},
    "hybrid, 2 x 4": {"mesh": fsdpx.Mesh(replica=2, shard=4)},
    "pipe of 8": {"strategy": "ddp", "mesh": fsdpx.Mesh(pipe=8), "microbatches": 16},
    "tensor of 8": {"strategy": "ddp", "mesh": fsdpx.Mesh(tensor=8)},
}
CALLS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce", "send": "message"}


def strategies(theme: str) -> Any:
    """Of one model on eight ranks: what a rank holds at most, and bytes sent per step."""
    tokens, machine, rows = ((SAMPLES, LONG), "int64"), Machine.load("epyc-100g"), {}
    for name, options in STRATEGIES.items():
        model, chosen = nn.GPT(4096, WIDTH, LAYERS, 8, LONG), {"strategy": "fsdp", **options}
        found = predict_from_dry_runs(
            dry := dry_run_one_rank_per_group(model, (tokens, tokens), RANKS, gpu=False, **chosen), machine
        )
        rows[name] = (
            max(map(_most, dry.make_memory_timelines(found.events)), key=lambda held: sum(held.values())),
            _sent(found),
        )
    drawn = _empty(9.25, 4.1, theme)
    left = drawn.add_axes((0.115, 0.02, 0.42, 0.72), ylim=(len(rows) - 0.4, -0.6))
    right = drawn.add_axes((0.63, 0.02, 0.28, 0.72), ylim=(len(rows) - 0.4, -0.6))
    _bars(left, theme, {name: held for name, (held, _) in rows.items()}, "peak memory per rank")
    _bars(right, theme, {name: sent for name, (_, sent) in rows.items()}, "bytes sent per step")
    title = f"A GPT of {LAYERS} blocks of width {WIDTH} on {RANKS} ranks, {SAMPLES} samples of {LONG} tokens"
    drawn.text(0.01, 0.955, title, color=get_color("ink", theme), fontsize=11, weight="bold", va="center")
    for at, name in enumerate(rows):
        left.text(-0.015, at, name, color=get_color("ink", theme), fontsize=9.5, ha="right", va="center",
                  transform=left.get_yaxis_transform())  # fmt: skip
    return drawn


def _most(held: dict[str, list[tuple[float, int]]]) -> dict[str, int]:
    """Kind -> bytes at the moment when they are most in all."""

    def at(time: float) -> dict[str, int]:
        return {kind: [n for when, n in points if when <= time][-1] for kind, points in held.items()
                if points[0][0] <= time}  # fmt: skip

    times = {time for points in held.values() for time, _ in points}
    most = max(map(at, sorted(times)), key=lambda now: sum(now.values()))
    return {kind: most.get(kind, 0) for kind in sorted(most, key=lambda kind: [*MEMORY, kind].index(kind))}


def _sent(found: Any) -> dict[str, int]:
    """What -> bytes, of the class that sends most."""
    sums = []
    for one in found.classes:
        sums.append(dict.fromkeys(("gather", "reduce", "message", "in layers"), 0))
        for (axis, call), (_, nbytes) in one.traffic.items():
            if call in CALLS:
                sums[-1]["in layers" if axis == "tensor" else CALLS[call]] += nbytes
    return max(sums, key=lambda one: sum(one.values()))


def _bars(axes: Any, theme: str, rows: dict[str, dict[str, int]], title: str) -> None:
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(kind for row in rows.values() for kind, n in row.items() if n > 0))
    fills = {name: get_color(MEMORY.get(name, name if name in CALLS.values() else "other"), theme) for name in names}
    for at, row in enumerate(rows.values()):
        start = 0.0
        for kind in names:
            axes.broken_barh([(start, row.get(kind, 0))], (at - 0.34, 0.68), facecolors=fills[kind], alpha=0.85)
            start += row.get(kind, 0)
        axes.text(start, at, f"  {start / 2**20:,.0f} MiB", color=get_color("ink", theme), fontsize=9.5, va="center")
    axes.set_xlim(0, max(sum(row.values()) for row in rows.values()))
    axes.axis("off")
    boxes = [Patch(facecolor=fills[name], label=name, alpha=0.85) for name in names]
    look = {"frameon": False, "fontsize": 9, "labelcolor": get_color("ink", theme), "handlelength": 1.0}
    place = {"loc": "lower left", "ncols": 5, "bbox_to_anchor": (0, 1), "borderaxespad": 0, "columnspacing": 1.2}
    axes.legend(handles=boxes, handletextpad=0.5, **look, **place)
    axes.text(0, 1.12, title, transform=axes.transAxes, color=get_color("ink", theme), fontsize=9.5)


# -- the house ---------------------------------------------------------------------------------------------------------


def floors(theme: str) -> Any:
    """The folders as the contract of imports stacks them, and what each floor answers, by the page on the
    architecture."""
    contracts = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = [re.findall(r"fsdpx\.(?:core\.)?(\w+)", row) for row in contracts[0]["layers"]]
    ours = [path.parent.name for path in sorted((HERE.parents[1] / "fsdpx/ext").glob("*/__init__.py"))]
    others = [name.removeprefix("fsdpx.") for name in contracts[1]["forbidden_modules"] if name != "fsdpx.ext"]
    rows = [others, ours[: len(ours) // 2], ours[len(ours) // 2 :], *rows]
    answers = _answers((HERE.parent / "architecture.md").read_text(encoding="utf-8"))
    drawn = _empty(9.25, 0.36 * len(rows) + 0.7, theme)
    axes = drawn.add_axes((0.01, 0.01, 0.98, 0.98), xlim=(0, 9.1), ylim=(len(rows) + 0.15, -1.6))
    axes.axis("off")
    ink, page = get_color("ink", theme), get_color("page", theme)
    for y, row in enumerate(rows):
        names, wide = (row, 3.9 / len(row)) if len(row) < 6 else ([" · ".join(row)], 3.9)
        fill = get_color("faint" if y < 3 else "update" if y == 3 else "backward" if y > 8 else "forward", theme)
        for x, name in enumerate(names):
            axes.broken_barh([(x * wide, wide - 0.04)], (y + 0.05, 0.9), facecolors=fill, edgecolors=page)
            size = 9.5 if len(name) < 30 else 7.5
            axes.text((x + 0.5) * wide - 0.02, y + 0.5, name, color="white", fontsize=size, ha="center", va="center")
        said = "; ".join(dict.fromkeys(answers[name] for name in row if name in answers))
        said = "" if 0 < y < 3 else said or "extensions: the core below imports none"
        axes.text(4.0, y + 0.5, textwrap.fill(said, 74), color=ink, fontsize=8.5, va="center")
    title = "The core imports only from its own layer and the layers below, never from an extension"
    axes.text(0, -1.0, title, color=ink, fontsize=11, weight="bold", va="center")
    return drawn


def _answers(page: str) -> dict[str, str]:
    """Folder -> what it answers, by the table of the page, as far as a colon."""
    found, core = dict[str, str](), page.partition("\n## The core")[2].partition("\n## ")[0]
    for folders, answer in re.findall(r"^\| (.+?) \| (.+?) \|", core, re.M):
        said = re.sub(r"\[([^]]*)\]\([^)]*\)|[*`]", r"\1", answer).partition(":")[0]
        found |= dict.fromkeys(re.findall(r"fsdpx/(?:core/)?(\w+)/", folders), said)
    return found


# -- a trace as Perfetto shows it --------------------------------------------------------------------------------------

SLICES = ("#a5c8f0", "#a7d8b8", "#f2d08c", "#e8b3ae", "#c7b5e3", "#b9c4cd", "#d9c7a3")
TRACK, LEFT = 0.22, 1.1
"""Inches."""


def trace(theme: str) -> Any:
    """The file that `show --trace` writes of two ranks of a pipe, track by track."""
    machine, batch = Machine.load(HERE / "two-laptops.toml"), ((1024, 1024), "float32")
    options = {"strategy": "ddp", "mesh": fsdpx.Mesh(pipe=2), "microbatches": 4}
    dry = dry_run_one_rank_per_group(models.make_mlp(2, 1024, True), (batch, batch), 2, gpu=False, **options)
    with TemporaryDirectory() as folder:
        write_trace_of_dry_run(dry, predict_from_dry_runs(dry, machine), f"{folder}/step.json")
        events = json.loads(Path(folder, "step.json").read_text())["traceEvents"]
    tracks = _tracks(events)
    drawn = _empty(9.25, TRACK * len(tracks) + 0.4, theme)
    high, last = len(tracks) + 0.5, max(e["ts"] + e.get("dur", 0) for e in events if "ts" in e)
    share = TRACK * high / (TRACK * len(tracks) + 0.4)
    axes = drawn.add_axes((LEFT / 9.25, 0.01, 1 - (LEFT + 0.1) / 9.25, share), xlim=(0, last), ylim=(high - 0.4, -0.1))
    axes.axis("off")
    ink, faint = get_color("ink", theme), get_color("waiting", theme)
    inch = (9.25 - LEFT - 0.1) / last
    for (pid, tid), (y, name) in tracks.items():
        head = tid is None
        axes.text(-(LEFT - 0.06 - 0.1 * (not head)) / inch, y + 0.5, name, color=ink, fontsize=8.5, va="center",
                  weight="bold" if head else "normal", clip_on=False)  # fmt: skip
        axes.broken_barh([(0, last)], (y, 1), facecolors=faint if head else "none", edgecolors=faint, linewidth=0.6)
        _slices(axes, theme, [e for e in events if (e["pid"], e.get("tid")) == (pid, tid) and e["ph"] == "X"], y, inch)
        if tid == "C":
            points = [(e["ts"], e["args"]["bytes"]) for e in events if e["pid"] == pid and e["ph"] == "C"]
            most = max(nbytes for _, nbytes in points)
            heights = [y + 1 - 0.9 * nbytes / most for _, nbytes in points]
            axes.fill_between([at for at, _ in points], heights, y + 1, step="post", color=SLICES[0], linewidth=0)
    ends = {(e["ph"], e["id"]): (e["ts"], tracks[e["pid"], e["tid"]][0] + 0.5) for e in events if e["ph"] in "sf"}
    look = {"arrowstyle": "-|>", "color": get_color("reduce", theme), "lw": 0.8, "connectionstyle": "arc3,rad=0.15"}
    look |= {"mutation_scale": 6, "shrinkA": 0, "shrinkB": 0}
    for (kind, number), end in ends.items():
        if kind == "s":
            axes.annotate("", ends["f", number], end, arrowprops=look)
    for at in range(0, int(last), 20_000):
        axes.text(at, -0.4, f"{at // 1000} ms", color=get_color("faint", theme), fontsize=8.5, va="center", ha="center")
    return drawn


def _tracks(events: list[dict[str, Any]]) -> dict[tuple[int, Any], tuple[int, str]]:
    """(process, thread) -> row and name; of a process its head, then its threads by their order, then its curve."""
    found: dict[tuple[int, Any], tuple[int, str]] = {}
    for pid in sorted({event["pid"] for event in events}):
        own = [event for event in events if event["pid"] == pid and event["ph"] == "M"]
        for event in own:
            if event["name"] == "process_name":
                found[pid, None] = len(found), event["args"]["name"].partition(" (")[0]
        for event in own:
            slices = [e for e in events if (e["pid"], e.get("tid")) == (pid, event["tid"]) and e["ph"] == "X"]
            if event["name"] == "thread_name" and max((e["dur"] for e in slices), default=0) > 2_000:
                found[pid, event["tid"]] = len(found), event["args"]["name"]
        found[pid, "C"] = len(found), "activations"
    return found


def _slices(axes: Any, theme: str, slices: list[dict[str, Any]], y: int, inch: float) -> None:
    """Boxes with their names, as far as these fit, in a color for each verb."""
    for event in slices:
        verb = re.split(r"\d|\.", event["name"])[0]
        fill = "#d3d7db" if verb.startswith("wait") else SLICES[zlib.crc32(verb.encode()) % len(SLICES)]
        span, look = [(event["ts"], event["dur"])], {"edgecolors": get_color("page", theme), "linewidth": 0.4}
        axes.broken_barh(span, (y + 0.06, 0.88), facecolors=fill, **look)
        if event["dur"] * inch > 0.065 * len(event["name"]) + 0.06:
            axes.text(event["ts"] + 0.04 / inch, y + 0.5, event["name"], color="#24292f", fontsize=7.5, va="center")


# -- speed and memory next to PyTorch ----------------------------------------------------------------------------------

MODELS = {
    "tiny": "GPT, width 256", "small": "GPT, width 512", "mlp": "24 x Linear 1024", "unet3d": "U-Net, 3-D field",
    "unet2d": "U-Net, 2-D field", "fno2d": "FNO, 2-D field",
}  # fmt: skip
KINDS = {"ddp": "DDP", "zero1": "ZeRO-1", "fsdp": "FSDP"}


def pytorch(theme: str) -> Any:
    """Two ranks on two cores relative to PyTorch over Gloo, by `bench/results`: speed, memory and start-up."""
    rows = [*_compare("side_by_side", "fsdpx {} 2x1", KINDS), *_compare("fields", "fsdpx-parts {} 2x1", {"ddp": ""})]
    return _draw_ratios(rows, "Training on two cores, relative to PyTorch 2.13 over Gloo", theme)


def bf16(theme: str) -> Any:
    """The same in bf16, relative to PyTorch's autocast and FSDP2 in bf16, on one and two ranks."""
    rows = []
    for ranks, kinds in ("1x1", {"ddp": "one rank"}), ("2x1", {"ddp": "DDP", "fsdp": "FSDP"}):
        rows += _compare("halves", f"fsdpx-bf16 {{}} {ranks}", kinds)
    shown = sorted((row for row in rows if row[1] < 10), key=lambda row: [*MODELS.values()].index(row[0].split(":")[0]))
    return _draw_ratios(shown, "Training in bf16 on one and two cores, relative to PyTorch 2.13 in bf16", theme)


def _draw_ratios(rows: list[tuple[str, float, float, tuple[float, float]]], title: str, theme: str) -> Any:
    """Draw bars of what `_compare` returns."""
    drawn = _empty(9.25, 0.75 + 0.3125 * len(rows), theme)
    top = 0.75 / drawn.get_figheight()
    columns = (
        (0.235, 0.26, "speed, PyTorch = 1", [(speed, f"{speed:.2f} x") for _, speed, _, _ in rows]),
        (0.57, 0.13, "memory, PyTorch = 1", [(memory, f"{memory:.0%}") for _, _, memory, _ in rows]),
        (0.79, 0.08, "first step (PyTorch)", [(own, f"{own:.1f} s ({other:.1f} s)") for *_, (own, other) in rows]),
    )
    ink = get_color("ink", theme)
    for (left, width, heading, bars), color in zip(columns, ("forward", "gather", "backward"), strict=True):
        axes = drawn.add_axes((left, 0.02, width, 0.98 - top), ylim=(len(rows) - 0.4, -0.6))
        axes.axis("off")
        most = max(value for value, _ in bars)
        axes.set_xlim(0, most)
        for y, (value, words) in enumerate(bars):
            axes.broken_barh([(0, value)], (y - 0.36, 0.72), facecolors=get_color(color, theme), alpha=0.85)
            axes.text(value, y, f" {words}", color=ink, fontsize=9, va="center")
        if "= 1" in heading:
            axes.plot([1, 1], [-0.6, len(rows) - 0.4], color=ink, linewidth=1, linestyle=":", clip_on=False, zorder=0)
        axes.text(0, -0.85, heading, color=ink, fontsize=9.5, weight="bold")
        for y, (name, *_) in enumerate(rows if left < 0.3 else ()):
            axes.text(-0.03 * most, y, name, color=ink, fontsize=9, ha="right", va="center")
    drawn.text(0.01, 1 - 0.3 * top, title, color=ink, fontsize=11, weight="bold", va="center")
    return drawn


def _compare(name: str, job: str, kinds: dict[str, str]) -> list[tuple[str, float, float, tuple[float, float]]]:
    """Of each model and kind: what it is, our speed and memory over PyTorch's, and both times to the first step."""
    rows = json.loads((HERE.parents[1] / f"bench/results/{name}.json").read_text())["rows"]
    found = {(row["model"], row["job"]): row for row in rows}
    compared = []
    for model, kind in [(model, kind) for model in MODELS for kind in kinds if (model, job.format(kind)) in found]:
        ours = found[model, job.format(kind)]
        theirs = found[model, ours["against"]]
        label = f"{MODELS[model]}: {kinds[kind]}".removesuffix(": ")
        compared.append((label, ours["ratio"], ours["pss"] / theirs["pss"], (ours["first"], theirs["first"])))
    return compared


# -- collectives and GPU -----------------------------------------------------------------------------------------------

CARRIERS = {
    "fsdpx, shared memory": ("node", "forward"),
    "best MPI library": ("mpi4py mpich", "mpi4py openmpi", "gather"),
    "PyTorch, Gloo": ("gloo", "backward"),
}
"""Label -> names in `bench/results/collectives.json`, the fastest of which is drawn, and the color."""


def collectives(theme: str) -> Any:
    """Time of three collectives by size, on two ranks of a host: fsdpx, MPI and Gloo."""
    times = json.loads((HERE.parents[1] / "bench/results/collectives.json").read_text())["times"]
    drawn, ink = _empty(9.25, 3.3, theme), get_color("ink", theme)
    for number, name in enumerate(("all_reduce", "all_gather", "reduce_scatter")):
        axes = drawn.add_axes((0.075 + 0.32 * number, 0.14, 0.27, 0.63), xscale="log", yscale="log", ylim=(1e-6, 1))
        axes.set_facecolor("none")
        for spine in axes.spines.values():
            spine.set_color(ink)
        axes.tick_params(colors=ink, labelsize=8, which="both")
        axes.set_xticks([2**12, 2**20, 2**28], ["4 KiB", "1 MiB", "256 MiB"])
        axes.minorticks_off()
        axes.set_yticks([1e-6, 1e-3, 1], ["1 µs", "1 ms", "1 s"] if number == 0 else [""] * 3)
        for label, (*carriers, color) in CARRIERS.items():
            sizes = sorted(map(int, times[carriers[0]][name]))
            seconds = [min(times[carrier][name][str(size)] for carrier in carriers) for size in sizes]
            axes.plot(sizes, seconds, color=get_color(color, theme), linewidth=2, marker="o", markersize=3, label=label)
        axes.text(2**12, 1.6, name.replace("_", "-"), color=ink, fontsize=9.5, weight="bold")
    drawn.legend(
        *axes.get_legend_handles_labels(), loc="lower right", ncols=3, frameon=False, labelcolor=ink, fontsize=9,
        bbox_to_anchor=(0.99, 0.86),
    )  # fmt: skip
    title = "Collectives on two ranks of one host"
    drawn.text(0.01, 0.93, title, color=ink, fontsize=11, weight="bold", va="center")
    return drawn


# -- examples ----------------------------------------------------------------------------------------------------------


def heat(theme: str) -> Any:
    """A plate of `fsdpx.examples.heat` at first and later, with the borders of four ranks."""
    from fsdpx.examples import heat as example

    u, panels = example.make_random_plate(0), {}
    for state in range(301):
        if state in (0, 10, 300):
            panels["initial state" if state == 0 else f"after {state} states"] = u[1:-1, 1:-1].copy()
        u = example.step_explicitly(u)
    borders = [([0, example.COLUMNS], [example.ROWS / 2] * 2), ([example.COLUMNS / 2] * 2, [0, example.ROWS])]
    title = "Training data: temperature of a plate on 2 x 2 ranks with one warm wall"
    return _draw_fields(panels, [borders] * 3, title, "inferno", theme)


def solver(theme: str) -> Any:
    """The flow of `fsdpx.examples.solver`, by rows on the ranks that solve and by columns on those that train."""
    from mpi4py import MPI

    from fsdpx.examples import solver as example

    made, side = example.Solver(MPI.COMM_SELF), example.SIDE
    speed = np.hypot(*made.velocity)
    for _ in range(6):
        made.advance_round(learned=False)
    later = np.hypot(*made.velocity)
    halves = [([0, side], [side / 2] * 2)], [([side / 2] * 2, [0, side])]
    panels = {"initial state": speed, "solver: rows on 2 ranks": later, "trainer: columns on 2 ranks": later}
    title = "A flow that two ranks simulate while two others train on its snapshots"
    return _draw_fields(panels, [[], *halves], title, "viridis", theme)


def _draw_fields(panels: dict[str, Any], borders: Any, title: str, colors: str, theme: str) -> Any:
    """Draw fields side by side, each with lines between the parts of ranks."""
    high, wide = next(iter(panels.values())).shape
    width = 8.95 / len(panels) - 0.2
    drawn = _empty(9.25, width * high / wide + 0.75, theme)
    share = width * high / wide / drawn.get_figheight()
    limits = {"vmin": min(u.min() for u in panels.values()), "vmax": max(u.max() for u in panels.values())}
    for at, ((name, u), lines) in enumerate(zip(panels.items(), borders, strict=True)):
        axes = drawn.add_axes(((0.15 + at * (width + 0.2)) / 9.25, 0.02, width / 9.25, share))
        axes.axis("off")
        axes.imshow(u, extent=(0, wide, 0, high), cmap=colors, **limits)
        for x, y in lines:
            axes.plot(x, y, color="white", linewidth=1.5, linestyle="--")
        axes.text(0, 1.03, name, color=get_color("ink", theme), fontsize=9.5, transform=axes.transAxes)
    drawn.text(0.01, 1 - 0.2 / drawn.get_figheight(), title, color=get_color("ink", theme), fontsize=11, weight="bold",
               va="center")  # fmt: skip
    return drawn


def digits(theme: str) -> Any:
    """The first images of `fsdpx.examples.digits`, with their labels."""
    from fsdpx.examples import digits as example

    images, labels = example.draw_digits(36, seed=2)
    drawn = _empty(9.25, 2.75, theme)
    for at, (image, label) in enumerate(zip(images[:, 0], labels, strict=True)):
        row, column = divmod(at, 12)
        axes = drawn.add_axes((0.012 + 0.0815 * column, 0.6 - 0.29 * row, 0.075, 0.25))
        axes.axis("off")
        axes.imshow(image, cmap="gray" if theme == "dark" else "gray_r", vmin=-0.5, vmax=1.25)
        axes.text(0, -1, str(label), color=get_color("forward", theme), fontsize=9, weight="bold")
    title = "Noisy digits at random positions, and their labels"
    drawn.text(0.01, 0.95, title, color=get_color("ink", theme), fontsize=11, weight="bold", va="center")
    return drawn


def gan(theme: str) -> Any:
    """Points that the generator of `fsdpx.examples.gan` makes, and points of the circle that it learns."""
    from fsdpx.examples import gan as example

    noise = np.random.default_rng(0).standard_normal((400, example.NOISE), np.float32)
    circle, drawn = example.sample_circle(np.random.default_rng(1), 400), _empty(9.25, 2.9, theme)
    for at, steps in enumerate((0, 100, 300, 600)):
        axes = drawn.add_axes((0.01 + 0.247 * at, 0.02, 0.235, 0.75), xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))
        axes.axis("off")
        axes.set_aspect("equal")
        points = _train_generator(example, steps).predict(noise)
        axes.scatter(*circle.T, s=4, color=get_color("faint", theme), linewidths=0)
        axes.scatter(*np.asarray(points).T, s=5, color=get_color("backward", theme), linewidths=0)
        axes.text(0, 1.45, f"after {steps} steps", color=get_color("ink", theme), fontsize=9.5, ha="center")
    title = "Generated points (green) and real points on the circle (gray)"
    drawn.text(0.01, 0.94, title, color=get_color("ink", theme), fontsize=11, weight="bold", va="center")
    return drawn


def _train_generator(example: Any, steps: int) -> Any:
    """Run the example, and return its first trainer."""
    trainers: list[Any] = []

    def distribute(model: Any, **options: Any) -> Any:
        trainers.append(fsdpx.distribute(model, **options))
        return trainers[-1]

    with patch.object(nn.Sequential, "as_distributed", distribute), redirect_stdout(StringIO()):
        example.main([f"--steps={steps}"])
    return trainers[0]


PICTURES = {
    made.__name__: made
    for made in (
        step, schedules, field, mesh, mesh_error, strategies, floors, trace, pytorch, bf16, collectives, heat, solver,
        digits, gan
    )
}  # fmt: skip
TRAINED = {"gan", "mesh_error"}
"""Pictures of trained networks, whose last digits differ between processors."""


# -- files -------------------------------------------------------------------------------------------------------------


def digest(drawn: Any) -> str:
    """Of what is drawn: words, corners in the numbers of the axes to four digits, and colors; not how Matplotlib lays
    it out, which differs between versions."""
    lines = [_words(text) for text in drawn.texts]
    lines += [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
    for axes in drawn.axes:
        lines += [_words(text) for text in (axes.title, *axes.texts)]
        lines += [f"{_numbers(line.get_xydata())} {line.get_color()}" for line in axes.lines]
        for box in axes.patches:
            lines.append(f"{_corners(box.get_path(), box.get_patch_transform())} {_numbers(box.get_facecolor())}")
        for many in axes.collections:
            lines += [_numbers(many.get_facecolor()), *map(_corners, many.get_paths())]
        lines += [_numbers(image.get_array()) for image in axes.images]
    return blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _words(text: Any) -> str:
    end = [text.xyann, text.xy] if hasattr(text, "xyann") else [text.get_position()]
    return f"{text.get_text()} {text.get_color()} {_numbers(end)}"


def _corners(path: Any, transform: Any = None) -> str:
    """Without their order: versions of Matplotlib close paths in different ways."""
    points = path.vertices if transform is None else transform.transform(path.vertices)
    return " ".join(sorted({_numbers(point) for point in points}))


def _numbers(values: Any) -> str:
    return ",".join(f"{value:.4g}" for value in np.asarray(values, float).ravel() + 0.0)


def write(name: str, theme: str) -> Path:
    """Write one picture, in 64 colors, or in 256 if it shows fields."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    drawn, content, path = PICTURES[name](theme), BytesIO(), HERE / f"{name}-{theme}.png"
    save_figure(drawn, content)
    info = PngInfo()
    info.add_text("digest", digest(drawn))
    colors = 256 if any(axes.images for axes in drawn.axes) else 64
    image = Image.open(content).convert("RGB").quantize(colors, dither=Image.Dither.NONE)
    image.save(path, optimize=True, pnginfo=info)
    return path


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        for theme in THEMES:
            path = write(name, theme)
            print(f"{path.relative_to(HERE.parents[1])}: {path.stat().st_size:,} bytes")
