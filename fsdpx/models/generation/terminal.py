"""Display of a text on the terminal while it is generated."""

from collections.abc import Callable, Sequence

from fsdpx.errors import escape_control

__all__ = ["TerminalStream", "decode_bytes"]

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of a character of several tokens while some of them are missing."""


class TerminalStream:
    """A `stream` that displays a text while it is generated, for a single prompt; call `finish_line` at the end.
    Control characters are escaped.

    Parameters
    ----------
    decode : tokens -> text
    write : called with each new piece of text
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
        """Write the text held back so far, and end the line."""
        self._write_new_text(self.decode(self.tokens))
        self.write("\n")

    def _write_new_text(self, text: str) -> None:
        if len(text) > self.shown:
            self.write(escape_control(text[self.shown :]))
            self.shown = len(text)


def decode_bytes(tokens: Sequence[int]) -> str:
    """Return the text of tokens that are bytes of UTF-8."""
    return bytes(tokens).decode(errors="replace")
