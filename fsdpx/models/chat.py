"""The chat template of a folder: how it writes a conversation as one text, and which parts of that are answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from fsdpx.errors import ConfigError, DataError, install_hint
from fsdpx.files import Untrusted, read
from fsdpx.models.beside import LARGEST, object_of

__all__ = ["ChatTemplate", "chat_template"]

FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
BEGIN, END = "\ufdd0", "\ufdd1"
"""Around what the template itself marks as an answer; no text has these characters."""
MOST_ROUNDS = 1_000_000
"""Rounds of loops, and calls, that one conversation may take in a template."""
SAFE = (3, 1, 6)
"""Templates could leave the sandbox of versions before."""
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A template of Jinja2, which is run in its sandbox, as it may be from anywhere.

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
        template = self._template
        template.environment.left = MOST_ROUNDS
        try:
            return str(template.render(given))
        except Exception as error:  # a template calls and raises what it likes
            raise DataError(f"{self.where} does not take it: {error}") from error

    @cached_property
    def _template(self) -> Any:
        try:
            import jinja2
        except ImportError as error:
            raise ConfigError(f"{self.where} needs the jinja2 library: {install_hint('text')}") from error
        if tuple(int(n) for n in re.findall(r"\d+", jinja2.__version__)[:3]) < SAFE:
            raise ConfigError(f"{self.where} needs jinja2 3.1.6 or later, here is {jinja2.__version__}")
        try:
            made = _environment()
            return made.from_string(made.counting(self.source))
        except Exception as error:  # Python's own of what Jinja2 makes of it, too
            raise ConfigError(f"{self.where}: this is no template of Jinja2: {error}") from error


def chat_template(folder: str | PathLike[str], tokenizer: Any) -> ChatTemplate | None:
    """The chat template of a folder as transformers finds it; None if it has none.

    Parameters
    ----------
    folder : of a model, with chat_template.jinja, or with a chat_template in tokenizer_config.json
    tokenizer : a `tokenizers.Tokenizer`, that of the folder
    """
    file, settings = Path(folder, FILE), Path(folder, SETTINGS)
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


def _environment() -> Any:
    """Jinja2 as transformers sets it up for templates."""
    from jinja2 import TemplateError, nodes, pass_environment
    from jinja2.ext import Extension, loopcontrols

    class AnswerTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("answer"), [], [], body).set_lineno(line)

        def answer(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    @pass_environment
    def counted(env: Any, values: Any) -> Iterator[Any]:
        for value in values:
            env.spend()
            yield value

    def refused(message: str) -> None:
        raise TemplateError(message)

    made = _sandbox()(trim_blocks=True, lstrip_blocks=True, extensions=[AnswerTag, loopcontrols])
    made.filters |= {"tojson": _as_json, "counted": counted}
    del made.globals["lipsum"]  # it writes as much as it is asked for
    made.globals |= {"raise_exception": refused, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


def _sandbox() -> Any:
    """The environment of templates, which counts their rounds of loops and their calls."""
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        left = MOST_ROUNDS

        def spend(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise TemplateError(f"it takes more than {MOST_ROUNDS:,} rounds of loops and calls")

        def call(self, *args: Any, **named: Any) -> Any:
            self.spend()
            return super().call(*args, **named)

        def counting(self, source: str) -> nodes.Template:
            tree = self.parse(source)
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
            return tree

    return Sandbox


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter tojson with the options that it has in transformers, of which none is called."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
