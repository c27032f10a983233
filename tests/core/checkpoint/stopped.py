"""A job that trains until it is asked to stop: `mpiexec -n 3 python stopped.py FOLDER`. Tests go on from
there."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from fsdpx import CheckpointConfig, data, init, nn, optim
from fsdpx.core.comm import Communicator

READY, ROWS, SAMPLES = "ready.json", 12, 60
rng = np.random.default_rng(0)
X, Y = rng.standard_normal((SAMPLES, 6)).astype(np.float32), rng.integers(0, 3, SAMPLES)


def train(comm: Communicator, folder: Path | None, steps: int, pause: float = 0.0) -> str:
    """To so many steps, from the newest checkpoint of `folder` on: the fingerprint. One file says that it has begun."""
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    trainer = model.as_distributed(
        loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=0.01), comm=comm, reproducible_chunks=12
    )
    pids = comm.all_gather_object(os.getpid())

    def observe(action: object) -> None:
        time.sleep(pause)
        if trainer.global_step == 7 and comm.rank == 0 and folder is not None and not (folder / READY).exists():
            (folder / "unseen").write_text(json.dumps(pids))
            (folder / "unseen").rename(folder / READY)

    if pause:
        trainer.inspect.engine.add_observer(observe)
    dataset = data.ArrayDataset(X, Y)
    loader = data.DataLoader(dataset, ROWS, comm=trainer.data_group, shuffle=True, seed=1, reproducible_chunks=12)
    kept = None if folder is None else CheckpointConfig(folder / "run", every=10**6)
    trainer.fit(loader, epochs=10**6, steps=steps, progress=False, checkpoints=kept)
    return trainer.inspect.compute_fingerprint()


if __name__ == "__main__":
    train(init(), Path(sys.argv[1]), steps=10**6, pause=1e-4)
