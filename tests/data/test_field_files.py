"""Files of fields as others lay them out: groups, links, filters, other formats; and datasets in other processes."""

import multiprocessing
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

import fsdpx
from fsdpx import data, spawn
from fsdpx.data import FieldDataset
from fsdpx.errors import DataError

N, T, Y, X = 3, 7, 9, 10


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def whole_of(dataset):
    """All states of the first trajectory, (steps, channels, cells)."""
    return np.stack([dataset[0][0], *(dataset[i][1] for i in range(T - 1))])


@pytest.mark.parametrize("form", [2, 3])
def test_zarr_arrays_that_are_in_no_group(form, tmp_path, zarr):
    first, second = values(T, Y, X), values(T, Y, X, seed=1)
    for name, field in (("u.zarr", first), ("v.zarr", second)):
        zarr.save_array(tmp_path / "fields" / name, field, zarr_format=form)
    (tmp_path / "fields/notes").mkdir()
    np.testing.assert_array_equal(whole_of(FieldDataset(tmp_path / "fields/u.zarr", dims="tyx"))[:, 0], first)
    np.testing.assert_array_equal(whole_of(FieldDataset(tmp_path / "fields", dims="tyx")), np.stack([first, second], 1))
    np.testing.assert_array_equal(whole_of(FieldDataset(tmp_path / "fields", fields="v", dims="tyx"))[:, 0], second)
    assert len(FieldDataset([tmp_path / "fields/u.zarr", tmp_path / "fields/v.zarr"], dims="tyx")) == 2 * (T - 1)
    with pytest.raises(DataError, match="notes: this folder is no Zarr group or array, and has no Zarr arrays in it"):
        FieldDataset(tmp_path / "fields/notes", dims="tyx")


@pytest.mark.parametrize("names", [["0000", "0001", "0002"], ["run_9", "run_10", "run_11"]])
def test_a_group_for_each_trajectory_with_components_last(names, tmp_path, h5py):
    whole = values(N, T, X, Y, 2)
    with h5py.File(tmp_path / "u.h5", "w") as file:
        for name, run in zip(sorted(names), whole, strict=True):
            file[f"{name}/data"] = run
            file[f"{name}/grid/x"], file[f"{name}/grid/y"], file[f"{name}/grid/t"] = range(X), range(Y), range(T)

    def run(comm):
        grid = fsdpx.Grid(comm, (X // 2, Y), dims=(2, 1), layout="xyc")
        dataset = FieldDataset(tmp_path / "u.h5", grid)
        assert (len(dataset), dataset.channels) == (N * (T - 1), 2)
        for i, one in enumerate(dataset):
            n, t = divmod(i, T - 1)
            np.testing.assert_array_equal(one[0], grid.take_local(whole[n, t]))
            np.testing.assert_array_equal(one[1], grid.take_local(whole[n, t + 1]))

    spawn(run, 2)


def linked(path):
    h5py = pytest.importorskip("h5py")
    whole = values(T, Y, X)
    with h5py.File(path.with_name("other.h5"), "w") as file:
        file["u"] = whole
    with h5py.File(path, "w") as file:
        file["deep/er/u"] = whole
        for name, target in {
            "here": "/deep/er/u", "relative": "deep/./er/u", "link": "here", "through": "folder/er/u",
            "folder": "/deep", "nowhere": "/deep/v", "a": "b", "b": "a", "away": "/out/u", "u/v": "u/v",
        }.items():  # fmt: skip
            file[name.replace("/", "-")] = h5py.SoftLink(target)
        file["out"] = h5py.ExternalLink("other.h5", "/")
    return whole


def test_links_inside_a_file_are_followed(tmp_path):
    whole = linked(tmp_path / "u.h5")
    for name in ("here", "relative", "link", "through"):
        np.testing.assert_array_equal(whole_of(FieldDataset(tmp_path / "u.h5", fields=name, dims="tyx"))[:, 0], whole)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere", "'nowhere' is a link to '/deep/v', where nothing is"),
        ("a", "'a' is a link that leads to no end"),
        ("out", "'out' is stored in another file, other.h5, which is not opened: copy it into this one, or leave it"),
        ("away", "'away' is stored in another file, other.h5, which is not opened: copy it into this one"),
        (None, "is not opened: copy it into this one, or leave it out by fields="),
    ],
)
def test_links_that_lead_elsewhere_are_named(name, text, tmp_path, h5py):
    linked(tmp_path / "u.h5")
    if name is None:
        with h5py.File(tmp_path / "u.h5", "a") as file:
            for other in [one for one in file if one != "out"]:
                del file[other]
            file["u"] = values(T, Y, X)
    with pytest.raises(DataError, match=re.escape(text)):
        FieldDataset(tmp_path / "u.h5", fields=name, dims="tyx")


def zipped(path, *names):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"{}")


def savez(path, keep=None, at=None, **arrays):
    """As np.savez does, with the first `keep` bytes only, or another byte at a place."""
    with path.open("wb") as file:
        np.savez(file, **arrays)
    found = bytearray(path.read_bytes())
    if at is not None:
        found[at] ^= 1
    path.write_bytes(found[:keep])


@pytest.mark.parametrize(
    ("name", "make", "text"),
    [
        ("a b.nc", lambda path: path.write_bytes(b"CDF\x01"), "by nccopy -k nc4 '{path}' '{folder}/a b-4.nc'"),
        ("a.nc", lambda path: path.write_bytes(b"CDF\x02" + bytes(60)), "this is NetCDF-3, which h5py does not read"),
        ("a.nc", lambda path: path.write_bytes(b"CDF\x05"), "convert it to NetCDF-4, by nccopy -k nc4 {path}"),
        ("a.zip", lambda path: savez(path, u=np.ones(3)), "this is .npz, of which no part can be read by itself"),
        ("a.npz", lambda path: np.savez_compressed(path, u=np.ones(3)), "'u' is compressed, so that no part of it can"),
        ("a.npz", lambda path: savez(path, keep=-9, u=np.ones(3)), "{path}: "),
        ("a.npz", lambda path: savez(path, u=np.array([{}])), "Python objects are in it, which are not read"),
        ("a.npz", lambda path: zipped(path, "u.npy"), "{path}: "),
        ("a.npz", lambda path: savez(path, at=0, u=np.ones(3)), "'u' is not where the directory of the archive says"),
        ("a.npz", lambda path: savez(path, at=60, u=np.ones(3)), "{path}: "),
        ("a.zarr.zip", lambda path: zipped(path, "zarr.json"), "unpack it, by unzip {path} -d {folder}/a.zarr"),
        ("a.zip", lambda path: path.write_bytes(b"PK\x03\x04 cut"), "this is a zip archive, which is not read by"),
        ("a.grib", lambda path: path.write_bytes(b"GRIB" + bytes(60)), "this file is GRIB: convert it to NetCDF-4"),
        ("a.h5.gz", lambda path: path.write_bytes(b"\x1f\x8b"), "compressed by gzip: unpack it, by gunzip"),
        ("a.dat", lambda path: path.write_bytes(b"\x93NUMPY"), "this file is of NumPy: give its name the end .npy"),
        ("a.h5", lambda path: path.write_bytes(bytes(99)), "file signature not found"),
    ],
)  # fmt: skip
def test_files_of_other_kinds_are_told(name, make, text, tmp_path):
    pytest.importorskip("h5py")
    make(tmp_path / name)
    with pytest.raises(DataError) as error:
        FieldDataset(tmp_path / name, dims="tyx")
    assert str(error.value).startswith(f"FieldDataset: {tmp_path / name}: ")
    assert text.format(path=tmp_path / name, folder=tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("damaged", "text"),
    [
        ("names", "'names' cannot be read (Python objects are in it"),
        ("packed", "'packed' is compressed, so that no part of it can be read: use np.savez, or leave it out by fie"),
    ],
)
def test_one_member_that_cannot_be_read_is_named_when_it_is_asked_for(damaged, text, tmp_path):
    u, path = values(T, Y, X), tmp_path / "u.npz"
    np.savez(path, u=u, count=7.0, **({"names": np.array([{}, {}])} if damaged == "names" else {}))
    if damaged == "packed":
        np.savez_compressed(tmp_path / "packed.npz", packed=u)
        with zipfile.ZipFile(tmp_path / "packed.npz") as other, zipfile.ZipFile(path, "a") as archive:
            archive.writestr("packed.npy", other.read("packed.npy"), zipfile.ZIP_DEFLATED)
    dataset = FieldDataset(path, fields="u", dims="tyx", scalars="count")
    np.testing.assert_array_equal(whole_of(FieldDataset(path, fields="u", dims="tyx"))[:, 0], u)
    assert dataset[0][0][1] == [7.0]
    for fields in (damaged, ("u", damaged), None):
        with pytest.raises(DataError, match=re.escape(f"FieldDataset: {path}: {text}")):
            FieldDataset(path, fields=fields, dims="tyx")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (32015, "'u' is compressed by Zstandard (HDF5 filter 32015), which is not installed: pip install hdf5plugin"),
        (40000, "'u' is compressed by a filter (HDF5 filter 40000), which is not installed: HDF5_PLUGIN_PATH names"),
    ],
)
def test_a_filter_that_is_missing_is_named(code, text, tmp_path, monkeypatch, h5py):
    monkeypatch.setitem(__import__("sys").modules, "hdf5plugin", None)
    if h5py.h5z.filter_avail(code):
        pytest.skip("HDF5 has that filter here")
    with h5py.File(tmp_path / "u.h5", "w") as file:
        file.create_dataset("plain", data=values(T, Y, X))
        for name, mask in (("u", 0), ("kept", 1)):  # 1: written where the filter was not there either
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk((T, Y, X))
            plist.set_filter(code, h5py.h5z.FLAG_OPTIONAL, ())
            space = h5py.h5s.create_simple((T, Y, X))
            made = h5py.h5d.create(file.id, name.encode(), h5py.h5t.NATIVE_FLOAT, space, plist)
            made.write_direct_chunk((0, 0, 0), values(T, Y, X).tobytes(), mask)
    with pytest.raises(DataError, match=re.escape(text)):
        FieldDataset(tmp_path / "u.h5", fields="u", dims="tyx")
    for name in ("plain", "kept"):
        assert whole_of(FieldDataset(tmp_path / "u.h5", fields=name, dims="tyx")).shape == (T, 1, Y, X)


def chunked(path):
    h5py = pytest.importorskip("h5py")
    whole = values(200, Y, X)
    with h5py.File(path, "w") as file:
        file.create_dataset("u", data=whole, chunks=(1, Y, X), compression="gzip")
    return whole


def sums(dataset, first):
    return [float(dataset[i][0].sum()) for i in range(first, len(dataset), 2)]


@pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")  # of JAX, if a test has loaded it
@pytest.mark.parametrize("how", ["spawn", "forkserver", "fork"])
def test_datasets_in_other_processes(how, tmp_path):
    """Workers read at the same time, each by itself, though the file was open before."""
    whole = chunked(tmp_path / "u.h5")
    dataset = FieldDataset(tmp_path / "u.h5", dims="tyx")
    dataset[3]
    with multiprocessing.get_context(how).Pool(2) as pool:
        found = pool.starmap(sums, [(dataset, 0), (dataset, 1)], chunksize=1)
    wanted = whole.sum(axis=(1, 2), dtype=np.float64)[:-1]
    for first in range(2):
        np.testing.assert_allclose(found[first], wanted[first::2], rtol=1e-3, atol=1e-3)


def test_a_dataset_of_a_grid_reads_the_same_part_elsewhere(tmp_path):
    chunked(tmp_path / "u.h5")

    def run(comm):
        grid = fsdpx.Grid(comm, (Y, X // 2), dims=(1, 2), layout="yxc", periods=(True, True), ghosts=(1, 1))
        dataset = FieldDataset(tmp_path / "u.h5", grid, inputs=2)
        copy = pickle.loads(pickle.dumps(dataset))
        assert (len(copy), copy.layout, copy.channels, copy.grid) == (len(dataset), "yxc", 1, None)
        for mine, other in zip(dataset[7], copy[7], strict=True):
            np.testing.assert_array_equal(mine, other)

    spawn(run, 2)


def test_workers_of_torch_read_fields(tmp_path):
    torch = pytest.importorskip("torch")
    whole = chunked(tmp_path / "u.h5")
    loader = torch.utils.data.DataLoader(
        FieldDataset(tmp_path / "u.h5", dims="tyx"), 50, num_workers=2, multiprocessing_context="forkserver"
    )
    np.testing.assert_array_equal(np.concatenate([x.numpy() for x, _ in loader])[:, 0], whole[:-1])


def test_datasets_of_text_go_to_other_processes(tmp_path):
    (tmp_path / "a.txt").write_text("some text, and more of it, for windows " * 9)
    np.save(tmp_path / "tokens.npy", np.arange(99))
    for dataset in (data.TextDataset(tmp_path, 8, suffixes=".txt"), data.TokenDataset(tmp_path / "tokens.npy", 8)):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(dataset))[1], dataset[1])


def test_the_home_folder_is_that_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    np.save(tmp_path / "u.npy", values(T, Y, X))
    assert len(FieldDataset("~/u.npy", dims="tyx")) == T - 1
    assert len(FieldDataset([Path("~/u.npy")], dims="tyx")) == T - 1
