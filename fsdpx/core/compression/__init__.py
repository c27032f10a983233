"""Gradient codecs, which compress the gradients in a page (a flat buffer of several parameters) and reduce them over
ranks."""

from fsdpx.core.compression.bound_codec import BoundCodec
from fsdpx.core.compression.codec import Cast16, Codec, Transfers, NoCompression, ReshardRule
from fsdpx.core.compression.routing import (
    HierarchicalCompression,
    Choice,
    CodecRules,
    CodecRoute,
    make_gradient_codec,
    list_codec_names,
)

__all__ = [
    "BoundCodec", "Cast16", "Choice", "Codec", "CodecRoute", "CodecRules", "HierarchicalCompression", "NoCompression",
    "ReshardRule", "Transfers", "list_codec_names", "make_gradient_codec",
]  # fmt: skip
