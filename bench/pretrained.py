"""A folder of weights is loaded by the ranks of a host, beside a plain read of the same files by as many.

    mpiexec -n 4 python bench/pretrained.py [--gib 2] [--rounds 3]

Rank 0 writes the folder, a Llama of random weights in float32, below the temporary folder. In each round the ranks read
the files, each an equal stretch into memory of its own, and then load them by `from_pretrained` and `distribute`. The
files are in the page cache in both, and giving the memory back is timed in neither. Bytes read are those of the kernel
(/proc/self/io), and the peak is what a rank's process had at most above what it had before the first of them.
"""

import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from records import arguments, lines, save

import fsdpx
from fsdpx import models, nn, optim
from fsdpx.checkpoint.files import INDEX
from fsdpx.checkpoint.format import lay

MIB = 1 << 20
FILES = 4


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, inner = config["hidden_size"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        found |= {f"{at}.self_attn.{name}_proj.weight": (d, d) for name in "qkvo"}
        found |= {f"{at}.mlp.{name}_proj.weight": (inner, d) for name in ("gate", "up")}
        found |= {f"{at}.mlp.down_proj.weight": (d, inner)}
        found |= {f"{at}.{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")}
    return found | {"model.norm.weight": (d,)}


def made(folder: Path, gib: float) -> None:
    """A Llama of about so many GiB in float32, in several files with an index."""
    d = 2048 if gib >= 1 else 512
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": d, "num_hidden_layers": 1,
        "intermediate_size": 11 * d // 4, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 16 * d,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    one = 4 * d * d + 3 * d * config["intermediate_size"]
    config["num_hidden_layers"] = max(round((gib * 2**30 / 4 - config["vocab_size"] * d) / one), 1)
    (folder / "config.json").write_text(json.dumps(config))
    names, weight_map = list(shapes(config).items()), {}
    random = np.random.default_rng(0).standard_normal(MIB, np.float32) * np.float32(0.02)
    for n in range(FILES):
        file = f"model-{n + 1:05}-of-{FILES:05}.safetensors"
        some = dict(names[n * len(names) // FILES : (n + 1) * len(names) // FILES])
        plan = lay({name: ("F32", shape) for name, shape in some.items()}, {"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
        with (folder / file).open("wb") as out:
            out.write(plan.header)
            left = plan.size - len(plan.header)
            while left:
                out.write(random.data.cast("B")[: min(left, random.nbytes)])
                left -= min(left, random.nbytes)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read(folder: Path, comm: Any) -> Callable[[], int]:
    """Read this rank's stretch of each file. The result gives their memory back, and tells how many bytes it was."""
    rank, size, held = comm.rank, comm.size, []
    for file in sorted(folder.glob("*.safetensors")):
        whole = file.stat().st_size
        start, stop = whole * rank // size, whole * (rank + 1) // size
        into = memoryview(mmap(-1, stop - start))  # pages that nobody had before, as shards are
        held.append(into)
        with file.open("rb", buffering=0) as source:
            source.seek(start)
            while into:
                into = into[source.readinto(into) :]

    def give_back() -> int:
        total = sum(part.nbytes for part in held)
        held.clear()
        return total

    return give_back


def load(folder: Path, comm: Any) -> Callable[[], int]:
    """The same of this rank's part of the model."""
    trainer = models.from_pretrained(folder).as_distributed(
        comm=comm, loss=nn.CrossEntropy(), optimizer=optim.SGD(lr=0.1), strategy="fsdp", tune=False
    )

    def give_back() -> int:
        part: int = trainer.report().memory["parameters"]
        trainer.close()
        return part

    return give_back


def told(file: str, name: str) -> int:
    """A number that the kernel says of this process."""
    line = next(line for line in Path(f"/proc/self/{file}").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def measured(folder: Path, comm: Any, what: str, rss: int) -> dict[str, float]:
    """rss: KiB of the process before anything was loaded, kernels included."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = told("io", "rchar")
    comm.barrier().wait()
    begin = perf_counter()
    give_back = (read if what == "read" else load)(folder, comm)
    comm.barrier().wait()
    seconds = perf_counter() - begin
    peak, part = 1024 * (told("status", "VmHWM") - rss), give_back()
    return {"seconds": seconds, "read": told("io", "rchar") - before, "part": part, "over": peak - part}


def tables(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    rows = [
        [what, f"{r['seconds']:.2f}", f"{r['read'] / 2**30:.3f}", f"{r['part'] / MIB:.0f}", f"{r['over'] / MIB:.0f}"]
        for what, r in found["ways"].items()
    ]
    head = ["", "seconds", "GiB read by all", "a rank's part, MiB", "peak beside it, MiB"]
    ratio = found["ways"]["load"]["seconds"] / found["ways"]["read"]["seconds"]
    said = f"{found['gib']:.2f} GiB on {found['ranks']} ranks; loading takes {ratio:.2f} times the read"
    yield "loading", f"{lines(head, rows)}\n\n{said}"


def main() -> int:
    p = arguments(__doc__, rounds=3)
    p.add_argument("--gib", type=float, default=2.0, help="of the folder")
    options = p.parse_args()
    gib, rounds = (0.1, 2) if options.quick else (options.gib, options.rounds)
    comm = fsdpx.init()
    folder = Path(comm.all_gather_object(tempfile.mkdtemp() if comm.rank == 0 else "")[0])
    try:
        if comm.rank == 0:
            made(folder, gib)
            (folder / "small").mkdir()
            made(folder / "small", 0.03)
        comm.barrier().wait()
        load(folder / "small", comm)()  # kernels are compiled
        gc.collect()
        rss = told("status", "VmRSS")
        read(folder, comm)()  # files are in the page cache
        ways: dict[str, list[dict[str, float]]] = {"read": [], "load": []}
        for _ in range(rounds):
            for what, results in ways.items():
                results.append(measured(folder, comm, what, rss))
        ranks = comm.all_gather_object(ways)
        whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    finally:
        comm.barrier().wait()
        if comm.rank == 0:
            shutil.rmtree(folder)
    if comm.rank == 0:
        kinds = {"seconds": max, "read": sum, "part": max, "over": max}
        found = {
            what: {
                name: median(over(rank[what][n][name] for rank in ranks) for n in range(rounds))
                for name, over in kinds.items()
            }
            for what in ways
        }
        record = {"gib": whole / 2**30, "ranks": comm.size, "ways": found}
        save("pretrained", options, record)
        for _, text in tables(record):
            print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
