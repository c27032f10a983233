"""`generate`: continue a text with a pretrained model that is loaded from a folder."""

from __future__ import annotations

import argparse

from fsdpx import nn, optim
from fsdpx.core.base.safe_files import expanduser
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.trainer.distribute import distribute
from fsdpx.core.trainer.initialize import init
from fsdpx.models import from_pretrained
from fsdpx.models.generation.terminal import TerminalStream
from fsdpx.models.tokenizer_files import load_tokenizer, read_end_tokens

__all__ = ["add_options", "generate"]


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "folder", type=expanduser, help="config.json, safetensors and tokenizer.json, as transformers writes them"
    )
    p.add_argument("--prompt", required=True, type=_require_utf8_text, help="the text to continue")
    p.add_argument("--max-new-tokens", type=int, default=128, help="maximum length of the continuation (default: 128)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default): always take the most likely token")
    p.add_argument("--top-k", type=int, help="sample only from this many of the most likely tokens")
    p.add_argument("--top-p", type=float, help="sample from the most likely tokens that reach this probability")
    p.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1: tokens that are in the text become less likely"
    )
    p.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    p.add_argument(
        "--strategy", default="ddp", help="ddp: every rank holds the model; fsdp: a shard, gathered per token"
    )
    p.add_argument("--mesh", default=None, help="widths of axes, such as tensor=2 or pipe=2")
    p.add_argument("--precision", default="float32", help="float64, float32, bf16 or fp16")


def _require_utf8_text(text: str) -> str:
    """Return a command-line argument unchanged. Raise an argparse error if the argument was not valid UTF-8. Python
    decodes invalid bytes to lone surrogates, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise argparse.ArgumentTypeError(f"character {error.start + 1}, 0x{byte:02x}, is not UTF-8") from None
    return text


def generate(args: argparse.Namespace) -> int:
    """Print the prompt, followed by its continuation token by token. Return the exit status. Collective."""
    model, comm = from_pretrained(args.folder), init()
    tokenizer = load_tokenizer(args.folder)
    trainer = distribute(
        model, loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.0), comm=comm, strategy=args.strategy,
        mesh=None if args.mesh is None else Mesh.parse(args.mesh), precision=args.precision,
    )  # fmt: skip
    printed = TerminalStream(tokenizer.decode, lambda text: print(text, end="", flush=True) if comm.rank == 0 else None)
    printed.write(args.prompt)
    trainer.generate(
        tokenizer.encode(args.prompt).ids, args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
        top_p=args.top_p, repetition_penalty=args.repetition_penalty, seed=args.seed, stop=read_end_tokens(args.folder),
        stream=printed,
    )  # fmt: skip
    printed.finish_line()
    return 0
