"""The chat template of a folder: how it writes a conversation as one text, and which parts of that are answers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from fsdpx.core.base import environment
from fsdpx.core.base.safe_files import Untrusted, home, read
from fsdpx.errors import ConfigError, DataError, install_hint
from fsdpx.models.template import BEGIN, END
from fsdpx.models.tokenizer_files import LARGEST, object_of

__all__ = ["ChatTemplate", "chat_template"]

FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
SECONDS, MOST_BYTES, MOST_ROUNDS = 10.0, 1 << 30, 1_000_000
"""Of the processor, of memory, and rounds of loops and calls, that one conversation may take in a template."""
SAFE = (3, 1, 6)
"""Templates could leave the sandbox of versions before."""
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A template of Jinja2, which is run in its sandbox, and that in a process of its own with limits of time and
    memory: it may be from anywhere. The process starts with the first conversation.

    Parameters
    ----------
    source : its text
    where : the file that it is from
    names : special tokens by name, such as bos_token
    tokenizer : a `tokenizers.Tokenizer`
    """

    source: str
    where: str
    names: Mapping[str, str]
    tokenizer: Any

    def encoded(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and which of them are of what the assistant says: as the template marks it by
        `{% generation %}`, or else what each answer adds to the text before it."""
        text, spans = self._marked(messages, tools)
        found = self.tokenizer.encode(text, add_special_tokens=False)
        return found.ids, [any(a < end and begin < b for begin, end in spans) for a, b in found.offsets]

    def asked(self, prompt: str) -> list[int]:
        """The tokens of a question, up to where its answer begins."""
        text = self._text([{"role": "user", "content": prompt}], None, prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _marked(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        whole = self._text(messages, tools)
        if BEGIN in whole:
            parts = re.split(f"[{BEGIN}{END}]", whole)
            ends = [sum(map(len, parts[:n])) for n in range(len(parts) + 1)]
            return "".join(parts), list(zip(ends[1::2], ends[2::2], strict=False))
        spans = []
        for n in (n for n, message in enumerate(messages) if message.get("role") == "assistant"):
            before, after = self._text(messages[:n], tools, prompt=True), self._text(messages[: n + 1], tools)
            if not (whole.startswith(before) and whole.startswith(after)):
                raise DataError(
                    f"{self.where} writes message {n + 1} in another way where others follow, so that no part of the "
                    "text is its answer; mark answers in the template by {% generation %}, or give them a line each"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _text(self, messages: Sequence[Message], tools: Any, prompt: bool = False) -> str:
        plain = [{key: value for key, value in one.items() if value is not None} for one in messages]
        given = {"messages": plain, "tools": tools, "documents": None, "add_generation_prompt": prompt, **self.names}
        process = self._process()
        try:
            return process.ask({"given": given})
        except (TypeError, ValueError, RecursionError, TemplateFailed) as error:  # of JSON, of the template
            raise DataError(f"{self.where} does not take it: {error}") from error

    def _process(self) -> TemplateProcess:
        """That of this process, or a new one where a template has ended the last."""
        found = vars(self).get("_started")
        if found is None or not found.lives():
            found = vars(self)["_started"] = TemplateProcess(self._jinja2())
            try:
                found.ask({"source": self.source})
            except TemplateFailed as error:
                found.stop()
                raise ConfigError(f"{self.where}: this is no template of Jinja2: {error}") from error
        return found

    def _jinja2(self) -> Path:
        """The folder of the package."""
        try:
            import jinja2
        except ImportError as error:
            raise ConfigError(f"{self.where} needs the jinja2 library: {install_hint('text')}") from error
        if tuple(int(n) for n in re.findall(r"\d+", jinja2.__version__)[:3]) < SAFE:
            raise ConfigError(f"{self.where} needs jinja2 3.1.6 or later, here is {jinja2.__version__}")
        return Path(jinja2.__file__).parents[1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_started"}


class TemplateFailed(Exception):
    """A template cannot be compiled, does not take a conversation, or takes too long or too much memory."""


class TemplateProcess:
    """A process that runs one template, see `fsdpx/models/template.py`. folder: of the package jinja2."""

    def __init__(self, folder: Path) -> None:
        limits = map(str, (SECONDS, MOST_BYTES, MOST_ROUNDS))
        script, pipe = str(Path(__file__).with_name("template.py")), subprocess.PIPE
        self._child = subprocess.Popen(
            [sys.executable, "-I", script, *limits, str(folder)], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL,
            env=environment.alone(), text=True, encoding="ascii",
        )  # fmt: skip
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._end = weakref.finalize(self, _end, self._child, self._owner)

    def lives(self) -> bool:
        """Whether it can be asked: by the process that has started it, whose pipes it reads."""
        return os.getpid() == self._owner and self._child.poll() is None

    def ask(self, request: Mapping[str, Any]) -> str:
        """The text that it answers; TemplateFailed with the reason why there is none."""
        line, child = json.dumps(request) + "\n", self._child
        assert child.stdin is not None
        assert child.stdout is not None
        with self._lock:
            with suppress(BrokenPipeError):
                child.stdin.write(line)
                child.stdin.flush()
            answer = child.stdout.readline()
        if not answer.endswith("\n"):
            self.stop()
            raise TemplateFailed(_reason(child.returncode))
        found = json.loads(answer)
        if "error" in found:
            raise TemplateFailed(found["error"])
        return str(found["text"])

    def stop(self) -> None:
        """End it."""
        self._end()


def _reason(status: int) -> str:
    if -status == getattr(signal, "SIGPROF", 0):
        return f"it takes more than {SECONDS:g} s"
    return f"its process ended with status {status}"


def _end(child: subprocess.Popen[str], owner: int) -> None:
    """Not in a child that was forked, whose process it is not."""
    if os.getpid() == owner:
        with suppress(BrokenPipeError), child:  # which waits for its end
            if child.poll() is None and child.stdin is not None:
                child.kill()


def chat_template(folder: str | PathLike[str], tokenizer: Any) -> ChatTemplate | None:
    """The chat template of a folder as transformers finds it; None if it has none.

    Parameters
    ----------
    folder : of a model, with chat_template.jinja, or with a chat_template in tokenizer_config.json
    tokenizer : a `tokenizers.Tokenizer`, that of the folder
    """
    file, settings = home(folder) / FILE, home(folder) / SETTINGS
    found = object_of(settings) if settings.exists() else {}
    source, where = found.get("chat_template"), f"the chat template of {settings}"
    if isinstance(source, list):
        source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}.get("default")
    if file.exists():
        try:
            source, where = read(file, LARGEST, ours=False).decode(), f"the chat template {file}"
        except (Untrusted, ValueError) as error:
            raise ConfigError(f"{file}: {error}") from None
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"{settings}: chat_template must be a text, or a list of which one has the name default")
    tokens = {name: one.get("content") if isinstance(one, dict) else one for name, one in found.items()}
    names = {name: one for name, one in tokens.items() if name.endswith("_token") and isinstance(one, str)}
    return ChatTemplate(source, where, names, tokenizer)
