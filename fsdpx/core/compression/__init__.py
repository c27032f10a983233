"""Codecs: how the gradients of one page are carried when they are reduced."""

from fsdpx.core.compression.bound_codec import BoundCodec
from fsdpx.core.compression.codec import Cast, Codec, Moves, Plain, Recut
from fsdpx.core.compression.routing import Between, Choice, Codecs, Route, codec, codec_names

__all__ = [
    "Between",
    "BoundCodec",
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
