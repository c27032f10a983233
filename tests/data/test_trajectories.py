"""Trajectories on meshes in TFRecord files, written here byte by byte, and files that are damaged or made to harm."""

import json
import struct

import numpy as np
import pytest
from models import distributed

import fsdpx
from fsdpx import data, nn, optim
from fsdpx.data import tfrecord
from fsdpx.errors import ConfigError, DataError

STEPS, NODES = 4, 6
CELLS = np.array([[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]], np.int32)
META = {
    "field_names": ["cells", "mesh_pos", "velocity", "world", "length_world"],
    "trajectory_length": STEPS,
    "features": {
        "cells": {"type": "static", "shape": [1, -1, 3], "dtype": "int32"},
        "mesh_pos": {"type": "static", "shape": [1, -1, 2], "dtype": "float32"},
        "velocity": {"type": "dynamic", "shape": [STEPS, -1, 2], "dtype": "float32"},
        "world": {"type": "dynamic_varlen", "shape": [-1, 1], "dtype": "float32"},
    },
}
LENGTHS = np.array([2, 0, 1, 3], np.int32)


def crc32c_of_bits(data):
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c_of_bits(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def varint(n):
    return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])


def field(number, value):
    return varint(number << 3 | 2) + varint(len(value)) + value


def example(values):
    entries = [field(1, name.encode()) + field(2, field(1, field(1, value))) for name, value in values.items()]
    other = field(1, b"ids") + field(2, field(3, b"\x01\x02"))  # a list of integers
    return field(1, b"".join(field(1, entry) for entry in (*entries, other))) + b"\x15abcd" + b"\x18\x96\x01"


def record(data, length=None):
    head = struct.pack("<Q", len(data) if length is None else length)
    return head + masked(head) + data + masked(data)


def make_values(seed):
    rng = np.random.default_rng(seed)
    sizes = {"mesh_pos": (1, NODES, 2), "velocity": (STEPS, NODES, 2), "world": (6, 1)}
    found = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}
    return {"cells": CELLS[None], **found, "length_world": LENGTHS}


def write(folder, records, meta=META):
    (folder / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    (folder / "train.tfrecord").write_bytes(records)
    return folder


GOOD = [example({name: a.tobytes() for name, a in make_values(seed).items()}) for seed in range(2)]


def test_trajectories_are_read_without_tensorflow(tmp_path):
    found = data.TrajectoryDataset(write(tmp_path, b"".join(map(record, GOOD))))
    assert repr(found) == "TrajectoryDataset(train.tfrecord, 2 trajectories of 4 steps)"
    for i in range(2):
        one, wanted = found[i - 2], make_values(i)
        for name in ("cells", "mesh_pos"):
            np.testing.assert_array_equal(one[name], wanted[name][0])
        np.testing.assert_array_equal(one["velocity"], wanted["velocity"])
        assert [len(step) for step in one["world"]] == LENGTHS.tolist()
        np.testing.assert_array_equal(np.concatenate(one["world"]), wanted["world"])
    assert list(data.TrajectoryDataset(tmp_path, fields=["velocity"])[0]) == ["velocity"]
    with pytest.raises(IndexError):
        found[2]


def test_a_trajectory_trains_on_its_mesh(tmp_path):
    trajectory = data.TrajectoryDataset(write(tmp_path, record(GOOD[0])))[0]

    def run(comm):
        mine = trajectory["cells"][comm.rank :: comm.size]
        mesh = fsdpx.Partition.from_cells(comm, mine, positions=trajectory["mesh_pos"][np.unique(mine)])
        u = mesh.take_local(trajectory["velocity"])
        options = {"optimizer": optim.SGD(lr=0.01), "precision": "float64", "domain": mesh}
        trainer = distributed(nn.MeshGraphNet(2, 3, 2, 8, 2), comm, **options)
        return [trainer.step(u[:-1], u[1:]) for _ in range(3)]

    np.testing.assert_allclose(fsdpx.spawn(run, 3)[0], fsdpx.spawn(run, 1)[0], rtol=1e-12)


@pytest.mark.parametrize("size", [0, 1, 32, 65535, 65536, 70001])
def test_checksums_of_parts_join_to_that_of_the_whole(size):
    values = np.random.default_rng(3).bytes(size)
    assert tfrecord.compute_crc32c(values) == crc32c_of_bits(values)
    assert tfrecord.compute_crc32c(b"123456789") == 0xE3069283  # the check value of catalogs of checksums


RECORD = record(GOOD[0])
LIMITED = [n for n in range(1, len(RECORD)) if n < 12 or n % 97 == 0 or n > len(RECORD) - 5]
FLIPPED = bytes([RECORD[20] ^ 1])


def features(**changed):
    return META | {"features": META["features"] | changed}


def velocity(**changed):
    return features(velocity=META["features"]["velocity"] | changed)


BAD = [
    *((RECORD[:n], META, "it is cut off") for n in LIMITED),
    (RECORD + RECORD[:5], META, "the file ends within the length of record 1"),
    (b"\x01" + RECORD[1:], META, "the length of record 0, at byte 0, has a wrong checksum"),
    (record(GOOD[0], 2**63), META, r"record 0, at byte 0, has 9,223,372,036,854,775,808 bytes, and the file ends"),
    (RECORD[:20] + FLIPPED + RECORD[21:], META, "trajectory 0: the data of the record at byte 0 have a wrong checksum"),
    (record(b"\x0a\xff\x01"), META, "reaches beyond its end"),
    (record(b"\x0a" + b"\xff" * 11), META, "a number has more than 10 bytes"),
    (record(b"\x0a"), META, "ends within a number"),
    (record(b"\x0b"), META, "a field has the wire type 3"),
    (record(field(1, field(1, field(1, b"\xff") + field(2, field(1, field(1, b"")))))), META, "can't decode byte"),
    (record(example({"cells": b""})), META, "it has no field 'mesh_pos'"),
    (record(b""), META, "it has no field 'cells', but nothing"),
    (record(example(dict.fromkeys(META["field_names"], b"123"))), META, "3 bytes, which are no whole number of"),
    (RECORD, velocity(shape=[-1, 3, 2]), "'velocity' has 8 steps, and meta.json"),
    (RECORD, velocity(shape=[STEPS, 5, 2]), "cannot reshape array"),
    (RECORD, velocity(shape=[10**30, 2]), "trajectory 0: "),
    (RECORD, velocity(shape=["4", 2]), "must be a list of whole numbers"),
    (RECORD, velocity(dtype="object"), '"dtype" one of float32'),
    (RECORD, velocity(type="still"), '"type" must be one of static'),
    (RECORD, features(cells=7), "must be a list of whole numbers"),
    (RECORD, META | {"trajectory_length": 3}, "'velocity' has 4 steps, and meta.json says 3"),
    (RECORD, META | {"trajectory_length": True}, '"trajectory_length", 1 or more'),
    (RECORD, [], '"trajectory_length", 1 or more'),
    (RECORD, "{", "not valid JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("records", "meta", "text"), BAD, ids=range(len(BAD)))
def test_a_file_that_is_cut_off_or_wrong_is_told(tmp_path, records, meta, text):
    with pytest.raises(DataError, match=text) as error:
        data.TrajectoryDataset(write(tmp_path, records, meta))[0]
    assert "train.tfrecord" in str(error.value) or "meta.json" in str(error.value)


def test_lengths_of_steps_that_do_not_fit_are_told(tmp_path):
    for lengths in ([2, 0, 1, 4], [6, 0, 0], [-1, 3, 2, 2]):
        values = make_values(0) | {"length_world": np.array(lengths, np.int32)}
        write(tmp_path, record(example({name: a.tobytes() for name, a in values.items()})))
        with pytest.raises(DataError, match="'length_world' does not give the rows of 'world' in each of 4 steps"):
            data.TrajectoryDataset(tmp_path)[0]
    with pytest.raises(ConfigError, match="has cells, mesh_pos, velocity, world"):
        data.TrajectoryDataset(tmp_path, fields=("pressure",))
    with pytest.raises(DataError, match=r"valid\.tfrecord"):
        data.TrajectoryDataset(tmp_path, "valid")


@pytest.mark.parametrize("make", [lambda body: record(body), lambda body: RECORD[:12] + body + RECORD[-4:]])
def test_no_byte_that_changes_raises_another_error(tmp_path, make):
    """With right checksums, and with those of the file before."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        body = bytearray(GOOD[0])
        for place in rng.integers(0, len(body), rng.integers(1, 4)):
            body[place] = rng.integers(0, 256)
        try:
            data.TrajectoryDataset(write(tmp_path, make(bytes(body))))[0]
        except DataError:
            continue
