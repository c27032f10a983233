"""Codecs: how the gradients of one page are carried when they are reduced, one per file."""

from fsdpx.comm.codecs.cast import Cast
from fsdpx.comm.codecs.codec import Calls, Codec, Moves, Recut
from fsdpx.comm.codecs.int8 import Int8
from fsdpx.comm.codecs.named import codec
from fsdpx.comm.codecs.onebit import OneBit
from fsdpx.comm.codecs.plain import Plain
from fsdpx.comm.codecs.powersgd import PowerSGD
from fsdpx.comm.codecs.rules import Between, Choice, Codecs, Route
from fsdpx.comm.codecs.sign import Sign
from fsdpx.comm.codecs.sparse import RandomK, TopK

__all__ = [
    "Between",
    "Calls",
    "Cast",
    "Choice",
    "Codec",
    "Codecs",
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
