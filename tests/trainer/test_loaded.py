"""What a process has loaded that trains, saves and loads, and asks for nothing else."""

import subprocess
import sys

SCRIPT = """
import sys, tempfile
import numpy as np
import fsdpx
from fsdpx import nn, optim
model = nn.Chain(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
trainer = fsdpx.distribute(model, loss=nn.CrossEntropy(), optimizer=optim.AdamW(lr=1e-3))
x, y = np.zeros((4, 8), np.float32), np.zeros(4, np.int64)
for _ in range(10):
    trainer.step(x, y)
with tempfile.TemporaryDirectory() as folder:
    trainer.save(f"{folder}/saved")
    trainer.load(f"{folder}/saved")
before = {name for name in sys.modules if name.startswith(PARTS)}
trainer.report()
print(sorted(before), "fsdpx.ext.observe.report" in sys.modules)
"""
PARTS = "fsdpx.ext.observe", "fsdpx.ext.watch", "fsdpx.data", "fsdpx.models"


def test_observers_data_and_models_are_loaded_where_they_are_used() -> None:
    code = f"PARTS = {PARTS!r}\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[] True\n", done.stderr
