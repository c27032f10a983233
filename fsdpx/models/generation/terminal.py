"""A text on the terminal while it is written."""

from collections.abc import Callable, Sequence

from fsdpx.errors import escape_control

__all__ = ["TerminalStream", "decode_bytes"]

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a character of several tokens decodes to as long as some of them are missing."""


class TerminalStream:
    """Give it as `stream` where there is one prompt; then call `finish_line`. What a terminal would obey is shown in
    its place.

    Parameters
    ----------
    decode : tokens -> text
    write : is given each new piece of text
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Callable[[str], object]) -> None:
        self.decode, self.write = decode, write
        self.tokens: list[int] = []
        self.shown = 0

    def __call__(self, row: int, token: int) -> None:
        self.tokens.append(token)
        if not (text := self.decode(self.tokens)).endswith(UNFINISHED):
            self._write_new_text(text)

    def finish_line(self) -> None:
        """Write what was held back, and end the line."""
        self._write_new_text(self.decode(self.tokens))
        self.write("\n")

    def _write_new_text(self, text: str) -> None:
        if len(text) > self.shown:
            self.write(escape_control(text[self.shown :]))
            self.shown = len(text)


def decode_bytes(tokens: Sequence[int]) -> str:
    """The text of a model whose tokens are bytes of UTF-8."""
    return bytes(tokens).decode(errors="replace")
