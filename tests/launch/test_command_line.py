"""The command line: what info, show and verify print; real MPI jobs where they need one."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from commands import refused, shown, start
from trials import ROOT, job

import fsdpx
from fsdpx import nn
from fsdpx.__main__ import main, make_parser
from fsdpx.core.base import messages
from fsdpx.errors import install_hint
from fsdpx.plan import predict

pytestmark = pytest.mark.mpi_skip


def test_info_names_what_was_found() -> None:
    said = shown("info")
    for word in ("fsdpx", "NumPy", "BLAS", "MPI library", "Numba", "cores for this process", "launcher"):
        assert word in said


def test_show_counts_what_a_thousand_small_layers_cost_whatever_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it prints another program on a machine where a job has run before."""
    monkeypatch.setenv("FSDPX_TUNE", "1")
    printed = []
    for known in (None, "openblas"):
        monkeypatch.setattr("fsdpx.core.state.tuning.load_record", lambda *_, known=known: known)
        printed.append(show("many --ranks 4"))
    text = printed[0]
    assert "GATHER3" in text
    assert text.partition("process")[0] == printed[1].partition("process")[0]
    assert int(re.search(r"(\d+) all-gathers in the first forward", text)[1]) <= 50
    rows = re.findall(r"(all-gather|reduce-scatter) over shard +(\d+) +(\S+ \S+) +(\d+) calls, (\S+ \S+)", text)
    assert len(rows) == 2
    assert all(calls == predicted and size == expected for _, calls, size, predicted, expected in rows)
    pattern = r"`python -m fsdpx show many --ranks 4`.*?^```text\n(LOAD.*?)^```"
    (picture,) = re.findall(pattern, (ROOT / "docs/concepts.md").read_text(), re.S | re.M)
    assert " ".join(picture.split()) in " ".join(text.split())  # what the page shows is what it prints


def test_show_without_grouping_has_a_unit_per_layer() -> None:
    """Of six units four are left where small ones are joined."""
    found = [show(f"gpt-tiny --ranks 2 --group-bytes {n}") for n in ("0", "1MiB")]
    assert [re.findall(r"(\d+) units; (\d+) all-gathers in the first forward", text) for text in found] == [
        [("6", "8")], [("4", "6")]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "example"),
    [("ddp", "gpt-tiny"), *((name, "digits") for name in ("zero1", "zero2", "zero3", "fsdp", "hybrid"))],
)
def test_show_any_example_and_strategy(example: str, strategy: str) -> None:
    text = show(f"{example} --strategy {strategy} --ranks 4 --rank 3 --microbatches 2 --lower")
    assert "program," in text
    assert "activations at their peak" in text
    assert "LOSS.1" in text or "lines ..." in text
    assert not re.search(r"activations at their peak +0 B", text)
    assert re.search(r"^lowered to +by this alone$", text, re.M)


def test_show_of_a_field_over_ranks() -> None:
    out = show("unet3d --domain 2,2,2 --field 96,80,64")
    assert "rank 0 of 8, batch 1, with 48 x 40 x 32 cells of Grid((96, 80, 64) cells over (2, 2, 2) ranks" in out
    assert "send over domain" in out
    out = show("unet3d --domain 3,1,1 --field 80,32,32")  # the busiest part, not the first
    assert "rank 1 of 3, batch 1, with 27 x 32 x 32 cells of" in out
    out = show("unet2d --mesh replica=2,domain=2x1 --batch 2")
    assert "fsdp on replica=2 x shard=2, rank 0 of 4, batch 2, with 128 x 256 cells" in out


def test_show_of_a_thousand_ranks_and_a_model_that_would_not_fit() -> None:
    assert "rank 1023 of 1024" in show("gpt-medium --ranks 1024 --batch 1024 --rank 1023")


MODELS = """
from fsdpx import nn

def make_model():
    return nn.GPT(1000, 64, 2, 4, 128)

def classifier():
    return nn.Sequential(nn.Linear(32, 10)), nn.CrossEntropyLoss()

plain = nn.Sequential(nn.Linear(32, 16))

def number():
    return 3

def embedding():
    return nn.Sequential(nn.Embedding(100, 16), nn.Linear(15, 4))

def wide(features, bias=True):
    return nn.Linear(features, 1, bias=bias)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a module of models to work in."""
    (tmp_path / "own_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.parametrize(
    ("name", "batch", "words"),
    [
        ("make_model", "8x128", "GPT, samples of 128 int64, CrossEntropyLoss()"),
        ("classifier", "8x32", "Sequential, samples of 32 float32, CrossEntropyLoss()"),
        ("plain", "8x32:float32", "Sequential, samples of 32 float32, MSELoss()"),
    ],
)
def test_show_takes_a_model_of_the_user(own: None, name: str, batch: str, words: str) -> None:
    text = show(f"own_models:{name} --batch {batch} --ranks 2")
    assert f"own_models:{name}: {words}" in text
    assert "rank 0 of 2, batch 8" in text
    assert "memory of the process" in text


def test_show_tells_whether_a_budget_is_kept() -> None:
    text = show("digits --ranks 4 --memory 2GiB")
    assert re.search(r"budget kept: \S+ MiB of 2.00 GiB per rank", text)
    assert re.search(r"^4 such ranks on a host +\S+ [MG]iB$", text, re.M)
    text = show("digits --ranks 4 --ranks-per-host 1 --memory 64MiB")
    assert re.search(r"budget NOT kept: \S+ MiB of 64.00 MiB per rank, .*, \S+ MiB too much", text)
    assert text.index("holds ") < text.index("budget NOT kept") < text.index("\nprogram, ")  # the answer first
    assert "such ranks on a host" not in text
    assert "none of the choices that fsdpx knows fits: take more ranks" in text


def test_show_searches_for_what_fits() -> None:
    (mib,) = re.findall(r"^in all +\S+ \S+ +(\S+) MiB$", show("gpt-small --ranks 4 --strategy ddp"), re.M)
    text = show(f"gpt-small --ranks 4 --strategy ddp --memory {float(mib) * 0.6}MiB")
    first, *_, last = re.search(r"^what would take less +bytes\n-+\n((?:.+\n)*)", text, re.M)[1].splitlines()
    assert first.startswith("strategy='zero1'  ")
    assert last.endswith(" MiB  fits")


def test_show_of_chunks_takes_a_batch_that_can_be_cut_and_a_rank_that_has_some() -> None:
    assert "rank 1 of 4, batch 258" in show("mlp --chunks 3")


def show(line: str) -> str:
    return shown(f"show {line}")


def test_show_of_a_pipe_has_its_grid_bubble_and_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "zbv.png"
    line = "gpt-tiny --mesh pipe=2,tensor=2 --schedule zbv --microbatches 4 --recompute all --sequence parallel"
    text = show(f"{line} --grid --png {png} --rank 1")
    assert "gpt-tiny: GPT, 4 blocks" in text
    assert "fsdp on pipe=2 x tensor=2, rank 1 of 4, batch 16" in text
    for word in ("C0.0", "R3.0", "I3.0", "W3.0", "SEND0.0", "RECV2.0", "TIE2"):
        assert f" {word}" in text, word
    assert len(re.findall(r"^rank \d  ", text, re.M)) == 2
    assert "schedule zbv: 4 stages, 4 microbatches" in text
    assert "bubble 0.0% (simulated, messages take no time); in flight by rank: 4, 4" in text
    assert png.read_bytes().startswith(b"\x89PNG")
    assert f"drawn: {png}" in text


def test_a_picture_tells_strategies_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same model and ranks, without a pipe as well."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    words = {}
    for strategy in ("ddp", "fsdp"):
        path = tmp_path / f"{strategy}.svg"
        said = show(f"mlp --ranks 2 --strategy {strategy} --machine laptop --png {path}")
        assert re.search(rf"^drawn: {path}, a step of 2 ranks of laptop: \S+ s \(compute ", said, re.M)
        words[strategy] = set(re.findall(r">([^<>]+)</text>", path.read_text(encoding="utf-8")))
        assert {strategy, "mlp, batch 256, on laptop", "rank 0", "rank 1", "optimizer", "memory"} <= words[strategy]
    assert {"gather"} <= words["fsdp"] - words["ddp"]
    memory = re.compile(r"\d+ MiB")
    least, most = (next(float(word[:-4]) for word in words[one] if memory.fullmatch(word)) for one in ("fsdp", "ddp"))
    assert least < 0.7 * most


def test_a_picture_of_many_ranks_has_a_row_for_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    path = tmp_path / "step.svg"
    said = show(f"gpt-tiny --mesh pipe=2,replica=8 --strategy ddp --microbatches 16 --batch 128 --png {path}")
    assert f"drawn: {path}, a step of 16 ranks of epyc-100g, 8 of 16 microbatches: " in said
    words = re.findall(r">([^<>]+)</text>", path.read_text(encoding="utf-8"))
    assert [words.count(word) for word in ("rank 0", "rank 8", "and 7 more", "message")] == [1, 1, 2, 1]
    said = refused("show mlp --machine laptop")
    assert "--machine laptop: of a simulated step; say --png FILE or --trace FILE, too" in said
    found = json.loads(show(f"digits --ranks 2 --json --png {path}"))["simulated"]
    assert [line.partition(",")[0] for line in found] == [f"drawn: {path}"]
    said = refused(f"show mlp --ranks 8 --machine laptop --png {path}")
    assert "machine 'laptop': its last level, host, holds 4 ranks" in said


def test_a_picture_of_parts_of_a_field_is_of_the_whole_field(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    field = ((2, 3, 16, 16), "float32")
    found = predict(nn.UNet(3, 3, 2, 16, 4), (field, field), ranks=4, machine="laptop", strategy="fsdp", domain=(2, 2),
                    loss=nn.RelativeL2())  # fmt: skip
    said = show(f"unet2d --domain 2,2 --field 16,16 --batch 2 --machine laptop --png {tmp_path / 'step.png'}")
    assert f"a step of 4 ranks of laptop: {found}" in said


def test_show_of_a_grid_without_a_pipe_has_one_row() -> None:
    text = show("mlp --ranks 2 --microbatches 2 --grid")
    assert re.findall(r"^rank \d  .*", text, re.M) == ["rank 0  F0 B0 -- F1 B1 --"]
    assert "schedule 1f1b: 1 stage, 2 microbatches" in text


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv"])
@pytest.mark.parametrize("stage", range(2))
def test_show_of_any_rank_predicts_what_it_counts(stage: int, schedule: str) -> None:
    """Of one of the two ranks that share a stage: a schedule does not see which part of a shard a rank has."""
    rank = 2 * stage + (len(schedule) + stage) % 2
    text = show(f"gpt-tiny --mesh pipe=2,shard=2 --schedule {schedule} --microbatches 4 --rank {rank}")
    rows = re.findall(r"over (pipe|shard|peers) +(\S+) +(\S+ \S+) +(\S+) calls, (\S+ \S+)", text)
    assert len(rows) >= 4
    assert all(calls == predicted and size == expected for _, calls, size, predicted, expected in rows)


def test_show_counts_what_layers_move_by_themselves() -> None:
    text = show("gpt-tiny --mesh tensor=2,shard=2 --sequence parallel")
    assert re.search(r"all-gather over tensor +\S+ +\S+ \S+ +\(in layers\)", text)
    assert re.search(r"all-reduce over tensor +\d+ +\S+ \S+ +\d+ calls, \S+ \S+ \(in layers\)", text)
    assert re.search(r"all-gather over world +1 .*\(control\)", text)


def test_ranks_of_one_line_have_the_same_batch() -> None:
    """13 samples on 2 data ranks are 6 and 7: at equal stages their activations differ, along a line they do not."""
    texts = [show(f"gpt-tiny --mesh tensor=2,shard=2 --batch 13 --rank {rank}") for rank in range(4)]
    peaks = [re.findall(r"activations at their peak +(\S+ \S+)", text) for text in texts]
    assert peaks[0] == peaks[1] != peaks[2] == peaks[3]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("show nothing", "no example 'nothing': choose one of gpt-tiny"),
        ("show --strategy zero9", "unknown strategy 'zero9'"),
        ("show --ranks 2 --rank 2", "fsdpx show: rank 2 of 2 does not exist"),
        ("show --mesh pipe=2 --ranks 3", "needs a multiple of 2 ranks, but the world has 3"),
        ("show --mesh pipe=2 --recompute some", "recompute='some': choose 'all', 'attention'"),
        ("show --mesh pipe=2 --schedule mine", "schedule='mine' is none of 'gpipe', '1f1b'"),
        ("show --mesh pipe=4 --schedule zbv", "puts 2 on each of 4 ranks), but the model has only 7 layers"),
        ("show mlp --chunks 3 --batch 256", "--chunks 3: a global batch of 256 samples does not divide; "),
        ("show mlp --chunks 3 --rank 0", "--rank 0: of 3 chunks this one of 4 ranks gets none; say --rank 1"),
        ("show mlp --memory lots", "--memory='lots': a number of bytes is needed, such as 1048576, '1MiB'"),
        ("show mlp --group-bytes '1 cup'", "group_bytes='1 cup': a number of bytes is needed"),
        ("run -n 2 nofile.py", "fsdpx run: there is no script 'nofile.py' in /"),
        (f"run -n 2 {ROOT}", f"fsdpx run: '{ROOT}' is no script but a folder, and has no __main__.py\n"),
        ("run -n 0 nofile.py", "fsdpx run: ranks=0: one or more is needed\n"),
        ("show --ranks 0", "fsdpx show: --ranks 0 --batch 16: both at least 1"),
        ("run -n 2 -m no.such", "fsdpx run: there is no module 'no.such' on Python's path or in /"),
        (f"run -n 2 --mpiexec 'nompi -q' {__file__}", "fsdpx run: nompi -q cannot be started: there is no such "),
        ("show mlp --domain 2,2", "--domain and --field: mlp takes no fields; unet2d, unet3d, fno2d do"),
        ("show unet3d --domain 2,2", "(64, 64, 64) cells over (2, 2) ranks: give a number above 0 for each dim"),
        ("show unet3d --field 64,64", "--field 64,64: this model takes fields of 3 dims"),
        ("show unet2d --domain 2,a", "--domain 2,a: a number above 0 for each dim, such as 2,2,2"),
        ("show unet2d --domain 2,2 --ranks 6", "domain: a field is on 4 ranks, and the data axis of"),
        ("show own_models:make_model",
         "models:make_model: say the shape of a global batch, samples first: --batch 8x1024"),
        ("show own_models:nothing --batch 8", "module 'own_models' has no 'nothing'"),
        ("show no_models:make_model --batch 8", "no module 'no_models' in "),
        ("show own_models:number --batch 8", "a layer is needed, or a layer and its loss; it gave int"),
        ("show no_models:make_model", "no module 'no_models' in "),
        ("show own_models:wide --batch 8",
         "models:wide: missing a required argument: 'features'; name a function that "),
        ("show own_models:plain --batch 8x31", "It got (8, 31) float32 from the model's input 'x'"),
        ("show own_models:plain --batch 8x31:int64", "It got (8, 31) int64 from the model's input 'x'"),
        ("show own_models:plain --batch 8x32:foo", "unknown dtype 'foo': choose one of float64, float32, "),
        ("show own_models:embedding --batch 8x32", "got (8, 32, 16)"),
        ("show gpt-tiny --batch 8x16",
         "--batch 8x16: samples of gpt-tiny have their own shape; give their number alone"),
        ("verify --strategy bogus", "unknown strategy 'bogus': choose one of ddp, zero1"),
        ("compile", "name a model, such as gpt-small, unet2d or mymodule:make_model, or say --all"),
        ("compile mlp --all", "name a model, such as gpt-small, unet2d or mymodule:make_model, or say --all"),
        ("compile gpt", "no example 'gpt': choose one of gpt-tiny, gpt-small"),
        ("compile mlp --precision int8", "unknown precision 'int8'"),
        ("bench comm", "fsdpx bench: one rank has no other to talk to: mpiexec -n 2 python -m fsdpx bench comm"),
        ("bench comm --verbs send,allreduce", "fsdpx bench: --verbs allreduce: there are send, all_gather, "),
        ("bench comm --sizes 4KiB,many", "fsdpx bench: --sizes='many': a number of bytes is needed"),
        ("bench comm --json no/found.json", "fsdpx bench: --json no/found.json cannot be written (ENOENT)"),
        ("bench step digits --strategies dpp", "dpp"),
        ("bench step digits --rounds 0", "--rounds 0: 1 or more"),
        ("bench step digits --batch 2 --json /none/a", "--json /none/a cannot be written (ENOENT)"),
        # no parser takes the beginning of an option for it
        ("run --nproc 3 x.py", "fsdpx run: unrecognized arguments: --nproc; did you mean '--nproc-per-node'"),
        ("run --node 3 x.py", "unrecognized arguments: --node; did you mean '--nodes' or '--node-rank'?"),
        ("run --max_restarts 3 x.py", "unrecognized arguments: --max_restarts; did you mean '--max-restarts'?"),
        ("run --hostfle=h x.py", "unrecognized arguments: --hostfle=h; did you mean '--hostfile'?"),
        ("show --strat ddp", "fsdpx show: unrecognized arguments: --strat; did you mean '--strategy'?"),
        ("ckpt convert a b --form x", "fsdpx ckpt convert: unrecognized arguments: --form x"),
        ("--versio", "fsdpx: unrecognized arguments: --versio; did you mean '--version'?"),
        # words of other launchers
        ("run --time 1:00 x.py", "--time; here that is an #SBATCH line in the file of --print-batch slurm, or an"),
        ("run --nnodes 2 x.py",
         "unrecognized arguments: --nnodes; here that is fsdpx run --nodes: the launcher decides; "),
        ("run -n two", "fsdpx run: argument -n/-np/--np/--ranks: invalid int value: 'two'; python -m fsdpx run --"),
        ("run --nodes", "fsdpx run: argument --nodes: expected one argument; python -m fsdpx run --help "),
        ("rum", "fsdpx: argument COMMAND: invalid choice: 'rum' (choose from "),
    ],
)  # fmt: skip
def test_mistakes_are_explained_in_one_line(own: None, monkeypatch: pytest.MonkeyPatch, line: str, text: str) -> None:
    monkeypatch.setattr(messages, "SILENCE_SECONDS", 1000)  # prints no progress on a busy machine
    fsdpx.finalize()
    said = refused(line)
    assert said.startswith(text if text.startswith("fsdpx") else f"fsdpx {line.split()[0]}")
    assert text in said
    assert said.count("\n") == 1


def test_without_a_command_the_commands_are_listed() -> None:
    said = refused("")
    assert all(f"\n  {command} " in said for command in ("info", "run", "show", "ckpt", "verify"))


def test_run_needs_a_script_that_may_have_no_arguments() -> None:
    assert refused("run -n 2") == "fsdpx run: which script? fsdpx run -n 4 train.py, or -m and a module\n"
    assert make_parser().parse_args(["run", "-n", "2", "a.py"]).args == []
    assert make_parser().parse_args(["run", "-n", "2", "a.py", "-n", "3"]).args == ["-n", "3"]


def test_a_launcher_loads_nothing_that_trains() -> None:
    """What it costs is paid at each start of a job, beside what the ranks load."""
    code = (
        "import sys\nfrom fsdpx.__main__ import make_parser\nmake_parser().parse_args(['run', '-n', '2', 'a.py'])\n"
        "print(*[name for name in sys.modules if name in ('numpy', 'mpi4py') or name.startswith('fsdpx.')])"
    )
    done = start(1, "-c", code)
    known = ["fsdpx.core", "fsdpx.core.base", "fsdpx.core.base.lazy_names", "fsdpx.core.base.version", "fsdpx.errors"]
    assert done.stdout.split() == [*known, "fsdpx.__main__"]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_closed_pipe_is_no_error(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `fsdpx show mlp | head -1`, with PYTHONUNBUFFERED and without."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as out:
        out.reconfigure(write_through=at_once)
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["show", "mlp"]) == 141
        print("what is printed at the end goes nowhere")


VERIFY = """
import fsdpx, fsdpx.core.comm.node.node as node
from fsdpx.__main__ import main

whole = node.NodeCommunicator.issue
def lossy(self, call):
    if call.verb == "reduce_scatter":
        call.arrays[0][:1] += 1e-6
    return whole(self, call)
node.NodeCommunicator.issue = lossy
found = [main(["verify", "--strategy", "fsdp", "--precision", "float64", "--steps", "2"])]
fsdpx.finalize()
found.append(main(["verify", "--strategy", "zero2", "--no-node", "--steps", "2"]))
fsdpx.finalize()
found.append(main(["verify", "--strategy", "bogus"]))
print("statuses", *found)
"""


def test_verify_under_mpiexec_names_the_first_tensor_that_differs(tmp_path: Path) -> None:
    """A communicator that loses a little of what it sums; with --no-node it is another one that sums. A mistake is one
    line on all ranks."""
    done = job(tmp_path, VERIFY, ranks=2)
    assert done.status == 0, done.out + done.err
    lines = re.sub(r"\n +", " ", done.out)
    assert re.search(r"DIFFERS  fsdp float64, 2 ranks: \S.* differs by \S+ relative, more than 1e-12", lines)
    assert re.findall(r"^(\w+  zero2 \w+), 2 ranks", lines, re.M) == ["OK  zero2 float64", "OK  zero2 float32"]
    assert lines.count("statuses 1 0 2\n") == 2
    said = [line for line in done.err.splitlines() if "bogus" in line or "Traceback" in line or "File " in line]
    assert len(said) == 1
    assert said[0].startswith("fsdpx verify: unknown strategy 'bogus': choose one of ddp")


def test_a_picture_is_asked_for_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpx.launch.show.dry_run", None)  # no work is begun
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refused(f"show mlp --png {tmp_path / 'step.png'}")
    assert f"step.png: matplotlib is not installed: {install_hint('plot')}" in said
