"""A user's program that type checkers must accept, with the types that they must find."""

from pathlib import Path
from typing import assert_type

import numpy as np

import fsdpx
from fsdpx import data, nn, optim
from fsdpx.plan import Plan

x, y = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
assert_type(model, nn.Sequential)

trainer = model.as_distributed(
    loss=nn.CrossEntropyLoss(),
    optimizer=optim.AdamW(lr=optim.schedules.Cosine(1e-3, steps=100), groups=optim.no_decay),
    strategy="hybrid",
    mesh=fsdpx.Mesh(replica=2, shard=2),
    precision="bf16",
    compression={"head.*": "int8", "*": fsdpx.Int8(unbiased=True)},
    schedule="zb-h1",
    recompute="all",
    average=fsdpx.EMA(0.999),
    device="cuda",
    group_bytes="1MiB",
    trace="runs/trace",
)
assert_type(trainer, fsdpx.Trainer)
assert_type(fsdpx.distribute(model, optimizer=optim.SGD(lr=0.1), loss=nn.MSELoss()), fsdpx.Trainer)
for optimizer in (optim.Adam(), optim.LAMB(), optim.Lion(), optim.Muon()):
    fsdpx.distribute(model, loss=nn.MSELoss(), optimizer=optimizer)
fsdpx.distribute(model, strategy=fsdpx.LocalSGD(sync_every=8), schedule=Path("my_schedule.txt"))
fsdpx.distribute(
    model,
    strategy=fsdpx.Sharding(full_params="step"),
    precision=fsdpx.Precision("bf16", master="bf16"),
    elastic=fsdpx.ElasticConfig(copies=2),
    offload=fsdpx.OffloadConfig("/local/disk", what="optimizer"),
    runtime=fsdpx.RuntimeOptions(backend="gloo"),
)
fsdpx.distribute(model, strategy="auto", batch=(x, y), memory="16GiB", machine="a100-dgx-200g")

assert_type(trainer.step(x, y), float)
assert_type(trainer.accumulate(x, y), float)
assert_type(trainer.update(), float)
assert_type(trainer.evaluate(x, y, weights="average"), float)
assert_type(trainer.predict(x), np.ndarray)
assert_type(trainer.backward(trainer.forward(x)), np.ndarray)
assert_type(trainer.parameters(), dict[str, np.ndarray])
assert_type(trainer.gradients(), dict[str, np.ndarray])
assert_type(trainer.generate([1, 2, 3], 16, top_k=40), np.ndarray)
assert_type(trainer.generate([[1, 2, 3], [4, 5]], temperature=0.7), list[np.ndarray])
assert_type(trainer.global_step, int)
with trainer.no_sync():
    trainer.accumulate(x, y)
trainer.save("run/step-1", dtype="bf16", background=True)
trainer.load("run/step-1")

loader = data.DataLoader(data.ArrayDataset(x, y), 8, comm=trainer.data_group, shuffle=True)
history = trainer.fit(
    loader,
    epochs=2,
    validation=loader,
    metrics={"error": nn.MSELoss()},
    checkpoints=fsdpx.CheckpointConfig("run", every=100, dtype="float32"),
)
assert_type(history.best_loss, float)
assert_type(fsdpx.latest_checkpoint("run"), Path | None)

plan = fsdpx.plan(model, batch=(((8, 4), "float32"), ((8,), "int64")), ranks=8, machine="a100-dgx-200g")
assert_type(plan, Plan)
assert_type(fsdpx.plan.predict(model, (), ranks=8, machine="a100-dgx-200g").seconds, float)
