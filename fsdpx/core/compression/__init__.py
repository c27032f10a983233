"""Codecs: how the gradients of one page are carried when they are reduced."""

from fsdpx.core.compression.carrier import Carrier
from fsdpx.core.compression.codec import Cast, Codec, Moves, Plain, Recut
from fsdpx.core.compression.routing import Between, Choice, Codecs, Route, codec, codec_names

__all__ = [
    "Between",
    "Carrier",
    "Cast",
    "Choice",
    "Codec",
    "Codecs",
    "Moves",
    "Plain",
    "Recut",
    "Route",
    "codec",
    "codec_names",
]
