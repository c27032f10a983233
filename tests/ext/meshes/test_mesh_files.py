"""Files with values of all nodes, of which each rank reads those of its own nodes."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mesh_graphs import Graph, make_partition, make_trainer

from fsdpx import data, nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import DataError

RUNS, STEPS, NODES = 2, 6, 400
RNG = np.random.default_rng(4)
U, MASK, SUN = RNG.standard_normal((RUNS, STEPS, NODES, 2)), RNG.random(NODES), RNG.random((RUNS, STEPS, NODES))


def write(folder: Path, kind: str, **arrays: np.ndarray) -> Path:
    path = folder / f"run.{kind}"
    if kind == "npz":
        np.savez(path, **arrays)
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file.create_dataset(name, data=array, chunks=True if name == "u" else None)
    return path


def make_mesh(comm: Communicator) -> Any:
    """Nodes of a rank are neighbors, with some elsewhere; rank 1 of several has none."""
    graph, somewhere = Graph.random(0, 1, NODES, 50), np.random.default_rng(1).integers(0, comm.size, NODES)
    graph.parts = np.where(np.arange(NODES) % 7 == 0, somewhere, np.arange(NODES) * comm.size // NODES)
    if comm.size > 2:
        graph.parts[graph.parts == 1] = 2
    return make_partition(comm, graph, "anywhere")


@pytest.mark.parametrize("kind", ["npz", "h5"])
@pytest.mark.parametrize("ranks", [3, 1])
def test_each_rank_reads_the_values_of_its_nodes(tmp_path, kind, ranks):
    path = write(tmp_path, kind, u=U, mask=MASK, sun=SUN)

    def run(comm):
        mesh = make_mesh(comm)
        found = data.FieldDataset(
            path, mesh, ("u", "mask"), inputs=2, targets=2, forcing="sun", every=2, dtype=np.float64
        )
        assert (len(found), found.channels, found.constants) == (RUNS * 2, 2, 1)
        (x, f), y = pickle.loads(pickle.dumps(found)).read_samples(np.array([3, 0]))
        for row, (trajectory, first) in enumerate(((1, 2), (0, 0))):
            steps = U[trajectory, first : first + 4, mesh.numbers]  # NumPy puts the nodes first
            states = np.concatenate([steps[:, 0], steps[:, 1], MASK[mesh.numbers][:, None]], axis=1)
            np.testing.assert_array_equal(x[row], states)
            np.testing.assert_array_equal(y[row], np.concatenate([steps[:, 2], steps[:, 3]], axis=1))
            np.testing.assert_array_equal(f[row], SUN[trajectory, first + 1 : first + 3, mesh.numbers])

    spawn(run, ranks)


def test_a_rollout_trains_on_files_of_a_mesh(tmp_path):
    path = tmp_path / "u.npy"
    np.save(path, U[0])

    def run(comm):
        mesh = make_mesh(comm)
        samples = data.FieldDataset(path, mesh, dims="tic", targets=2)
        trainer = make_trainer(nn.Rollout(nn.GraphConv(2, 2), 2), comm, mesh, optimizer=optim.SGD(lr=0.1))
        return [trainer.step(*samples.read_samples(np.array([i, i + 1]))) for i in range(3)]

    np.testing.assert_allclose(spawn(run, 3)[0], spawn(run, 1)[0], rtol=1e-6)


def test_a_file_of_another_mesh_is_told(tmp_path):
    np.save(tmp_path / "u.npy", U[0, :, :5])
    with pytest.raises(DataError, match="5 along 'i', not 400"):
        spawn(lambda comm: data.FieldDataset(tmp_path / "u.npy", make_mesh(comm), dims="tic"), 2)
