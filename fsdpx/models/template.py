"""Script that `fsdpx/models/chat.py` runs in a child process: renders conversations with one untrusted Jinja2
template.

A template is an untrusted program, so it runs with limited resources in a separate Python process, without fsdpx:
python -I template.py SECONDS BYTES ROUNDS FOLDER, where FOLDER contains the package jinja2. The script reads one JSON
request per line, and answers each with one line; the first request contains the template's source. The operating system
kills the process if an answer takes more than SECONDS of CPU time, even within a single call of C code. It also limits
the memory of the process to BYTES. While the template renders one text, it may make at most ROUNDS loop iterations and
calls."""

import json
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

BEGIN, END = "\ufdd0", "\ufdd1"
"""Delimiters that enclose the parts of the rendered text that the template marks as answers. They are Unicode
noncharacters, which do not occur in ordinary text."""


def main(seconds: float, nbytes: int, rounds: int, folder: str) -> None:
    """Answer rendering requests from stdin until it is closed."""
    sys.path.append(folder)
    made: list[Any] = []

    def compile_source(request: dict[str, Any]) -> str:
        environment = _make_jinja_environment(rounds)
        made[:] = [environment.from_string(environment.counting(request["source"]))]
        return ""

    def render(request: dict[str, Any]) -> str:
        made[0].environment.left = rounds
        return str(made[0].render(request["given"]))

    _import_jinja2()  # import before the limits are set, because importing takes memory and time
    start_clock = _limit_memory_and_make_timer(seconds, nbytes)
    for line in sys.stdin:
        request = json.loads(line)
        start_clock(True)
        answer = _answer_request(compile_source if "source" in request else render, request, nbytes)
        start_clock(False)
        print(json.dumps(answer), flush=True)


def _import_jinja2() -> None:
    from jinja2 import ext, sandbox  # noqa: F401


def _answer_request(do: Callable[[dict[str, Any]], str], request: dict[str, Any], nbytes: int) -> dict[str, str]:
    try:
        return {"text": do(request)}
    except MemoryError:
        return {"error": f"it takes more than {nbytes >> 20:,} MiB"}
    except Exception as error:  # an untrusted template can raise any exception
        return {"error": str(error) or type(error).__name__}


def _limit_memory_and_make_timer(seconds: float, nbytes: int) -> Callable[[bool], None]:
    """Limit the memory of this process, and return a function that starts a CPU timer if its argument is True, and
    stops the timer if it is False. The timer kills the process when it expires. On Windows, nothing is limited."""
    try:
        from resource import RLIMIT_AS, RLIMIT_CORE, setrlimit
        from signal import ITIMER_PROF, setitimer
    except ImportError:
        return lambda starts: None
    setrlimit(RLIMIT_AS, (nbytes, nbytes))
    setrlimit(RLIMIT_CORE, (0, 0))
    return lambda starts: setitimer(ITIMER_PROF, seconds if starts else 0) and None


def _make_jinja_environment(rounds: int) -> Any:
    """Return a sandboxed Jinja2 environment with the settings and filters that transformers gives to chat templates."""
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
    def count_round(env: Any, values: Any) -> Iterator[Any]:
        for value in values:
            env.spend()
            yield value

    def raise_refused(message: str) -> None:
        raise TemplateError(message)

    made = _make_sandbox_class(rounds)(trim_blocks=True, lstrip_blocks=True, extensions=[AnswerTag, loopcontrols])
    made.filters |= {"tojson": _as_json, "counted": count_round}
    del made.globals["lipsum"]  # lipsum() can generate a text of any length in a single call
    made.globals |= {"raise_exception": raise_refused, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


def _make_sandbox_class(rounds: int) -> Any:
    """Return a subclass of Jinja2's sandboxed environment that stops a template after `rounds` loop iterations and
    calls."""
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        left = rounds

        def spend(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise TemplateError(f"it takes more than {rounds:,} rounds of loops and calls")

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
    """Implement the Jinja2 filter `tojson`, with the same options as in transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
