"""Local training: each replica trains by itself for some steps, then all come together by an outer step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdpx.codecs import Codec
from fsdpx.codecs import codec as codec_of
from fsdpx.config import PRESETS, Sharding, python_fields
from fsdpx.errors import ConfigError
from fsdpx.optim.optimizer import Kept, kept_of
from fsdpx.optim.sgd import SGD

__all__ = ["LOCAL", "Local", "local_of"]


@dataclass(frozen=True)
class Local:
    """Local SGD (Stich 2019) and DiLoCo (Douillard et al. 2023), streamed in fragments (Douillard et al. 2025).

    Every `every` steps each replica finds its outer gradient: the outer parameters, where the round began, minus its
    own. Their mean, weighed by what each replica trained on, is the gradient of one step of `outer` on the outer
    parameters, from which all replicas go on. Bytes per rank and round: 2 P (R - 1) / R of P bytes of parameters on R
    replicas, what plain data parallelism sends in every step.

    Parameters
    ----------
    every : steps of a round, 1 or more
    outer : makes the outer step: `optim.SGD(lr=1.0)` takes the mean of all replicas; its state is cut over them
    fragments : parts of the model that travel at different times of the round
    delay : steps that a fragment may be under way while training goes on, below `every`: its outer gradient for the
        first half of them, the new parameters for the rest
    mix : share of a replica's own parameters in those from which it goes on, in [0, 1)
    codec : how outer gradients travel, as in `fsdpx.distribute`
    within : what the ranks of one replica do, a strategy (default: "ddp", or "fsdp" where the mesh cuts a replica)
    """

    every: int = 50
    outer: Any = field(default_factory=lambda: SGD(lr=0.7, momentum=0.9, nesterov=True))
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    codec: str | Codec | None = None
    within: str | Sharding | None = None

    def __post_init__(self) -> None:
        python_fields(self)
        self._whole("every", 1, None, "a number of steps, 1 or more")
        self._whole("fragments", 1, self.every, f"a number from 1 to the steps of a round, every={self.every}")
        self._whole("delay", 0, self.every - 1, f"a number of steps below those of a round, every={self.every}")
        if not isinstance(self.mix, int | float) or isinstance(self.mix, bool) or not 0 <= self.mix < 1:
            raise ConfigError(f"Local(mix={self.mix!r}): a number in [0, 1) is needed")
        if isinstance(self.outer, type) or not all(hasattr(self.outer, name) for name in ("update", "slots", "lr")):
            raise ConfigError(f"Local(outer={self.outer!r}): an optimiser is needed, such as optim.SGD(lr=1.0)")
        if any(form != Kept() for form in kept_of(self.outer).values()):
            raise ConfigError(f"Local(outer={self.outer!r}): its state must be as large as the parameters, as SGD's is")
        self.carried.check("float32")
        named = isinstance(self.within, str) and self.within in PRESETS
        if not (named or self.within is None or isinstance(self.within, Sharding)):
            raise ConfigError(f"Local(within={self.within!r}): what the ranks of one replica do, such as 'fsdp'")

    @property
    def words(self) -> str:
        """All options but the optimiser and the codec, as text."""
        return f"every={self.every}, fragments={self.fragments}, delay={self.delay}, mix={self.mix}"

    @property
    def carried(self) -> Codec:
        """The codec of outer gradients."""
        return codec_of(self.codec, "float32", "float32")

    def _whole(self, name: str, least: int, most: int | None, wanted: str) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < least or (most is not None and value > most):
            raise ConfigError(f"Local({name}={value!r}): {wanted}")


LOCAL: dict[str, Local] = {}
"""By the names of strategies."""
LOCAL |= {"local_sgd": Local(every=8, outer=SGD(lr=1.0)), "diloco": Local()}


def local_of(strategy: Any) -> Local | None:
    """The `Local` that a strategy is or names; None for other strategies."""
    return LOCAL.get(strategy) if isinstance(strategy, str) else strategy if isinstance(strategy, Local) else None
