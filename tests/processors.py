"""Run the tests on thread ranks as other processors would: `make test-processors`.

    python tests/processors.py                # every variant that this machine can run
    python tests/processors.py --list         # their names
    python tests/processors.py --only skylake-avx512 -- tests/optim -q

NumPy, Numba and BLAS libraries choose instructions by the processor, and with them the order in which a sum is added.
A test that passes only on one processor compares bits that nothing promises, or finds a promise that is not kept. Each
variant is one run of pytest with one thing changed: the processor that Numba compiles for, the levels of instructions
that NumPy may use, the library of matrix products, or its threads.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

from fsdpx.core.array import blas

ROOT = Path(__file__).parents[1]
TESTS = ["tests", "-m", "not world and not jobs", "-q", "-n", "2", "--dist", "worksteal"]
QUICK = ["tests/optim/test_kernels.py", "tests/core/array/test_numerics.py", *TESTS[1:6]]
AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
PROCESSORS = {
    "haswell": ("avx2", "bmi2", "fma"),
    "znver3": ("avx2", "bmi2", "fma", "clzero", "sse4a", "vaes"),
    "skylake-avx512": AVX512,
    "sapphirerapids": (*AVX512, "avx512_bf16", "avx512_vnni", "avx512vbmi", "avx512_vbmi2", "vaes", "gfni"),
}
"""Numba's names of processors -> the flags of /proc/cpuinfo that their code needs."""
LEFT_OUT = {"sapphirerapids": ("avx512fp16", "amx-tile", "amx-int8", "amx-bf16")}
"""Instructions that kernels do well without, and that are left out where a processor lacks some of them."""


class Variant(NamedTuple):
    """What is different in one run. variables: of the environment. options: of pytest. lacking: why it cannot run."""

    name: str
    variables: dict[str, str]
    options: tuple[str, ...] = ()
    lacking: str = ""


def list_variants() -> Iterator[Variant]:
    """Every variant that there is, with what this machine lacks for it."""
    flags = read_processor_flags()
    for name, needed in PROCESSORS.items():
        masked = [f"-{feature}" for feature in LEFT_OUT.get(name, ()) if feature.replace("-", "_") not in flags]
        variables = {"NUMBA_CPU_NAME": name, **({"NUMBA_CPU_FEATURES": ",".join(masked)} if masked else {})}
        yield Variant(name, variables, lacking=" ".join(flag for flag in needed if flag not in flags))
    levels = [level for level in __cpu_dispatch__ if __cpu_features__[level]]
    for first in range(len(levels)):
        taken = " ".join(levels[first:])
        yield Variant(f"numpy-without-{levels[first]}", {"NPY_DISABLE_CPU_FEATURES": taken})
    for library in blas.list_available_blas_libraries():
        yield Variant(f"blas-{library}", {}, ("--blas", library))
    for threads in ("1", "2"):
        names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
        yield Variant(f"threads-{threads}", dict.fromkeys(names, threads), ("--threads", threads))


def read_processor_flags() -> set[str]:
    """The flags of the first processor in /proc/cpuinfo; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def run_tests(variant: Variant, arguments: list[str]) -> int:
    """Run pytest; the exit status."""
    print(f"\n== {variant.name}: {variant.variables or ' '.join(variant.options)}", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, *variant.options]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variant.variables}).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="print the variants and what this machine lacks")
    parser.add_argument("--only", action="append", metavar="NAME", help="one variant; may be given several times")
    parser.add_argument("--quick", action="store_true", help="norms and updates, on narrow vectors")
    parser.add_argument("tests", nargs="*", help="arguments of pytest after --; else all tests on thread ranks")
    options = parser.parse_args()
    variants = {variant.name: variant for variant in list_variants()}
    unknown = [name for name in options.only or () if name not in variants]
    if unknown:
        parser.error(f"no variant is called {unknown[0]}; there are {', '.join(variants)}")
    if options.list:
        for one in variants.values():
            print(f"{one.name:28} {'lacks ' + one.lacking if one.lacking else ''}")
        return 0
    status: dict[str, str] = {}
    arguments = options.tests or (QUICK if options.quick else TESTS)
    narrow = next((name for name in variants if name.startswith("numpy-without-")), "threads-1")
    for name in options.only or (["haswell", narrow] if options.quick else variants):
        variant = variants[name]
        if variant.lacking:
            status[name] = f"not run: this processor lacks {variant.lacking}"
        else:
            status[name] = "passed" if run_tests(variant, arguments) == 0 else "FAILED"
    print("\n" + "\n".join(f"{name:28} {found}" for name, found in status.items()))
    return int("FAILED" in status.values())


if __name__ == "__main__":
    sys.exit(main())
