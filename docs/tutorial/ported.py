"""The same training with fsdpx: `mpiexec -n 2 python ported.py`."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import fsdpx
from fsdpx import optim
from fsdpx.data import DataLoader

torch.manual_seed(0)
x = torch.randn(512, 32)
data = TensorDataset(x, (x @ torch.randn(32, 10)).argmax(1))

net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
trainer = fsdpx.distribute(
    net,
    loss=nn.CrossEntropyLoss(),
    optimizer=optim.AdamW(lr=1e-2),
    strategy="fsdp",
    clip_norm=1.0,
)
loader = DataLoader(data, 64, comm=trainer.data_group)

for epoch in range(3):
    for inputs, labels in loader:
        loss = trainer.step(inputs, labels)
    if fsdpx.rank() == 0:
        print(f"epoch {epoch}: loss {loss:.5f}")

trainer.save("net")
