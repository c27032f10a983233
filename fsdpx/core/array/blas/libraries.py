"""Find the installed BLAS libraries whose functions can be called by address, set them up, and choose one of them for
the matrix products of this process."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path

import numpy as np

from fsdpx.core.array.kernels.choice import has_numba
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.processor import read_cpuinfo_field
from fsdpx.errors import ConfigError

__all__ = [
    "ADDRESSES", "LIBRARY_NAMES", "MAX_ROWS_WITHOUT_BLAS", "BlasLibrary", "describe_library_files",
    "find_preferred_library", "get_gemm_address", "get_product_threads", "get_selected_library", "is_intel_processor",
    "list_available_blas_libraries", "list_candidate_library_files", "load_blas_library", "load_shared_library",
    "select_library", "set_product_threads",
]  # fmt: skip

LIBRARY_NAMES = ("mkl", "openblas")
"""Names of the libraries that compute in float32 and float64."""
WHEELS = {"mkl": "libmkl_rt.so*", "onednn": "libdnnl.so*"}
"""File name patterns, keyed by library name. Wheels install these files in Python's `lib` folder."""

SEQUENTIAL = 1  # value for MKL_Set_Threading_Layer that loads no OpenMP runtime
AUTO, STRICT = 2, 0x10000  # values of MKL_CBWR_Set
AVX512 = 11  # MKL_CBWR_Get_Auto_Branch returns at least this value if MKL uses AVX-512 code


@dataclass(frozen=True)
class BlasLibrary:
    """A loaded BLAS library. `sgemm` and `dgemm` are the addresses of the library's functions `cblas_sgemm` and
    `cblas_dgemm`, which take 64-bit sizes."""

    name: str
    path: str
    version: str
    sgemm: int
    dgemm: int


@cache
def load_blas_library(name: str) -> BlasLibrary | None:
    """Load one of `LIBRARY_NAMES`; return None if it is not installed. Libraries are loaded only when they are needed,
    because each one takes up memory."""
    make = _load_mkl if name == "mkl" else _load_openblas
    for path in list_candidate_library_files(name):
        try:
            return make(path)
        except (OSError, AttributeError):  # the library cannot be loaded, or lacks required functions
            continue
    return None


@cache
def find_preferred_library() -> str | None:
    """Return the name of the default library: MKL on Intel processors, NumPy's own OpenBLAS on others. If the default
    library is not installed, return the other one. If neither is installed, return None."""
    order = LIBRARY_NAMES if is_intel_processor() else LIBRARY_NAMES[::-1]
    return next((name for name in order if load_blas_library(name) is not None), None)


def list_candidate_library_files(name: str) -> list[Path]:
    """Return the files that may contain the library `name` ("mkl", "openblas" or "onednn"). Within a folder, the newest
    file comes first."""
    if name in WHEELS:
        folders = [Path(prefix, "lib") for prefix in dict.fromkeys((sys.prefix, sys.base_prefix))]
        return [path for folder in folders for path in sorted(folder.glob(WHEELS[name]), reverse=True)]
    package = Path(np.__file__).parent
    folders = [package.parent / "numpy.libs", package / ".dylibs"]
    return [path for folder in folders for path in sorted(folder.glob("libscipy_openblas64_*"))]


def describe_library_files() -> dict[str, str]:
    """Return a dict that maps the name of each installed library to a text. The text contains the path, size and
    modification time of the library file. No library is loaded. Stored measurements are valid only as long as these
    texts stay the same."""
    first = {name: paths[0] for name in (*LIBRARY_NAMES, "onednn") if (paths := list_candidate_library_files(name))}
    return {name: f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for name, path in first.items()}


def _load_mkl(path: Path) -> BlasLibrary:
    """Load MKL so that it computes only in the calling thread and returns bitwise equal results in every run.

    The MKL documentation guarantees bitwise equal results for all memory alignments only with the flag MKL_CBWR_STRICT,
    which makes small products 20% slower. In measurements with AVX-512, results were bitwise equal at all alignments
    even without this flag.
    """
    library = load_shared_library(path)
    if library.MKL_Set_Threading_Layer(SEQUENTIAL) != SEQUENTIAL:
        raise OSError(f"{path} was started with another threading layer")
    library.MKL_CBWR_Set(AUTO if library.MKL_CBWR_Get_Auto_Branch() >= AVX512 else AUTO | STRICT)
    text = ctypes.create_string_buffer(200)
    library.MKL_Get_Version_String(text, len(text))
    sgemm, dgemm = _get_address(library.cblas_sgemm_64), _get_address(library.cblas_dgemm_64)
    return BlasLibrary("mkl", str(path), text.value.decode(), sgemm, dgemm)


def _load_openblas(path: Path) -> BlasLibrary:
    library = load_shared_library(path)
    library.scipy_openblas_get_config64_.restype = ctypes.c_char_p
    version = library.scipy_openblas_get_config64_().decode().strip()
    sgemm, dgemm = _get_address(library.scipy_cblas_sgemm64_), _get_address(library.scipy_cblas_dgemm64_)
    return BlasLibrary("openblas", str(path), version, sgemm, dgemm)


def load_shared_library(path: Path) -> ctypes.CDLL:
    """Load a library with RTLD_LOCAL, so that other copies of BLAS in the process cannot bind to its symbols."""
    return ctypes.CDLL(str(path), mode=getattr(ctypes, "RTLD_LOCAL", ctypes.DEFAULT_MODE))


def _get_address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


def is_intel_processor() -> bool:
    return "Intel" in (read_cpuinfo_field("vendor_id") or platform.processor())


NUMPY = "numpy"
"""Name that selects `numpy.matmul` instead of a BLAS library. It is always available, and is the only choice without
Numba."""
MAX_ROWS_WITHOUT_BLAS = 4
"""Maximum number of rows of x for which compiled code computes `x @ weight.T` without BLAS, reading `weight` once. A
library would first copy `weight`, which pays off only for many rows."""

requested_library: str | None = None  # set by `select_library`
product_threads = 1  # set by `set_product_threads`


def list_available_blas_libraries() -> dict[str, str]:
    """Return a dict that maps each name that `select_library` accepts to a text with the path and version of the
    library."""
    libraries = [(name, load_blas_library(name)) for name in LIBRARY_NAMES if has_numba()]
    where = {name: f"{one.path} ({one.version})" for name, one in libraries if one is not None}
    return where | {NUMPY: f"numpy.matmul (NumPy {np.__version__})"}


def select_library(name: str | None) -> None:
    """Use the BLAS library `name` for all later matrix products; None selects the default. All ranks of a job must
    select the same library."""
    global requested_library
    if name not in (None, NUMPY) and _find_library(str(name)) is None:
        raise ConfigError(f"BLAS {name!r} is not available: choose one of {', '.join(list_available_blas_libraries())}")
    requested_library = name
    ADDRESSES.clear()


def get_selected_library() -> str:
    """Return the name of the BLAS library in use."""
    if requested_library is not None:
        return requested_library
    return (find_preferred_library() if has_numba() else None) or NUMPY


def get_gemm_address(dtype: np.dtype) -> int:
    """Return the address of the selected library's gemm function for float32 or float64, or 0 if `numpy.matmul` should
    be called instead."""
    return ADDRESSES[dtype.char] if dtype.isnative else 0


def set_product_threads(n: int) -> None:
    """Set the number of threads that each matrix product is split over. Inside `limit_threads`, the library computes
    each part of a product on a single thread."""
    global product_threads
    product_threads = n


def get_product_threads() -> int:
    """Return the number of threads that each matrix product is split over."""
    return product_threads


def _find_library(name: str) -> BlasLibrary | None:
    return load_blas_library(name) if name in LIBRARY_NAMES and has_numba() else None


class GemmAddresses(dict[str, int]):
    """A dict that maps a dtype character to the address of the gemm function for this dtype. Addresses are looked up on
    first use."""

    def __missing__(self, char: str) -> int:
        used = _find_library(get_selected_library()) if char in "fd" else None
        self[char] = 0 if used is None else used.sgemm if char == "f" else used.dgemm
        return self[char]


ADDRESSES = GemmAddresses()
