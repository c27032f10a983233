"""Codecs: how the gradients of one page are carried when they are reduced."""

from fsdpx.codecs.codec import Cast, Codec, Moves, Plain, Recut
from fsdpx.codecs.compressed import Compressed
from fsdpx.codecs.int8 import Int8
from fsdpx.codecs.powersgd import PowerSGD
from fsdpx.codecs.rules import Between, Choice, Codecs, Route, codec
from fsdpx.codecs.sparse import TopK

__all__ = [
    "Between",
    "Cast",
    "Choice",
    "Codec",
    "Codecs",
    "Compressed",
    "Int8",
    "Moves",
    "Plain",
    "PowerSGD",
    "Recut",
    "Route",
    "TopK",
    "codec",
]
