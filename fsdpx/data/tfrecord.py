"""Reads files in TensorFlow's TFRecord format, without TensorFlow.

Format: https://github.com/tensorflow/tensorflow, tensorflow/core/lib/io/record_writer.h and core/example. A record
consists of its length (8 bytes), the checksum of the length (4 bytes), the data, and the checksum of the data (4
bytes); numbers are little-endian. The data are a `tf.train.Example`, which is a protocol buffer. Checksums are masked
CRC-32C checksums."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any, BinaryIO

import numpy as np

__all__ = ["compute_crc32c", "index_records", "mask_checksum", "parse_byte_features", "read_record"]

POLYNOMIAL = 0x82F63B78
"""The polynomial of CRC-32C (Castagnoli et al. 1993), with its bits reversed."""
LANES = 4096
"""Number of parts into which long data are divided. The checksums of all parts are computed at the same time."""
MAX_VARINT_BYTES = 10

Record = tuple[int, int]
"""Offset and length, in bytes, of a record's data in its file."""


def index_records(file: BinaryIO) -> list[Record]:
    """Return the (offset, length) of each record of a file. This function reads only the lengths of the records, and
    verifies the checksums of the lengths.

    Raises ValueError if the file is truncated, or the checksum of a length is wrong."""
    found: list[Record] = []
    size, at = os.fstat(file.fileno()).st_size, 0
    while at < size:
        file.seek(at)
        head = file.read(12)
        what = f"record {len(found)}, at byte {at:,}"
        if len(head) < 12:
            raise ValueError(f"the file ends within the length of {what}: it is cut off")
        length, checksum = struct.unpack("<QI", head)
        if mask_checksum(compute_crc32c(head[:8])) != checksum:
            raise ValueError(f"the length of {what}, has a wrong checksum: this is no TFRecord file, or it is damaged")
        if length + 16 > size - at:
            raise ValueError(f"{what}, has {length:,} bytes, and the file ends after {size - at - 12:,}: it is cut off")
        found.append((at + 12, length))
        at += length + 16
    return found


def read_record(file: BinaryIO, record: Record) -> bytes:
    """Return the data of a record. Raise ValueError if the file ends within the record, or the checksum is wrong."""
    offset, length = record
    file.seek(offset)
    data = file.read(length + 4)
    if len(data) < length + 4:
        raise ValueError(f"the file ends within the record at byte {offset - 12:,}: it is cut off")
    body = data[:length]
    if mask_checksum(compute_crc32c(body)) != int.from_bytes(data[length:], "little"):
        raise ValueError(f"the data of the record at byte {offset - 12:,} have a wrong checksum: the file is damaged")
    return body


def parse_byte_features(data: bytes) -> dict[str, memoryview]:
    """Return a dict that maps the name of each feature of a `tf.train.Example` to its value. Features that do not
    consist of exactly one bytes value are skipped.

    Raises ValueError if `data` is not a valid protocol buffer."""
    found: dict[str, memoryview] = {}
    for features in _select_bytes(memoryview(data), 1):
        for entry in _select_bytes(features, 1):
            names, values = _select_bytes(entry, 1), _select_bytes(entry, 2)
            texts = [text for value in values for texts in _select_bytes(value, 1) for text in _select_bytes(texts, 1)]
            if len(names) == 1 and len(texts) == 1:
                found[bytes(names[0]).decode()] = texts[0]
    return found


def _select_bytes(data: memoryview, number: int) -> list[memoryview]:
    """Return the values of all fields of a message that have the field number `number`. Fields that do not contain
    bytes, strings or messages are skipped."""
    return [value for field, value in _iterate_fields(data) if field == number and isinstance(value, memoryview)]


def _iterate_fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) for each field of a protocol buffer. The value is a memoryview if the field contains
    bytes, an int if it contains a varint, and None if it contains a 4-byte or 8-byte number, because such numbers are
    not decoded."""
    at, value = 0, None  # type: int, Any
    while at < len(data):
        key, at = _read_varint(data, at)
        kind, value = key & 7, None
        if kind == 0:
            value, at = _read_varint(data, at)
        elif kind == 2:
            length, at = _read_varint(data, at)
            value, at = data[at : at + length], at + length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field has the wire type {kind}: this is no tf.train.Example")
        if at > len(data):
            raise ValueError("a field of a message reaches beyond its end: this is no tf.train.Example")
        yield key >> 3, value


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the varint (an integer stored with 7 bits per byte) at offset `at`, and the offset after it."""
    value = 0
    for i in range(MAX_VARINT_BYTES):
        if at + i >= len(data):
            raise ValueError("a message ends within a number: this is no tf.train.Example")
        value |= (data[at + i] & 0x7F) << (7 * i)
        if data[at + i] < 0x80:
            return value, at + i + 1
    raise ValueError(f"a number has more than {MAX_VARINT_BYTES} bytes: this is no tf.train.Example")


def mask_checksum(checksum: int) -> int:
    """Return a checksum in the masked form that TFRecord files store. Checksums are masked because it is problematic to
    compute the CRC of data that contain CRCs."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def compute_crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`.

    Long data are cut into equal parts, whose checksums are computed at the same time and then combined pairwise. Since
    a checksum is linear, the checksum of A followed by B is the checksum of A followed by zeros, plus the checksum of
    B."""
    table, values = _make_table(), np.frombuffer(data, np.uint8)
    state, rest = np.uint32(0xFFFFFFFF), values
    length = values.size // LANES
    if length >= 16:
        columns = np.ascontiguousarray(values[: length * LANES].reshape(LANES, length).T)
        states = np.zeros(LANES, np.uint32)
        states[0] = state
        for column in columns:
            states = table[(states ^ column) & np.uint32(0xFF)] ^ (states >> np.uint32(8))
        shift = _make_shift(length)
        while states.size > 1:
            states = _append_zeros_to_crcs(shift, states[::2]) ^ states[1::2]
            shift = _append_zeros_to_crcs(shift, shift)
        state, rest = states[0], values[length * LANES :]
    found = int(state)
    small = table.tolist()
    for byte in rest.tolist():
        found = small[(found ^ byte) & 0xFF] ^ (found >> 8)
    return found ^ 0xFFFFFFFF


@cache
def _make_table() -> np.ndarray:
    """Return a table of CRC states: entry b is the state after byte b, starting from state 0."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & np.uint32(1), np.uint32(POLYNOMIAL), np.uint32(0))
    return table


def _make_shift(zeros: int) -> np.ndarray:
    """For each of the CRC states 1, 2, 4, ..., return the state after `zeros` more zero bytes. The states are computed
    by repeated squaring."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power, found = _make_table()[bits & np.uint32(0xFF)] ^ (bits >> np.uint32(8)), bits
    while zeros:
        if zeros & 1:
            found = _append_zeros_to_crcs(power, found)
        power, zeros = _append_zeros_to_crcs(power, power), zeros >> 1
    return found


def _append_zeros_to_crcs(shift: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Return the CRC states that follow from `states` when a number of zero bytes is appended. `shift` is the result of
    `_make_shift` for this number."""
    found = np.zeros_like(states)
    for bit, image in enumerate(shift):
        found ^= np.where((states >> np.uint32(bit)) & np.uint32(1), image, np.uint32(0))
    return found
