"""A model and a loss of PyTorch, as type checkers must see them."""

from typing import assert_type

import torch

import fsdpx
from fsdpx import optim

module = torch.nn.Linear(4, 4)
trainer = fsdpx.distribute(module, loss=torch.nn.MSELoss(), optimizer=optim.SGD(lr=0.1))
assert_type(trainer, fsdpx.Trainer)
fsdpx.distribute(module, loss=torch.zeros(3))  # error: Tensor
fsdpx.distribute(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))  # error: SGD
