"""Chat templates: render a conversation as text, and find the assistant's answers in the text."""

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
from os import PathLike
from pathlib import Path
from typing import Any

from fsdpx.core.base import environment
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.safe_files import Untrusted, expanduser, read_file
from fsdpx.errors import ConfigError, DataError, install_hint
from fsdpx.models.template import BEGIN, END
from fsdpx.models.tokenizer_files import MAX_JSON_BYTES, read_json_object

__all__ = ["ChatTemplate", "chat_template"]

FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
SECONDS, MOST_BYTES, MOST_ROUNDS = 10.0, 1 << 30, 1_000_000
"""Limits for rendering one conversation: CPU seconds, bytes of memory, and number of loop iterations and calls."""
MIN_JINJA_VERSION = (3, 1, 6)
"""Minimum version of Jinja2. In earlier versions, templates could escape from the sandbox."""
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a model: renders conversations with Jinja2 and tokenizes the text.

    Templates are untrusted, so they run in Jinja2's sandbox, in a separate process with limited time and memory. The
    process is started when the first conversation is rendered.

    Parameters
    ----------
    source : text of the template
    where : description of the file from which the template was read, for error messages
    names : special tokens by name, such as bos_token
    tokenizer : a `tokenizers.Tokenizer`
    """

    source: str
    where: str
    names: Mapping[str, str]
    tokenizer: Any

    def encode_conversation(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and whether each token belongs to an answer of the assistant. The model
        is trained only on answers.

        Answers are the parts that the template marks with `{% generation %}`. If the template marks no parts, each
        answer is the text that an assistant message adds to the rendered conversation."""
        text, spans = self._render_with_answer_spans(messages, tools)
        found = self.tokenizer.encode(text, add_special_tokens=False)
        return found.ids, [any(a < end and begin < b for begin, end in spans) for a, b in found.offsets]

    def encode_question(self, prompt: str) -> list[int]:
        """Return the tokens of a conversation that consists of a single user question, up to the start of the
        assistant's answer."""
        text = self._render_messages([{"role": "user", "content": prompt}], None, prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _render_with_answer_spans(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        whole = self._render_messages(messages, tools)
        if BEGIN in whole:
            parts = re.split(f"[{BEGIN}{END}]", whole)
            ends = [sum(map(len, parts[:n])) for n in range(len(parts) + 1)]
            return "".join(parts), list(zip(ends[1::2], ends[2::2], strict=False))
        spans = []
        for n in (n for n, message in enumerate(messages) if message.get("role") == "assistant"):
            before = self._render_messages(messages[:n], tools, prompt=True)
            after = self._render_messages(messages[: n + 1], tools)
            if not (whole.startswith(before) and whole.startswith(after)):
                raise DataError(
                    f"{self.where} writes message {n + 1} in another way where others follow, so that no part of the "
                    "text is its answer; mark answers in the template by {% generation %}, or give them a line each"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _render_messages(self, messages: Sequence[Message], tools: Any, prompt: bool = False) -> str:
        plain = [{key: value for key, value in one.items() if value is not None} for one in messages]
        given = {"messages": plain, "tools": tools, "documents": None, "add_generation_prompt": prompt, **self.names}
        process = self._get_or_start_process()
        try:
            return process.request_text({"given": given})
        except (TypeError, ValueError, RecursionError, TemplateError) as error:  # raised by json.dumps or the template
            raise DataError(f"{self.where} does not take it: {error}") from error

    def _get_or_start_process(self) -> TemplateProcess:
        """Return the process that renders the template. Start a new one if there is none, or if it has ended."""
        found = vars(self).get("_started")
        if found is None or not found.is_alive():
            found = vars(self)["_started"] = TemplateProcess(self._find_jinja2_package_folder())
            try:
                found.request_text({"source": self.source})
            except TemplateError as error:
                found.stop()
                raise ConfigError(f"{self.where}: this is no template of Jinja2: {error}") from error
        return found

    def _find_jinja2_package_folder(self) -> Path:
        """Return the folder that contains the package jinja2. Raise ConfigError if jinja2 is missing or too old."""
        try:
            import jinja2
        except ImportError as error:
            raise ConfigError(f"{self.where} needs the jinja2 library: {install_hint('text')}") from error
        if tuple(int(n) for n in re.findall(r"\d+", jinja2.__version__)[:3]) < MIN_JINJA_VERSION:
            raise ConfigError(f"{self.where} needs jinja2 3.1.6 or later, here is {jinja2.__version__}")
        return Path(jinja2.__file__).parents[1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_started"}


class TemplateError(Exception):
    """Raised if a template cannot be compiled, rejects a conversation, or exceeds its time or memory limit."""


class TemplateProcess:
    """A child process that renders one template in a sandbox; it runs `fsdpx/models/template.py`. `folder` is the
    folder that contains the package jinja2."""

    def __init__(self, folder: Path) -> None:
        limits = map(str, (SECONDS, MOST_BYTES, MOST_ROUNDS))
        script, pipe = str(Path(__file__).with_name("template.py")), subprocess.PIPE
        self._child = subprocess.Popen(
            [sys.executable, "-I", script, *limits, str(folder)], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL,
            env=environment.copy_without_rank_variables(), text=True, encoding="ascii",
        )  # fmt: skip
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._end = weakref.finalize(self, _kill_child_and_wait, self._child, self._owner)

    def is_alive(self) -> bool:
        """Return whether the child process is running and was started by this process. In a forked copy of this
        process, the result is False, because the child's pipes belong to the original process."""
        return os.getpid() == self._owner and self._child.poll() is None

    def request_text(self, request: Mapping[str, Any]) -> str:
        """Send a request to the child process, and return the text of its answer. Raise TemplateError if the answer is
        an error, or if the child process ends."""
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
            raise TemplateError(_explain_exit_status(child.returncode))
        found = json.loads(answer)
        if "error" in found:
            raise TemplateError(found["error"])
        return str(found["text"])

    def stop(self) -> None:
        """Kill the child process, and wait until it has ended."""
        self._end()


def _explain_exit_status(status: int) -> str:
    if -status == getattr(signal, "SIGPROF", 0):
        return f"it takes more than {SECONDS:g} s"
    return f"its process ended with status {status}"


def _kill_child_and_wait(child: subprocess.Popen[str], owner: int) -> None:
    """Kill the child process and wait until it has ended. `owner` is the id of the process that started the child; in a
    forked copy of that process, do nothing."""
    if os.getpid() == owner:
        with suppress(BrokenPipeError), child:  # leaving `with child` waits until the process has ended
            if child.poll() is None and child.stdin is not None:
                child.kill()


def chat_template(folder: str | PathLike[str], tokenizer: Any) -> ChatTemplate | None:
    """Return the chat template in a model's folder, or None if there is none. It is looked up in the same files as in
    transformers.

    Parameters
    ----------
    folder : folder of a model, with chat_template.jinja, or with a chat_template in tokenizer_config.json
    tokenizer : the `tokenizers.Tokenizer` of the folder
    """
    file, settings = expanduser(folder) / FILE, expanduser(folder) / SETTINGS
    found = read_json_object(settings) if settings.exists() else {}
    source, where = found.get("chat_template"), f"the chat template of {settings}"
    if isinstance(source, list):
        source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}.get("default")
    if file.exists():
        try:
            source, where = read_file(file, MAX_JSON_BYTES, ours=False).decode(), f"the chat template {file}"
        except (Untrusted, ValueError) as error:
            raise ConfigError(f"{file}: {error}") from None
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"{settings}: chat_template must be a text, or a list of which one has the name default")
    tokens = {name: one.get("content") if isinstance(one, dict) else one for name, one in found.items()}
    names = {name: one for name, one in tokens.items() if name.endswith("_token") and isinstance(one, str)}
    return ChatTemplate(source, where, names, tokenizer)
