"""Fields in files: each rank reads its part of windows in time, and nothing else."""

import io
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from models import alike, distributed

import fsdpx
from fsdpx import nn, spawn
from fsdpx.data import DataLoader, FieldDataset, opening
from fsdpx.errors import ConfigError, DataError
from fsdpx.nn.shard_specs import FieldPartition

N, T, Y, X = 3, 7, 9, 10
ROWS, COLUMNS = (0, 4, 9), (0, 7, 7, 10)  # bounds of uneven parts, one of them empty


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def grid_of(comm, layout="yxc"):
    p, q = divmod(comm.rank, 3)
    return fsdpx.Grid(comm, (ROWS[p + 1] - ROWS[p], COLUMNS[q + 1] - COLUMNS[q]), dims=(2, 3), layout=layout)


def windows(whole, inputs, targets, stride, every):
    """From the whole array (n, t, y, x, c): all windows, as (y, x, states c)."""
    found = []
    for run in whole:
        for begin in range(0, len(run) - (inputs + targets - 1) * stride, every):
            states = [run[begin + k * stride] for k in range(inputs + targets)]
            found.append((np.concatenate(states[:inputs], -1), np.concatenate(states[inputs:], -1)))
    return found


def demand(whole, path, constant=None, **options):
    """All samples of a dataset, of all ranks, are the parts of the whole array's windows."""

    def run(comm, choice, layout):
        grid = grid_of(comm, layout)
        windowing = dict(zip(("inputs", "targets", "stride", "every"), choice, strict=True))
        dataset = FieldDataset(path, grid, **options, **windowing)
        expected = windows(whole, **windowing)
        assert len(dataset) == len(expected)
        x, y = dataset.read_samples(np.arange(len(dataset))[::-1])
        for row, (wx, wy) in zip(range(len(dataset))[::-1], expected, strict=True):
            if constant is not None:
                wx = np.concatenate([wx, constant], -1)
            order = ["yxc".index(letter) for letter in layout]
            np.testing.assert_array_equal(x[row], grid.take_local(wx.transpose(order)))
            np.testing.assert_array_equal(y[row], grid.take_local(wy.transpose(order)))
        assert (dataset[-1][0] == x[0]).all()

    for choice, layout in (((1, 1, 1, 1), "yxc"), ((2, 3, 1, 2), "cyx"), ((2, 1, 2, 1), "ycx")):
        spawn(run, 6, choice, layout)


def test_parts_of_a_memory_map_are_those_of_the_whole(tmp_path):
    whole = values(N, T, Y, X, 2)
    np.save(tmp_path / "a.npy", whole[:2])
    np.save(tmp_path / "b.npy", whole[2:])
    demand(whole, [tmp_path / "a.npy", tmp_path / "b.npy"], dims="ntyxc")
    np.save(tmp_path / "t.npy", np.asfortranarray(whole[0, ..., 0].transpose(2, 0, 1)))  # one run, x before the steps
    demand(whole[:1, ..., :1], tmp_path / "t.npy", dims="xty")


def test_ghost_cells_come_with_the_part(tmp_path):
    """Also more of them than cells along a dim; what lies beyond walls is in no file."""
    whole = values(T, Y, X, 2)
    np.save(tmp_path / "u.npy", whole)

    def run(comm):
        shape = (ROWS[comm.rank + 1] - ROWS[comm.rank], X)
        grid = fsdpx.Grid(comm, shape, dims=(2, 1), ghosts=(3, 11), periods=(True, True))
        x, y = FieldDataset(tmp_path / "u.npy", grid, dims="tyxc")[2]
        rows, columns = np.arange(ROWS[comm.rank] - 3, ROWS[comm.rank + 1] + 3) % Y, np.arange(-11, X + 11) % X
        np.testing.assert_array_equal(x, whole[2][rows][:, columns])
        np.testing.assert_array_equal(y, whole[3][rows][:, columns])
        assert np.isfinite(distributed(nn.Conv2d(2, 2, 3, padding=1), comm, domain=grid).step(x, y))
        inner = ((2 * comm.rank, 2 * (1 - comm.rank)), 0)  # none at walls
        x, y = FieldDataset(tmp_path / "u.npy", fsdpx.Grid(comm, shape, dims=(2, 1), ghosts=inner), dims="tyxc")[2]
        rows = slice(ROWS[comm.rank] - inner[0][0], ROWS[comm.rank + 1] + inner[0][1])
        np.testing.assert_array_equal(x, whole[2][rows])
        grid = fsdpx.Grid(comm, shape, dims=(2, 1), ghosts=(1, 0))
        said = r"ghost cells \(\(1, 1\), \(0, 0\)\) and periods \(False, False\): files have"
        with pytest.raises(ConfigError, match=said):
            FieldDataset(tmp_path / "u.npy", grid, dims="tyxc")

    spawn(run, 2)


def test_without_a_grid_samples_are_whole(tmp_path):
    whole = values(T, Y, X)
    np.save(tmp_path / "u.npy", whole)
    dataset = FieldDataset(tmp_path / "u.npy", dims="tyx", inputs=2)
    assert repr(dataset) == "FieldDataset(5 windows of 1 channels on 9 x 10 cells)"
    x, y = dataset[1]
    np.testing.assert_array_equal(x, whole[1:3])
    np.testing.assert_array_equal(y, whole[3:4])
    assert dataset.read_samples(np.array([], int))[0].shape == (0, 2, Y, X)
    with pytest.raises(IndexError, match="sample 5 of 5"):
        dataset[5]


def test_files_of_the_well(tmp_path, h5py):
    """A scalar, a vector, a tensor, and a field without time that is alike along x."""
    whole, mask = values(N, T, Y, X, 7), np.repeat(values(Y, 1, seed=1), X, 1)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("dimensions").attrs["spatial_dims"] = ["y", "x"]
        for k, names in enumerate((["density", "mask"], ["velocity"], ["stress"])):
            file.create_group(f"t{k}_fields").attrs["field_names"] = names
        file["t0_fields"].create_dataset("density", data=whole[..., 0], chunks=(1, 2, 3, 4), compression="gzip")
        file["t0_fields/mask"] = mask[:, :1]
        file["t0_fields/mask"].attrs.update(sample_varying=False, time_varying=False, dim_varying=[True, False])
        file["t1_fields/velocity"] = whole[..., 1:3]
        file["t2_fields/stress"] = whole[..., 3:7].reshape(*whole.shape[:-1], 2, 2)
        file["scalars/dt"] = 0.1
    demand(whole, tmp_path / "a.h5", mask[..., None])
    demand(whole[..., [1, 2, 0]], tmp_path / "a.h5", fields=("velocity", "density"))
    assert FieldDataset(tmp_path / "a.h5").shape == (Y, X)


def test_files_of_pdebench(tmp_path, h5py):
    whole = values(N, T, Y, X, 2)
    with h5py.File(tmp_path / "flow.h5", "w") as file:
        file["Vx"], file["Vy"] = np.moveaxis(whole, -1, 0)
        file["t-coordinate"], file["x-coordinate"] = range(T), range(X)
    demand(whole, tmp_path / "flow.h5")
    with h5py.File(tmp_path / "groups.h5", "w") as file:
        for n, run in enumerate(whole):
            file[f"{n:04}/data"], file[f"{n:04}/grid/x"] = run, range(X)
    demand(whole, tmp_path / "groups.h5", fields="data", dims="tyxc")


@pytest.mark.parametrize("layout", ["contiguous", "compact", "big-endian", "empty", "block"])
def test_layouts_of_hdf5(tmp_path, layout, h5py):
    """In one piece, inside the header, of the other order of bytes, never written, behind a block of the user's."""
    whole = values(T, Y, X) if layout != "empty" else np.full((T, Y, X), 2.5, np.float32)
    with h5py.File(tmp_path / "u.h5", "w", userblock_size=512 if layout == "block" else 0) as file:
        if layout == "compact":
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.COMPACT)
            h5py.h5d.create(file.id, b"u", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((T, Y, X)), plist)
            file["u"][...] = whole
        elif layout == "empty":
            file.create_dataset("u", (T, Y, X), np.float32, fillvalue=2.5)
        else:
            file["u"] = whole.astype(">f4") if layout == "big-endian" else whole
    demand(whole[None, ..., None], tmp_path / "u.h5", dims="tyx")


def test_packed_numbers_of_netcdf(tmp_path, h5py):
    stored = np.random.default_rng(0).integers(-99, 99, (T, Y, X)).astype(np.int16)
    whole = (stored * 0.5 + 280.0).astype(np.float32)
    whole[0, 0, 0], stored[0, 0, 0] = np.nan, -32767
    with h5py.File(tmp_path / "t2m.nc", "w") as file:
        file["t2m"], file["time"], file["latitude"] = stored, range(T), range(Y)
        file["t2m"].attrs.update(scale_factor=0.5, add_offset=280.0, _FillValue=np.array([-32767], np.int16))
    demand(whole[None, ..., None], tmp_path / "t2m.nc")


def test_folders_of_zarr(tmp_path, zarr):
    whole = values(N, T, Y, X, 2)
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("u", data=whole, chunks=(1, 2, 3, 4, 2))
    demand(whole, tmp_path / "a.zarr")


def test_fields_of_zarr_have_one_order_on_all_ranks(tmp_path, zarr):
    """That of their names: Zarr lists them as they arrive."""
    names = ["v", "u", "pressure", "height"]
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    for value, name in enumerate(names):
        group.create_array(name, data=np.full((T, 2, 2), value, np.float32))

    def run(comm):
        grid = fsdpx.Grid(comm, (1, 2), dims=(2, 1), layout="yxc")
        return [x for _ in range(5) for x in FieldDataset(tmp_path / "a.zarr", grid)[0][0][0, 0]]

    assert spawn(run, 2) == [[float(names.index(name)) for name in sorted(names)] * 5] * 2


def test_files_whose_fields_have_other_names_are_refused(tmp_path, h5py):
    """Their channels would be others, unless fields= says which."""
    for name, first in (("a.h5", "u"), ("b.h5", "height")):
        with h5py.File(tmp_path / name, "w") as file:
            for field in (first, "v"):
                file[field] = values(T, Y, X)
    files = [tmp_path / "a.h5", tmp_path / "b.h5"]
    said = f"FieldDataset: {files[1]}: it has 'height', 'v', and {files[0]} has 'u', 'v': give fields="
    with pytest.raises(DataError, match=f"^{re.escape(said)}$"):
        FieldDataset(files, dims="tyx")
    assert FieldDataset(files, dims="tyx", fields="v").channels == 1
    sizes = (Y, 4), (Y, X - 4)
    assert alike(2, lambda comm: FieldDataset(files[comm.rank], fsdpx.Grid(comm, sizes[comm.rank], dims=(1, 2)))) == (
        "DataError: FieldDataset: rank 0 has 6 samples of 2 and 0 constant channels, 'u', 'v', "
        "rank 1 has 6 samples of 2 and 0 constant channels, 'height', 'v'"
    )


def test_the_well_without_names_of_dims_is_told(tmp_path, h5py):
    with h5py.File(tmp_path / "u.h5", "w") as file:
        file.create_group("t0_fields")["u"] = values(N, T, Y, X)
    with pytest.raises(ConfigError, match=r"u\.h5 does not say which dims are cells: give a grid, or dims=, as 'ntyx'"):
        FieldDataset(tmp_path / "u.h5")
    assert FieldDataset(tmp_path / "u.h5", dims="ntyx").shape == (Y, X)


SIDE, PART = 256, 64  # cells of the field, rows of a rank


def quarter():
    """Stands for the grid of the second of four ranks."""
    parts = FieldPartition((tuple(range(0, SIDE + 1, PART)), (0, SIDE)))
    return SimpleNamespace(
        layout="yxc", coords=(1, 0), parts=parts, ghosts=((0, 0), (0, 0)), periods=(False, False),
        all_gather_value=lambda value: [value],
    )  # fmt: skip


def test_a_rank_reads_its_part_alone(tmp_path, monkeypatch, h5py):
    """Bytes counted where the file is read: those of the part, at the two steps that the sample has."""
    with h5py.File(tmp_path / "u.h5", "w") as file:
        file.create_dataset("u", data=values(2, 9, SIDE, SIDE), chunks=(1, 1, PART, SIDE // 2))
    counted = []

    class Counting(io.FileIO):
        def readinto(self, buffer):
            found = super().readinto(buffer) or 0
            counted.append(found)
            return found

    monkeypatch.setattr(opening, "open_file", lambda path, **_: Counting(path))
    dataset = FieldDataset(tmp_path / "u.h5", quarter())
    counted.clear()
    dataset[5]
    part = 2 * PART * SIDE * 4
    assert counted.count(part // 4) == 4  # the chunks of the part at each step
    assert part <= sum(counted) < 1.1 * part  # and where the chunks lie
    assert dataset._open.cache.cache_info().misses == 1  # the file stayed open


def test_a_read_of_a_memory_map_is_one_block(tmp_path, monkeypatch):
    np.save(tmp_path / "u.npy", values(2, 9, SIDE, SIDE))
    blocks = []

    class Counting(np.ndarray):
        def __getitem__(self, index):
            found = super().__getitem__(index)
            blocks.append(found.shape)
            return np.asarray(found)

    monkeypatch.setattr(opening, "memory_map_array", lambda path, _: np.load(path).view(Counting))
    FieldDataset(tmp_path / "u.npy", quarter())[5]
    FieldDataset(tmp_path / "u.npy", quarter(), stride=3)[5]
    assert blocks == [(2, PART, SIDE), (1, PART, SIDE), (1, PART, SIDE)]


def test_parts_from_a_file_train_as_the_whole_does(tmp_path):
    """Ranks of a grid get the same shuffled samples, and two members of an ensemble share each batch; two epochs by
    `fit`, with a short last batch."""
    np.save(tmp_path / "u.npy", values(2, T, Y, X))

    def member(comm):
        return fsdpx.Grid(comm, (np.diff(ROWS)[comm.rank % 2], X), dims=(2, 1))

    def run(comm, cut):
        grid = cut(comm)
        dataset = FieldDataset(tmp_path / "u.npy", grid, dims="ntyx", targets=2, dtype=np.float64)
        trainer = distributed(nn.Rollout(nn.Conv2d(1, 1, 3, padding=1), 2), comm, precision="float64", domain=grid)
        loader = DataLoader(dataset, 4, comm=trainer.data_group, shuffle=True, seed=3)
        return trainer.fit(loader, epochs=2, progress=False).losses

    straight = spawn(run, 1, lambda comm: None)[0]
    assert len(straight) == 6
    for losses in [*spawn(run, 6, grid_of), *spawn(run, 4, member)]:
        np.testing.assert_allclose(losses, straight, rtol=1e-11)


@pytest.mark.parametrize("cut", [True, False])
def test_loaders_of_other_orders_are_refused(cut):
    def run(comm):
        grid = fsdpx.Grid(comm, (2, 3), dims=(2, 1)) if cut else None
        trainer = distributed(nn.ReLU(), comm, domain=grid)
        samples = [(np.ones((2, 3, 1), np.float32),) * 2] * 4
        trainer.fit(DataLoader(samples, 2, comm=trainer.data_group, shuffle=True, seed=comm.rank), progress=False)

    said = "ConfigError: fit: the DataLoaders of the ranks take samples in different orders: batch_size, shuff"
    assert alike(2, run).startswith(said)


def plain(shape, kind=np.float32):
    return lambda path: np.save(path, np.zeros(shape, kind))


def written(content):
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (plain((T, Y, X + 1)), {}, "u.npy: 'u' has (7, 9, 11) as 'tyx': 11 along 'x', not 10"),
        (plain((T, Y, X)), {"dims": "txy"}, "u.npy: 'u' has (7, 9, 10) as 'txy': 9 along 'x', not 10"),
        (plain((T, Y, X)), {"fields": "rho"}, "u.npy: there is no 'rho' in it, but 'u'"),
        (plain((T, Y, X), np.complex64), {}, "u.npy: 'u' is of complex64: real numbers are needed"),
        (plain((1, Y, X)), {}, "u.npy: it has 1 steps, and a window has 2"),
        (plain((T, Y, X)), {"inputs": 4, "stride": 2}, "u.npy: it has 7 steps, and a window has 9"),
        (plain((0, T, Y, X)), {}, "u.npy: it has no trajectories"),
        (plain((Y, X)), {"fields": "u"}, "u.npy: no field has the dims 't', among 'u'"),
        (plain((Y, X)), {}, "u.npy: there is no field in it, but 'u'"),
        (plain((T, Y, X)), {"dims": "ntyxc"}, "'u' has (7, 9, 10), which are not the dims 'yx': give dims=, a letter"),
        (plain((T, Y, X, 3)), {}, "u.npy: 'u' has (7, 9, 10, 3) as 'ntyx': 10 along 'y', not 9"),
        (written(b"\x93NUMPY"), {}, "u.npy: "),
        (written(b"\x93NUMPY\x01\x00\x10\x00{'shape': (2, 3,\n"), {}, "u.npy: its header cannot be read: TokenError"),
        (lambda path: None, {}, "u.npy: No such file or directory"),
        (lambda path: os.mkfifo(path), {}, "u.npy is a folder, a pipe or a device where a file should be"),
        (plain((T, Y, X)), {"dims": "tzx"}, "FieldDataset(dims='tzx'): the grid has the dims 'yx', each comes once"),
        (plain((T, Y, X)), {"inputs": 0}, "FieldDataset(inputs=0): a whole number, 1 or more, is needed"),
        (plain((T, Y, X)), {"dtype": "i4"}, "FieldDataset(dtype='i4'): samples are real numbers, such as float32"),
    ],
)
def test_files_that_do_not_fit_are_named_on_all_ranks(tmp_path, make, options, text):
    make(tmp_path / "u.npy")
    found = alike(6, lambda comm: FieldDataset(tmp_path / "u.npy", grid_of(comm), **options))
    assert found.startswith(("ConfigError: ", "DataError: "))
    assert text in found


def test_ranks_that_find_other_files_are_told_apart(tmp_path):
    np.save(tmp_path / "0.npy", np.zeros((T, 4, 4)))
    np.save(tmp_path / "1.npy", np.zeros((T + 1, 4, 4)))

    def error_of(*files):
        return alike(2, lambda comm: FieldDataset(tmp_path / files[comm.rank], fsdpx.Grid(comm, (2, 4), dims=(2, 1))))

    assert error_of("0.npy", "1.npy") == (
        "DataError: FieldDataset: rank 0 has 6 samples of 1 and 0 constant channels, "
        "rank 1 has 7 samples of 1 and 0 constant channels"
    )
    missing = f"DataError: rank 1: FieldDataset: {tmp_path / '2.npy'}: No such file or directory"
    assert error_of("0.npy", "2.npy") == missing


def hostile(path, what):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path.with_name("other.h5"), "w") as file:
        file["u"] = values(T, Y, X)
    with h5py.File(path, "w") as file:
        if what == "link":
            file["u"] = h5py.ExternalLink("other.h5", "/u")
        elif what == "virtual":
            layout = h5py.VirtualLayout((T, Y, X), np.float32)
            layout[:] = h5py.VirtualSource(path.with_name("other.h5"), "u", (T, Y, X))
            file.create_virtual_dataset("u", layout)
        elif what == "external":
            file.create_dataset("u", (T, Y, X), np.float32, external=[("/dev/zero", 0, h5py.h5f.UNLIMITED)])
        elif what == "text":
            file["u"] = np.full((T, Y, X), "a", object)
        elif what == "huge":
            file.create_dataset("u", (2**40, T, Y, X), np.float32, chunks=(1, 1, Y, X))
        else:
            file["u"] = values(T, Y, X)
    if what == "short":
        os.truncate(path, 2000)
    elif what == "noise":
        path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(range(256)) * 9)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("link", "'u' is stored in another file, other.h5, which is not opened: copy it into this one, or leave"),
        ("virtual", "other.h5, which is not opened: copy it into this one"),
        ("external", "'u' is stored in another file, /dev/zero, which is not opened: copy it into this one"),
        ("text", "'u' is of object: real numbers are needed"),
        ("short", "u.h5: "),
        ("noise", "u.h5: "),
    ],
)
def test_hostile_files_are_refused_by_name(tmp_path, what, text):
    hostile(tmp_path / "u.h5", what)
    with pytest.raises(DataError, match=re.escape(text)):
        FieldDataset(tmp_path / "u.h5", dims="tyx", fields="u")


def test_a_file_that_claims_to_be_huge_is_read_by_parts(tmp_path):
    hostile(tmp_path / "u.h5", "huge")
    dataset = FieldDataset(tmp_path / "u.h5", dims="ntyx")
    assert len(dataset) == 2**40 * (T - 1)
    assert dataset[len(dataset) - 1][0].shape == (1, Y, X)


def test_what_fails_while_reading_is_named(tmp_path, h5py):
    with h5py.File(tmp_path / "u.h5", "w") as file:
        file.create_dataset("u", data=values(T, Y, X), chunks=(1, Y, X), compression="gzip")
        place = file["u"].id.get_chunk_info(4).byte_offset
    with open(tmp_path / "u.h5", "r+b") as raw:
        raw.seek(place)
        raw.write(b"broken, all of this")
    dataset = FieldDataset(tmp_path / "u.h5", dims="tyx", fields="u")
    dataset[0]
    with pytest.raises(DataError, match=r"u\.h5: 'u' of trajectory 0, steps 3 to 5, cannot be read: "):
        dataset[3]


@pytest.mark.parametrize("name", ["h5py", "zarr"])
def test_a_library_that_is_missing_is_named(tmp_path, name, monkeypatch):
    path = tmp_path / "u"
    path.mkdir() if name == "zarr" else path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"u is read by {name}: pip install '\.\[{name}\]'"):
        FieldDataset(path, dims="tyx")


def test_a_layout_without_channels_has_one(tmp_path):
    np.save(tmp_path / "u.npy", values(T, Y, X))

    def run(comm):
        grid = grid_of(comm, "yx")
        assert FieldDataset(tmp_path / "u.npy", grid)[0][0].shape == grid.take_local(np.empty((Y, X))).shape
        with pytest.raises(DataError, match="a grid of layout 'yx' has one channel, not 2 states of 1 and 0 constant"):
            FieldDataset(tmp_path / "u.npy", grid, inputs=2)

    spawn(run, 6)
