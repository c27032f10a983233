"""Choice of 16-bit arithmetic on this processor: whether to use it, and with which library."""

from __future__ import annotations

from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base.config import PRECISIONS, Precision
from fsdpx.errors import install_hint, warn
from fsdpx.ext.half import matmul
from fsdpx.nn.layer_list import LayerList

__all__ = ["choose_float16_precision", "find_matmul_library_and_warn"]


def choose_float16_precision() -> Precision:
    """Return the dtypes of precision="fp16". Layers compute in float16 only if the processor has float16 instructions.
    """
    if matmul.get_selected_library("float16") == matmul.WIDENED:
        return PRECISIONS["float16"]
    return Precision("float16", loss_scale="dynamic")


def find_matmul_library_and_warn(formats: Precision, model: LayerList, is_warning_rank: bool) -> dict[str, str]:
    """Find the library that multiplies matrices in the compute dtype of `formats`. Return a dict with one item, which
    maps a description to the library's name. Results depend on the library, so the caller raises an error if ranks use
    different libraries. The error message contains the description.

    If the library converts 16-bit numbers to float32, 16-bit training is slower than float32 training, so warn on one
    rank. Do not warn if other libraries compute all layers of the model."""
    name = parse_dtype(formats.compute).name
    library, able = matmul.get_selected_library(name), matmul.list_half_instructions(name)
    is_computed_elsewhere = all(node.layer.kernel_names is None for node in model.nodes)
    if library == matmul.WIDENED and is_warning_rank and not is_computed_elsewhere:
        why = f"oneDNN is not installed ({install_hint('onednn')})" if able else NO_INSTRUCTIONS_TEXT
        warn(f"fsdpx: {formats.compute} is computed as float32, slower than float32: {why}", UserWarning)
    return {"library of 16-bit products": library}


NO_INSTRUCTIONS_TEXT = "this processor has no instructions for it"
