"""When `fit` saves, where it goes on, and how it comes back to the best weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdpx.errors import CheckpointError
from fsdpx.trainer.progress import say
from fsdpx.trainer.series import Checkpoints, History

__all__ = ["Saves"]


class Saves:
    """first: the epoch in which the run began. finished: why an earlier run ended, "" if there is none or it did not.

    best: keep the weights of the best validation: as a checkpoint that stays, or, where there are no checkpoints, as a
    copy of this rank's part in memory."""

    def __init__(
        self, trainer: Any, loader: Any, checkpoints: Checkpoints | None, history: History, best: bool
    ) -> None:
        self.trainer, self.loader, self.checkpoints, self.history, self.best = (
            trainer, loader, checkpoints, history, best
        )  # fmt: skip
        begun = None if checkpoints is None else checkpoints.begin(trainer.host, loader, history)
        self.first, self.finished = getattr(loader, "epoch", 0), ""
        self._written: Mapping[str, Any] | None = None
        self._memory: tuple[int, Callable[[], None]] | None = None
        if begun is not None:
            self.first, self.finished, self._written = begun.first, begun.finished, begun.fit

    def say_begun(self) -> None:
        """Where the run goes on, and which settings have changed."""
        path, history = self.history.checkpoint, self.history
        if self._written is None:
            return
        say(self.trainer.host, f"goes on from {path}: step {history.steps}, epoch {self.loader.epoch - self.first + 1}")
        if changed := _changed(self._written.get("settings", {}), self._settings()):
            say(self.trainer.host, f"changed since {path}: {'; '.join(changed)}")

    def step(self, better: bool = False) -> bool:
        """After a step: save if it is time, or if it is better than all before. Whether it was saved."""
        if better and self.best and self.checkpoints is None:
            self._memory = (self.history.steps, self.trainer.host.remember(self.trainer))
        if self.checkpoints is None or (self._written or {}).get("done") == self.history.steps:
            return False
        if self.history.steps % self.checkpoints.every and not (better and self.best):
            return False
        self._save(self._state(), self.checkpoints.background)
        return True

    def last(self, ended: str = "") -> bool:
        """The run stops here: save what is not yet saved, and wait until all is whole. ended: why, if for good."""
        if self.checkpoints is None:
            return False
        state = self._state() | {"finished": ended}
        new = state != self._written
        if new:
            self._save(state, background=False)
        try:
            self.trainer.host.wait_saved()
        except CheckpointError:
            self._save(state, background=False)  # raises again, unless the cause is gone
        return new

    def restore(self) -> None:
        """End with the weights of the best validation. Collective."""
        step = self.history.best_step
        if not self.best or step is None or step == self.history.steps:
            return
        what = f"step {step}, the best (validation loss {self.history.best:.4f})"
        if self.checkpoints is None:
            if self._memory is not None and self._memory[0] == step:
                self._memory[1]()
                say(self.trainer.host, f"the weights are those of {what}")
            return
        path = self.checkpoints.path(step)
        if not self.trainer.host.alone(f"look for {path}", path.exists):
            say(self.trainer.host, f"{path} is not there, so the weights are the last ones and not those of {what}")
            return
        self.trainer.load_weights(path, convert=self.checkpoints.dtype is not None)
        say(self.trainer.host, f"the weights are those of {what}: {path}")

    def _state(self) -> dict[str, Any]:
        """The state that a later start needs."""
        history = self.history
        pairs = {name: [list(pair) for pair in values] for name, values in history.metrics.items()}
        return {
            "done": history.steps,
            "first": self.first,
            "validation": [list(pair) for pair in history.validation],
            "metrics": pairs,
            "settings": self._settings(),
            "finished": "",
        }

    def _settings(self) -> dict[str, str]:
        size = getattr(self.loader, "batch_size", None)
        return self.trainer.inspect.settings() | ({} if size is None else {"batch size": str(size)})

    def _save(self, state: Mapping[str, Any], background: bool) -> None:
        assert self.checkpoints is not None
        step = self.history.best_step if self.best else None
        best = None if step is None else self.checkpoints.path(step)
        self.history.checkpoint = self.checkpoints.save(self.trainer.host, self.loader, state, background, best)
        self._written = state


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The settings that are known in both and differ."""
    return [f"{name} {before[name]} -> {text}" for name, text in now.items() if before.get(name, text) != text]
