"""Asynchronous training strategies, in which ranks do not synchronize in every step: local SGD, DiLoCo, asynchronous
SGD and gossip."""

from fsdpx.optim.sgd import SGD
from fsdpx.ext.asynchronous import exclusions as exclusions
from fsdpx.ext.asynchronous.local import LocalSGD
from fsdpx.ext.asynchronous.asynchronous_sgd import AsyncSGD, GossipSGD

__all__ = ["AsyncSGD", "GossipSGD", "LocalSGD", "make_local_sgd"]


def make_local_sgd() -> LocalSGD:
    """Return the default local SGD strategy, in which all replicas average their parameters every 8 steps."""
    return LocalSGD(sync_every=8, outer_optimizer=SGD(lr=1.0))
