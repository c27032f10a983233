"""Strategies by which ranks do not make every step together. Each owns its verbs, programs, rows and pace."""

from fsdpx.optim.sgd import SGD
from fsdpx.ext.asynchronous import exclusions as exclusions
from fsdpx.ext.asynchronous.local import Local
from fsdpx.ext.asynchronous.own_speed import Async, Gossip

__all__ = ["Async", "Gossip", "Local", "local_sgd"]


def local_sgd() -> Local:
    """Replicas that train by themselves for 8 steps and take the mean of all."""
    return Local(every=8, outer=SGD(lr=1.0))
