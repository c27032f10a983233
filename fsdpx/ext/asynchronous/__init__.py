"""Strategies by which ranks do not make every step together. Each owns its verbs, programs, rows and pace."""

from fsdpx.optim.sgd import SGD
from fsdpx.core.state.sync_policy import NAMED, pace_of
from fsdpx.ext.asynchronous.local import Local
from fsdpx.ext.asynchronous.own_speed import Async, Gossip

__all__ = ["Async", "Gossip", "Local", "pace_of"]

NAMED.update({
    "async": Async(), "gossip": Gossip(), "local_sgd": Local(every=8, outer=SGD(lr=1.0)), "diloco": Local(),
})  # fmt: skip
