"""Class hierarchy of all errors that fsdpx raises.

FsdpxError
├── ConfigError (ValueError)      an option, a model or a combination of them that cannot work
│   ├── MeshError                 a mesh whose size does not fit the number of ranks
│   ├── ShapeError                an array whose shape does not fit, or layers that do not fit together
│   └── LaunchError               ranks that cannot be started as one job
├── DataError (ValueError)        a batch, a label or a dataset that cannot be used
├── CheckpointError (ValueError)  a checkpoint that cannot be written, read or used
├── OffloadError (OSError)        a folder of offloaded state that is missing, full, in use or broken
├── OutOfMemory (MemoryError)     a plan that does not fit into the memory of a rank
├── NumericsError (ArithmeticError)   NaN or Inf where a number was needed
├── ProgramError                  a program of a step that `fsdpx.core.program.check` rejects
└── CommError (RuntimeError)      communication that failed
    ├── DesyncError               ranks called different collectives
    ├── CommTimeout               a peer did not answer in time
    ├── RankLost                  a rank died, or another rank revoked the communicator
    ├── StateLost                 no rank has a copy of the state of the dead ranks
    └── Aborted                   another rank failed first
"""

import re
import sys
import warnings
from collections.abc import Iterable

__all__ = [
    "Aborted", "CheckpointError", "CommError", "CommTimeout", "ConfigError", "DataError", "DesyncError", "FsdpxError",
    "LaunchError", "MeshError", "NumericsError", "OffloadError", "OutOfMemory", "ProgramError", "RankLost",
    "ShapeError", "StateLost", "escape_control", "install_hint", "page_hint", "warn",
]  # fmt: skip

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters of terminals, except tab and line feed."""


def escape_control(text: str) -> str:
    r"""Return `text` with control characters written as `\xNN`, so that text from untrusted files cannot control a
    terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def install_hint(*extras: str) -> str:
    """Return the command that installs one of the given extras, for an error message. The command names the folder of
    fsdpx's sources, because fsdpx is not in any package index."""
    commands = " or ".join(f"pip install '.[{extra}]'" for extra in extras)
    return f"{commands} in the folder of fsdpx's sources"


def page_hint(page: str) -> str:
    """Return a phrase that refers to a page of the documentation, for an error message. `page` is the page's file
    name."""
    return f"the page {page} of the documentation"


_BETWEEN = {"contextlib", "fsdpx", "functools", "importlib", "numba"}
"""Packages whose frames are skipped when a warning is attributed to a line of the caller."""


def warn(text: str, kind: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning that points to the line of the user's program that called fsdpx. Modules of `fsdpx.examples`
    count as user programs."""
    frame = sys._getframe(1)
    name = frame.f_globals.get("__name__", "")
    while frame.f_back and name.partition(".")[0] in _BETWEEN and not name.startswith("fsdpx.examples."):
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, kind, frame.f_code.co_filename, frame.f_lineno, name, seen)


class FsdpxError(Exception):
    """Base class of all errors that fsdpx raises deliberately. Control characters in the text are escaped, because the
    text may contain names from untrusted files."""

    def __str__(self) -> str:
        return escape_control(super().__str__())


class ConfigError(FsdpxError, ValueError):
    """Raised for an option or a model that cannot work, or for options and models that cannot work together."""


class MeshError(ConfigError):
    """Raised if the size of a mesh does not match the number of ranks."""


class ShapeError(ConfigError):
    """Raised for an array whose shape does not fit the layer or function that receives it, or for layers that do not
    fit together."""


class LaunchError(ConfigError):
    """Raised if ranks cannot be started as one job, for example because the launcher and MPI disagree, or because ranks
    cannot find each other."""


class DataError(FsdpxError, ValueError):
    """Raised for a batch, a label or a dataset that cannot be used."""


class CheckpointError(FsdpxError, ValueError):
    """Raised if a checkpoint cannot be written, read or used. Collective calls raise it with the same text on all
    ranks."""


class OffloadError(FsdpxError, OSError):
    """Raised if state cannot be stored in the folder of `OffloadConfig`. If the folder cannot be opened, all ranks
    raise this error."""


class OutOfMemory(FsdpxError, MemoryError):
    """Raised if this rank has less memory than its plan needs. The message shows the plan, the available memory, and
    options that would fit."""


class NumericsError(FsdpxError, ArithmeticError):
    """Raised for NaN or Inf where a finite number is needed."""


class ProgramError(FsdpxError):
    """Raised by `fsdpx.core.program.check` for a program that would deadlock, leak memory or read a value before it
    exists."""


class CommError(FsdpxError, RuntimeError):
    """Raised if communication failed. Base class of all communication errors."""


class DesyncError(CommError):
    """Raised if ranks called different collectives, or if a rank did not make the call at all."""


class CommTimeout(CommError, TimeoutError):
    """Raised if a peer did not answer before the timeout."""


class RankLost(CommError):
    """Raised if a rank of this communicator died, or another rank revoked the communicator because a rank died.

    Attributes
    ----------
    ranks : ranks of this communicator that this rank knows to be dead; may be empty
    """

    def __init__(self, message: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class StateLost(CommError):
    """Raised on all surviving ranks if parts of the training state were held only by ranks that died."""


class Aborted(CommError):
    """Raised on a rank that was interrupted because another rank failed first."""
