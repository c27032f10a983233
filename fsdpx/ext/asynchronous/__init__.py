"""Strategies in which ranks do not step together. Each strategy adds its verbs, programs, ledger rows and
`SyncPolicy`."""

from fsdpx.optim.sgd import SGD
from fsdpx.ext.asynchronous import exclusions as exclusions
from fsdpx.ext.asynchronous.local import LocalSGD
from fsdpx.ext.asynchronous.own_speed import AsyncSGD, GossipSGD

__all__ = ["AsyncSGD", "GossipSGD", "LocalSGD", "make_local_sgd"]


def make_local_sgd() -> LocalSGD:
    """Return local SGD with rounds of 8 steps, after which all replicas average their parameters."""
    return LocalSGD(sync_every=8, outer_optimizer=SGD(lr=1.0))
