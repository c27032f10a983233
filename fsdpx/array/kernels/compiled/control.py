"""The control register of the vector unit (MXCSR), which says whether denormals count as 0."""

import platform
from typing import Any

from fsdpx.native.compiled import jit
from fsdpx.native.late import cgutils, intrinsic, ir, types

__all__ = ["flush", "restore"]

X86 = platform.machine().lower() in ("x86_64", "amd64")
FLUSH_TO_ZERO, DENORMALS_ARE_ZERO = 0x8000, 0x0040


@intrinsic
def _flush(typingctx: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not X86:
            return ir.IntType(32)(0)
        before, place = _control(builder, "st")
        builder.store(builder.or_(before, before.type(FLUSH_TO_ZERO | DENORMALS_ARE_ZERO)), place)
        _control(builder, "ld", place)
        return before

    return types.int32(), code


@intrinsic
def _restore(typingctx: Any, before: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if X86:
            _control(builder, "ld", cgutils.alloca_once_value(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int32), code


def _control(builder: Any, way: str, place: Any = None) -> tuple[Any, Any]:
    """Store or load the register; its value and where that lies."""
    place = cgutils.alloca_once(builder, ir.IntType(32)) if place is None else place
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{way}mxcsr")
    builder.call(function, [builder.bitcast(place, pointer)])
    return builder.load(place), place


@jit
def flush():
    """From now on denormals count as 0 in this thread; returns what `restore` needs."""
    return _flush()


@jit
def restore(before):
    _restore(before)
