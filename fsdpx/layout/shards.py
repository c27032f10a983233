"""A page as its ranks hold it: cut over the shard axis."""

from dataclasses import dataclass
from functools import cached_property

from fsdpx.layout.pages import Page
from fsdpx.layout.ranges import Piece, Range

__all__ = ["ShardedPage"]


@dataclass(frozen=True)
class ShardedPage:
    """A page cut over the shard axis. shards: of all its ranks. mine: the one of this rank."""

    page: Page
    shards: tuple[Range, ...]
    rank: int

    @property
    def mine(self) -> Range:
        return self.shards[self.rank]

    @cached_property
    def counts(self) -> list[int]:
        return [r.size for r in self.shards]

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """What each shard has of each parameter (piece.have), in page coordinates."""
        return [self.page.pieces(shard) for shard in self.shards]

    @property
    def size(self) -> int:
        return self.page.size
