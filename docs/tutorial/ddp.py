"""A script for torchrun: DDP of PyTorch over Gloo."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(512, 32)
data = TensorDataset(x, (x @ torch.randn(32, 10)).argmax(1))

net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)

for epoch in range(3):
    for inputs, labels in loader:
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.5f}")

if dist.get_rank() == 0:
    torch.save(net.state_dict(), "net.pt")
dist.destroy_process_group()
