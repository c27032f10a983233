"""Objects of a compiler (ELF for x86-64, the large code model) as one piece of machine code that can lie anywhere."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Code", "link"]

ALLOCATED, PROGRAM, SYMBOLS, RELOCATIONS = 0x2, 1, 2, 4
"""A flag of sections, and types of them, see <elf.h>."""
ADDRESS, RELATIVE, DISTANCE, CALL = 1, 2, 24, 4  # R_X86_64_64, _PC32, _PC64, _PLT32
FUNCTION, COMMON = 2, 0xFFF2


class Code(NamedTuple):
    """start: where it is entered. inside: places that get the address of the code added. outside: places that get the
    address of what has this name added."""

    data: bytes
    start: int
    inside: tuple[int, ...]
    outside: tuple[tuple[int, str], ...]


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    at: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class _Symbol(NamedTuple):
    """at: from the start of the code; None: it is not in any object."""

    name: str
    kind: int
    at: int | None
    size: int


class _Relocation(NamedTuple):
    """Where an address goes."""

    at: int
    kind: int
    symbol: _Symbol
    added: int


def link(objects: Sequence[bytes], start: str) -> Code | None:
    """Bind all that `start` reaches; None where that is not possible."""
    data = bytearray()
    symbols: dict[str, _Symbol] = {}
    places: list[_Relocation] = []
    for one in objects:
        _lay(one, data, symbols, places)
    functions = [s for s in symbols.values() if s.kind == FUNCTION and s.at is not None]

    def function(at: int) -> str:
        return next((s.name for s in functions if s.at is not None and s.at <= at < s.at + s.size), "")

    within: dict[str, list[_Relocation]] = {}
    for place in places:
        within.setdefault(function(place.at), []).append(place)
    reached, waiting = set(), ["", start]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [
                p.symbol.name if p.symbol.at is None else function(p.symbol.at + p.added) for p in within.get(name, ())
            ]
    inside, outside = [], []
    for place in (place for name in reached for place in within.get(name, ())):
        symbol = place.symbol if place.symbol.at is not None else symbols.get(place.symbol.name, place.symbol)
        if place.kind == ADDRESS and symbol.at is not None:
            struct.pack_into("<q", data, place.at, symbol.at + place.added)
            inside.append(place.at)
        elif place.kind == ADDRESS:
            struct.pack_into("<q", data, place.at, place.added)
            outside.append((place.at, symbol.name))
        elif symbol.at is not None and place.kind in (RELATIVE, CALL, DISTANCE):
            form = "<q" if place.kind == DISTANCE else "<i"
            struct.pack_into(form, data, place.at, symbol.at + place.added - place.at)
        else:
            return None
    at = symbols[start].at
    assert at is not None
    return Code(bytes(data), at, tuple(sorted(inside)), tuple(sorted(outside)))


def _lay(one: bytes, data: bytearray, symbols: dict[str, _Symbol], places: list[_Relocation]) -> None:
    """Add what an object has; of two functions of one name the first counts."""
    offset, (size, count) = struct.unpack_from("<Q", one, 40)[0], struct.unpack_from("<HH", one, 58)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", one, offset + n * size)) for n in range(count)]
    begins: dict[int, int] = {}
    for n, section in enumerate(sections):
        if section.kind == PROGRAM and section.flags & ALLOCATED:
            data.extend(bytes(-len(data) % max(section.align, 1)))
            begins[n] = len(data)
            data.extend(one[section.at : section.at + section.size])
    table = next(section for section in sections if section.kind == SYMBOLS)
    names, own = sections[table.link].at, []
    for at in range(table.at, table.at + table.size, 24):
        where, info, _, home, value, length = struct.unpack_from("<IBBHQQ", one, at)
        name = one[names + where : one.index(b"\0", names + where)].decode()
        if home == COMMON:
            data.extend(bytes(-len(data) % 16))
            begin: int | None = len(data)
            data.extend(bytes(length))
        else:
            begin = begins[home] + value if home in begins else None
        own.append(_Symbol(name, info & 15, begin, length))
    for symbol in own:
        if symbol.at is not None and symbol.name:
            symbols.setdefault(symbol.name, symbol)
    for section in sections:
        if section.kind == RELOCATIONS and section.info in begins:
            for at in range(section.at, section.at + section.size, 24):
                where, info, added = struct.unpack_from("<QQq", one, at)
                places.append(_Relocation(begins[section.info] + where, info & 0xFFFFFFFF, own[info >> 32], added))
