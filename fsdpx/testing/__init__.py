"""Base classes (contracts) for tests of custom codecs, communicators, layers, losses, optimizers and schedules. The
package also provides an array comparison that reports the worst element, fault injection, and virtual time for ranks
that run as threads at different speeds."""

from typing import TYPE_CHECKING

from fsdpx.core.base.lazy_names import make_lazy_attributes

if TYPE_CHECKING:
    from fsdpx.testing.codec import CodecContract as CodecContract
    from fsdpx.testing.communicator import CommunicatorContract as CommunicatorContract
    from fsdpx.testing.compare import assert_close as assert_close, find_difference as find_difference
    from fsdpx.testing.layer import LayerContract as LayerContract, LossContract as LossContract
    from fsdpx.testing.optimizer import OptimizerContract as OptimizerContract
    from fsdpx.testing.schedule import ScheduleContract as ScheduleContract
    from fsdpx.testing.virtual_time import VirtualTime as VirtualTime
else:
    __getattr__, __dir__, __all__ = make_lazy_attributes(__name__)
