"""Codecs: how the gradients of one page are carried when they are reduced, one per file."""

from fsdpx.codecs.cast import Cast
from fsdpx.codecs.codec import Calls, Codec, Moves, Recut
from fsdpx.codecs.compressed import Compressed
from fsdpx.codecs.int8 import Int8
from fsdpx.codecs.named import codec
from fsdpx.codecs.onebit import OneBit
from fsdpx.codecs.plain import Plain
from fsdpx.codecs.powersgd import PowerSGD
from fsdpx.codecs.rules import Between, Choice, Codecs, Route
from fsdpx.codecs.sign import Sign
from fsdpx.codecs.sparse import RandomK, TopK

__all__ = [
    "Between",
    "Calls",
    "Cast",
    "Choice",
    "Codec",
    "Codecs",
    "Compressed",
    "Int8",
    "Moves",
    "OneBit",
    "Plain",
    "PowerSGD",
    "RandomK",
    "Recut",
    "Route",
    "Sign",
    "TopK",
    "codec",
]
