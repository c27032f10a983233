"""Codecs: how the gradients of one page are carried when they are reduced."""

from fsdpx.core.compression.codec import Cast, Codec, Moves, Plain, Recut
from fsdpx.core.compression.compressed import Compressed
from fsdpx.ext.compression.int8 import Int8
from fsdpx.ext.compression.powersgd import PowerSGD
from fsdpx.core.compression.routing import Between, Choice, Codecs, Route, codec
from fsdpx.ext.compression.topk import TopK

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
