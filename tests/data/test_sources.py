"""Tokens on disk, mixtures and tar files: the samples they promise, on any rank, and mistakes by name."""

import io
import json
import re
import tarfile

import numpy as np
import pytest

import fsdpx
from fsdpx.data import ArrayDataset, DataLoader, Mixture, TarDataset, TokenDataset
from fsdpx.errors import ConfigError, DataError


@pytest.mark.parametrize("kind", ["npy", "uint16", "uint32"])
def test_tokens_stay_on_disk(tmp_path, kind):
    tokens = np.arange(23)
    if kind == "npy":
        path = tmp_path / "a.npy"
        np.save(path, tokens)
        data = TokenDataset(path, 5)
    else:
        path = tmp_path / "a.bin"
        tokens.astype(kind).tofile(path)
        data = TokenDataset(path, 5, dtype=kind)
    assert isinstance(data.tokens, np.memmap)
    assert len(data) == 4
    x, y = data.take(np.array([3, 0]))
    assert (x.dtype, x.tolist(), y[0].tolist()) == (
        np.int32,
        [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]],
        [16, 17, 18, 19, 20],
    )
    assert data[-1][0].tolist() == x[0].tolist()
    assert data.take(np.array([], int))[0].shape == (0, 5)
    with pytest.raises(IndexError):
        data[4]


@pytest.mark.parametrize(("kind", "value"), [("uint32", 2**31), ("int64", -(2**31) - 1), ("uint64", 2**63)])
def test_a_token_of_more_than_32_bits_is_named(tmp_path, kind, value):
    np.save(tmp_path / "a.npy", np.array([0, 1, 2, 3, 2**31 - 1, value, 6], kind))
    data = TokenDataset(tmp_path / "a.npy", 3)
    assert data[0][0].tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=rf"a\.npy: token 5 is {value}: it does not fit into 32 bits"):
        data[1]


def test_tokens_that_cannot_be(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 9)))
    np.arange(4, dtype=np.uint16).tofile(tmp_path / "b")
    (tmp_path / "c.npy").write_bytes(b"no")
    for name, said in (
        ("a.npy", "has float64[2, 9]: token numbers in one row"),
        ("b", "seq_len 4 needs at least 5 tokens, "),
        ("c.npy", "c.npy: "),
        ("d", "No such file"),
    ):
        with pytest.raises(DataError, match=re.escape(said)):
            TokenDataset(tmp_path / name, 4)
    with pytest.raises(ConfigError, match=r"seq_len=0\): a whole number"):
        TokenDataset(tmp_path / "b", 0)


def test_a_mixture_holds_its_shares_everywhere():
    sources = [ArrayDataset(np.arange(n) + base) for n, base in ((7, 0), (50, 100), (11, 200))]
    mixed = Mixture(sources, [0.5, 0.3, 0.2], 200)
    for end in range(1, 201):
        counts = np.bincount(mixed.which[:end], minlength=3)
        assert np.abs(counts - end * np.array([0.5, 0.3, 0.2])).max() < 1.01, end
    first = [int(mixed[i][0]) for i in range(200) if mixed.which[i] == 0]
    assert first == [n % 7 for n in range(100)]  # begins again
    assert len(Mixture(sources, [0.5, 0.3, 0.2])) == 14  # until the first would
    whole = Mixture(sources)
    assert sorted(int(whole[i][0]) for i in range(len(whole))) == [*range(7), *range(100, 150), *range(200, 211)]
    for weights in ([1.0], [1.0, 0.0, 1.0], [1.0, float("nan"), 1.0]):
        with pytest.raises(ConfigError, match="one positive weight for each is needed"):
            Mixture(sources, weights)


def put(tar, name, raw):
    member = tarfile.TarInfo(name)
    member.size = len(raw)
    tar.addfile(member, io.BytesIO(raw))


def array(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for n in range(3):
                key = f"x/{3 * shard + n:04}"
                put(tar, f"{key}.npy", array(np.full(2, 3.0 * shard + n)))
                put(tar, f"{key}.cls", str(n).encode())
                put(tar, f"{key}.meta.json", json.dumps({"n": n}).encode())
    return tmp_path


def test_samples_of_tar_files_are_read_where_they_lie(folder):
    data = TarDataset(folder, ("npy", "cls"))
    assert [(float(x[0]), y) for x, y in (data[i] for i in range(len(data)))] == [
        (0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2),
    ]  # fmt: skip
    assert TarDataset(folder / "1.tar", ["meta.json"], decoders={"meta.json": json.loads})[2] == ({"n": 2},)

    def read(comm):
        loader = DataLoader(data, 4, comm=comm, shuffle=True, seed=3)
        return [float(n) for x, _ in loader for n in x[:, 0]]

    parts = fsdpx.spawn(read, 2)
    assert sorted(parts[0] + parts[1]) == [0, 1, 2, 3, 4, 5]


def test_tar_files_that_cannot_be(folder, tmp_path_factory):
    with pytest.raises(DataError, match=r"0.tar: sample x/0000 has no txt; it has npy, cls, meta.json"):
        TarDataset(folder, ["txt"])
    with pytest.raises(ConfigError, match="field 'jpg' has no decoder; known are npy, json, txt, cls, bin"):
        TarDataset(folder, ["jpg"])
    with pytest.raises(DataError, match="does not exist"):
        TarDataset(folder / "no", ["npy"])
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(DataError, match=r"no \*.tar in"):
        TarDataset(empty, ["npy"])
    (empty / "a.tar").write_bytes(b"x" * 2000)
    with pytest.raises(DataError, match=r"a\.tar: "):
        TarDataset(empty, ["npy"])
    with tarfile.open(empty / "a.tar", "w") as tar:
        put(tar, "a.cls", b"many")
    with pytest.raises(DataError, match=r"a.tar: a.cls cannot be read: invalid literal"):
        TarDataset(empty, ["cls"])[0]
