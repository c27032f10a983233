"""LoRA fine-tuning of a language model from a transformers folder, or of a small model that this script trains.

    mpiexec -n 4 python -m fsdpx.examples.finetune FOLDER DATA.jsonl --out tuned
    mpiexec -n 4 python -m fsdpx.examples.finetune

FOLDER contains config.json, safetensors files and tokenizer.json; DATA.jsonl contains conversations, one JSON object
per line. Without these arguments, the script trains a tokenizer and a small Llama on the source code of Python's
standard library, and then fine-tunes the model to answer differently. The script needs the tokenizers library (pip
install '.[text]' in the folder of fsdpx's sources)."""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import fsdpx
from fsdpx import data, models, nn, optim
from fsdpx.core.base.config import resolve_precision as precision_of
from fsdpx.errors import ConfigError, install_hint
from fsdpx.examples._cli import run_main
from fsdpx.models.tokenizer_files import load_tokenizer, read_end_tokens

VOCAB, SEQ_LEN = 512, 64
END = "<|end|>"


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m fsdpx.examples.finetune", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("folder", nargs="?", help="of a model, as transformers writes it (default: a small one, made here)")
    p.add_argument("data", nargs="?", help="JSON lines: prompt and completion, or messages (default: made here)")
    p.add_argument(
        "--targets",
        nargs="+",
        default=["attn.q", "attn.v"],
        help="layers that get adapters, named as here or as in FOLDER",
    )
    p.add_argument("--rank", type=int, default=8, help="of the adapters")
    p.add_argument("--alpha", type=float, default=16.0, help="adapters are scaled by alpha / rank")
    p.add_argument("--steps", type=int, default=200, help="of fine-tuning")
    p.add_argument("--first-steps", type=int, default=300, help="that the small model is trained before")
    p.add_argument("--batch", type=int, default=16, help="conversations of the global batch")
    p.add_argument("--seq-len", type=int, default=SEQ_LEN, help="tokens of a conversation")
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--strategy", default="fsdp")
    p.add_argument("--precision", default="float32")
    p.add_argument("--ask", action="append", help="a prompt that is answered before and after (may be repeated)")
    p.add_argument("--out", help="folder for the adapters, in PEFT's format")
    return p


def train_tokenizer(comm: Any) -> Any:
    """Train a byte-pair tokenizer on some of Python's source files on rank 0, and return it on all ranks.
    Collective."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ConfigError(f"this example needs the tokenizers library: {install_hint('text')}") from error
    text = None
    if comm.rank == 0:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        files = sorted(data.python_stdlib_folder().glob("*.py"))[:40]
        made.train(
            [str(file) for file in files],
            trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False),
        )
        text = made.to_str()
    return Tokenizer.from_str(comm.all_gather_value(text)[0])


def write_conversations(path: Path, count: int = 400) -> None:
    """Write a JSON Lines file of questions and answers. The answers have a format that does not occur in Python source
    code, so the model must learn this format."""
    random = np.random.default_rng(0)
    names = ["size", "name", "path", "value", "index", "lines", "width", "count"]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            first, second = random.choice(names, 2)
            line = {"prompt": f"def {first}({second}):", "completion": f" -> {second} gives {first}."}
            file.write(json.dumps(line) + "\n")


def load_or_train_model(
    args: argparse.Namespace, tokenizer: Any, comm: Any
) -> tuple[Any, dict[str, np.ndarray] | None]:
    """Load the model in the given folder, and return (model, None). Without a folder, train a small model, and return
    (model, dict of its parameters). Collective."""
    if args.folder is not None:
        return models.from_pretrained(args.folder), None
    model = nn.Llama(VOCAB, d_model=64, n_layers=2, n_heads=4, seq_len=args.seq_len, kv_heads=2)
    files = sorted(data.python_stdlib_folder().glob("*.py"))[:10]
    tokens = np.concatenate([tokenizer.encode(file.read_text("utf-8", errors="replace")).ids for file in files])
    rows = tokens[: len(tokens) // (args.seq_len + 1) * (args.seq_len + 1)].reshape(-1, args.seq_len + 1)
    texts = data.ArrayDataset(rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32))
    with model.as_distributed(
        loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=3e-3), strategy=args.strategy, comm=comm
    ) as trainer:
        train_and_print_loss(trainer, texts, args.first_steps, args.batch, "the small model")
        return model, trainer.parameters()


def train_and_print_loss(trainer: fsdpx.Trainer, samples: Any, steps: int, batch: int, label: str) -> None:
    """Train for `steps` steps, and print the first and last loss on rank 0. Collective."""
    with data.DataLoader(samples, batch, comm=trainer.data_group, shuffle=True, drop_last=True) as loader:
        losses: list[float] = []
        while len(losses) < steps:
            begun = len(losses)
            losses += [trainer.step(x, y) for x, y in islice(loader, steps - begun)]
            loader.set_epoch(loader.epoch + 1)
    if trainer.call_runner.rank == 0:
        print(f"{label}: {steps} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)


def warn_if_data_and_chat_template_disagree(samples: data.SupervisedDataset, template: Any, folder: str) -> None:
    """Print a warning if the training data have messages but the model has no chat template, or vice versa."""
    if samples.messages and template is None:
        print(
            f"{folder}: there is no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
            "messages are written as 'role: content'",
            flush=True,
        )
    elif samples.texts and template is not None:
        print(f"prompts and completions are joined as they are, without {template.where}: give messages", flush=True)


def generate_and_print_answers(
    trainer: fsdpx.Trainer, tokenizer: Any, prompts: dict[str, list[int]], stop_tokens: list[int], label: str
) -> None:
    """Generate answers to the prompts, and print them on rank 0. Collective."""
    found = trainer.generate(list(prompts.values()), 24, stop=stop_tokens)
    if trainer.call_runner.rank == 0:
        for text, tokens in zip(prompts, found, strict=True):
            print(f"{label}: {text!r} {tokenizer.decode(tokens.tolist())!r}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune the model, print its answers before and after, and save the LoRA adapters. Return the exit status."""
    args = make_parser().parse_args(argv)
    if (args.folder is None) != (args.data is None):
        raise ConfigError("give a folder and data, or neither of them")
    comm = fsdpx.init()
    tokenizer = train_tokenizer(comm) if args.folder is None else load_tokenizer(args.folder)
    ends = [tokenizer.token_to_id(END)] if args.folder is None else read_end_tokens(args.folder)
    if not ends:
        raise ConfigError(
            f"{args.folder}: neither generation_config.json nor config.json has an eos_token_id, with which answers "
            "end: add one to config.json"
        )
    template = None if args.folder is None else models.chat_template(args.folder, tokenizer)
    model, weights = load_or_train_model(args, tokenizer, comm)
    adapted = nn.add_lora(model, args.rank, args.alpha, targets=args.targets)
    trainer = adapted.as_distributed(
        loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=args.lr, weight_decay=0.0), strategy=args.strategy,
        precision=precision_of(args.precision), comm=comm,
    )  # fmt: skip
    if weights is not None:
        trainer.load_parameters(weights, strict=False)
    with TemporaryDirectory() as folder:
        file = Path(args.data or Path(folder, "data.jsonl"))
        if args.data is None:
            write_conversations(file)
        samples = data.SupervisedDataset(
            file, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, args.seq_len, end=ends[0],
            template=template,
        )  # fmt: skip
    if comm.rank == 0:
        warn_if_data_and_chat_template_disagree(samples, template, args.folder)
        trained = sum(spec.size for spec in adapted.specs().values() if spec.trainable)
        count = trainer.inspect.placement.layout.size
        print(f"{count:,} parameters, {trained:,} of them trained; {samples}", flush=True)
    written = template.encode_question if template and samples.messages else lambda text: tokenizer.encode(text).ids
    asked = {text: written(text) for text in args.ask or (["def size(path):"] if args.data is None else [])}
    if asked:
        generate_and_print_answers(trainer, tokenizer, asked, ends, "before")
    train_and_print_loss(trainer, samples, args.steps, args.batch, "adapters")
    if asked:
        generate_and_print_answers(trainer, tokenizer, asked, ends, "after")
    if args.out:
        fsdpx.save_adapter(trainer, args.out, args.folder or "")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
