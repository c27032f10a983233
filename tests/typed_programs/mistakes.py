"""Mistakes of users: each marked line is an error, in which both type checkers say the word beside it."""

import numpy as np

import fsdpx
from fsdpx import data, nn, optim

x, y = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
loss, optimizer = nn.CrossEntropyLoss(), optim.AdamW(lr=1e-3)
trainer = model.as_distributed(loss=loss, optimizer=optimizer)


def train(comm: fsdpx.Communicator, steps: int) -> int:
    return comm.rank + steps


def without_ranks() -> None: ...


model.as_distributed(loss=loss, optimiser=optimizer)  # error: optimiser
fsdpx.distribute(model, loss=loss, optimiser=optimizer)  # error: optimiser
fsdpx.distribute(model, strategy="fsdpp")  # error: fsdpp
model.as_distributed(strategy="fsdpp")  # error: fsdpp
fsdpx.distribute(model, schedule="1f1bb")  # error: 1f1bb
fsdpx.distribute(model, precision="fp8")  # error: fp8
fsdpx.distribute(model, sequence="rings")  # error: rings
fsdpx.distribute(model, compression="int4")  # error: int4
fsdpx.distribute(model, loss=nn.Linear(2, 2))  # error: Linear
fsdpx.distribute(model, loss=nn.MSELoss)  # error: MSELoss
fsdpx.distribute(model, optimizer=optim.AdamW)  # error: AdamW
fsdpx.distribute(model, optimizer=1e-3)  # error: float
fsdpx.distribute(model, mesh=4)  # error: Mesh
fsdpx.distribute(model, microbatches="4")  # error: int
fsdpx.distribute(model, device="gpu")  # error: gpu
fsdpx.distribute(model, devise="cuda")  # error: devise
fsdpx.distribute(model, tune=3)  # error: bool
fsdpx.distribute(x)  # error: Layer
fsdpx.distribute()  # error: model
fsdpx.distribute(model, loss, optimizer)  # error: positional
fsdpx.RuntimeOptions(backend="openmpi")  # error: openmpi
fsdpx.RuntimeOptions(groupbytes="1MiB")  # error: groupbytes
fsdpx.Precision("fp8")  # error: fp8
fsdpx.Sharding(full_params="layer")  # error: layer
fsdpx.init(backend="openmpi")  # error: openmpi
fsdpx.Mesh(tensors=2)  # error: tensors
fsdpx.CheckpointConfig("run", evry=10)  # error: evry

trainer.stepp(x, y)  # error: stepp
trainer.step(x)  # error: y
length: str = trainer.step(x, y)  # error: float
number: float = trainer.predict(x)  # error: ndarray
trainer.predict(x, weight="average")  # error: weight
trainer.evaluate(x, y, weights="mean")  # error: mean
trainer.fit([], epoch=3)  # error: epoch
trainer.fit([], epochs="3")  # error: int
trainer.save("run", dtype="int8")  # error: int8
trainer.generate([1, 2], max_tokens=3)  # error: overload

fsdpx.spawn(train, 4)  # error: int
fsdpx.spawn(train, 4, "ten")  # error: int
fsdpx.spawn(train, 4, 10, timeuot=3.0)  # error: timeuot
fsdpx.spawn(without_ranks, 4)  # error: spawn
fsdpx.spawn(4, train)  # error: spawn
ranks: list[str] = fsdpx.spawn(train, 4, 10)  # error: int
fsdpx.launch(train, 10, rank=4)  # error: launch
fsdpx.all_reduce(x, operation="max")  # error: overload
fsdpx.Grid(trainer.data_group, (4, 4), ghost=1)  # error: ghost
data.DataLoader(data.ArrayDataset(x, y), 8, shufle=True)  # error: shufle
data.DataLoader(8)  # error: Dataset
optim.AdamW(learning_rate=1e-3)  # error: learning_rate
nn.Linear(4)  # error: out_features
nn.Linears(4, 4)  # error: Linears
fsdpx.plan(model, batch=(), rank=4)  # error: machine
fsdpx.plan.predict(model, (), ranks=4, machine="any", strategy="fsdpp")  # error: fsdpp
