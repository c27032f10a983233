"""Strategies by which ranks do not make every step together. Each owns its verbs, programs, rows and pace."""

from fsdpx.optim.sgd import SGD
from fsdpx.ext.asynchronous import exclusions as exclusions
from fsdpx.ext.asynchronous.local import LocalSGD
from fsdpx.ext.asynchronous.own_speed import AsyncSGD, GossipSGD

__all__ = ["AsyncSGD", "GossipSGD", "LocalSGD", "make_local_sgd"]


def make_local_sgd() -> LocalSGD:
    """Replicas that train by themselves for 8 steps and take the mean of all."""
    return LocalSGD(sync_every=8, outer_optimizer=SGD(lr=1.0))
