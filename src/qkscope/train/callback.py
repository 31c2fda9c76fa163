"""What the callbacks of all trainers share: when to measure, each step once, and the page at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from qkscope.errors import InputError
from qkscope.train.probe import Probe, ProbeOptions, ProbeSettings, training_continues

Every = int | Literal["evaluation", "save"]

FOLDER = "qkscope"  # in the folder that the trainer writes to
MEASUREMENTS = 20  # of a training run that is never evaluated: enough points for a trajectory, at a small cost
UNKNOWN_LENGTH = 500  # steps between measurements where the number of steps is unknown; Trainer's default for saving


class ProbeCallback:
    """A probe, called at the steps or events that the user asked for."""

    def __init__(self, documents: Any, every: Any, out: Path | str | None, options: ProbeOptions) -> None:
        super().__init__()
        ProbeSettings.of(options)  # refuses what is wrong, here
        is_number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if every is not None and not is_number and every not in ("evaluation", "save"):
            raise InputError(f"every should be a number of steps, 'evaluation' or 'save', not {every!r}")
        self._documents, self._out, self._options = documents, out, options
        self._stated: Every | None = every
        self._every: Every = every or "evaluation"  # chosen when the training begins
        self._strict = options.get("strict", False)
        self.probe: Probe | None = None  # while the model trains

    def _choose_every(self, steps: float, never: Mapping[str, str | None]) -> None:
        """Choose when to measure; `never` says why an event does not happen in this training, if it does not."""
        self._every = choose_every(self._stated, evaluates=never["evaluation"] is None, steps=steps)
        reason = never.get(str(self._every))
        if reason is not None:
            raise InputError(f"every={self._every!r}, but {reason}")

    def _is_due(self, step: int) -> bool:
        """Whether a step ends an interval."""
        return isinstance(self._every, int) and step % self._every == 0

    def _measured(self, step: int, tokens: int | None = None) -> dict[str, float]:
        """The scalars of a step; empty where it was measured just before."""
        return {} if self.probe is None or self.probe.last_step == step else self.probe(step, tokens)

    def _finish(self, step: int) -> None:
        """Bring the page up to date."""
        if self.probe is not None:
            with training_continues(step, strict=self._strict):
                self.probe.finish()
            self.probe = None


def choose_every(every: Every | None, *, evaluates: bool, steps: float) -> Every:
    """`every`, or by default at evaluation; a training run that is never evaluated is measured `MEASUREMENTS` times."""
    if every is not None:
        return every
    if evaluates:
        return "evaluation"
    return max(1, int(steps) // MEASUREMENTS) if 0 < steps < float("inf") else UNKNOWN_LENGTH
