"""Print a text on the terminal while it is generated."""

from collections.abc import Callable, Sequence

from fsdpx.errors import escape_control

__all__ = ["TerminalStream", "decode_bytes"]

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Replacement character (U+FFFD). A character may consist of several tokens. Until all of these tokens have been
generated, decoding returns U+FFFD in place of the character."""


class TerminalStream:
    """Callback for the argument `stream` of `Trainer.generate`. It prints the text for a single prompt while the text
    is generated, with control characters escaped. Call `finish_line` at the end.

    Parameters
    ----------
    decode : function that converts tokens to text
    write : function that is called with each new piece of text
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
        """Print the rest of the text, even if its last character is incomplete, and end the line."""
        self._write_new_text(self.decode(self.tokens))
        self.write("\n")

    def _write_new_text(self, text: str) -> None:
        if len(text) > self.shown:
            self.write(escape_control(text[self.shown :]))
            self.shown = len(text)


def decode_bytes(tokens: Sequence[int]) -> str:
    """Decode tokens that are the bytes of a UTF-8 text."""
    return bytes(tokens).decode(errors="replace")
