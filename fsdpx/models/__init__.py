"""Models that people have, from the folders in which they have them; see docs/models.md."""

from fsdpx.models.reading import from_pretrained

__all__ = ["from_pretrained"]
