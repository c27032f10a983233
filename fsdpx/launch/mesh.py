"""Command-line options for mesh, schedule, sequence and recomputing, as `distribute` takes them."""

import argparse
from typing import Any

from fsdpx.comm.mesh import AXES, Mesh
from fsdpx.errors import ConfigError
from fsdpx.program import SCHEDULES

__all__ = ["add_options", "check_axes", "mesh_text", "parse_recompute"]


def add_options(p: argparse.ArgumentParser, also: str = "") -> None:
    """Add --mesh, --schedule, --sequence and --recompute. also: a further value of schedule and sequence, for help."""
    p.add_argument("--mesh", default=None, help="widths of axes, such as pipe=2,tensor=2; also replica and shard")
    p.add_argument("--schedule", default=None, help=f"of the pipe: {', '.join(SCHEDULES)}, a text file{also}")
    p.add_argument("--sequence", default=None, help=f"over the tensor axis: parallel, ulysses, ring, samples{also}")
    p.add_argument("--recompute", default=None, help="all, attention, k (every k-th unit), or bytes such as 512MiB")


def check_axes(mesh: Mesh | None, schedule: str | None, sequence: str | None) -> None:
    """ConfigError for a schedule without a pipe axis and a sequence without a tensor axis."""
    if schedule is not None and (mesh is None or mesh.pipe == 1):
        raise ConfigError(f"--schedule {schedule}: the mesh has no pipe axis; say --mesh pipe=2")
    if sequence is not None and (mesh is None or mesh.tensor == 1):
        raise ConfigError(f"--sequence {sequence}: the mesh has no tensor axis; say --mesh tensor=2")


def parse_recompute(text: str | None) -> Any:
    return int(text) if text is not None and text.isdecimal() else text


def mesh_text(mesh: Mesh) -> str:
    """The axes of a mesh that are wider than 1, as text."""
    return " x ".join(f"{axis}={mesh.width(axis)}" for axis in AXES if mesh.width(axis) > 1) or "one rank"
