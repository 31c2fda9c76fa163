"""`LightningHeadsCallback` for Lightning, of either name of its package: `Trainer(callbacks=[...])`.

Validation runs in inference mode there by default; the measurement leaves it for the duration. Scalars go to every
logger of the trainer, at its global step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from qkscope.errors import InputError
from qkscope.train.callback import FOLDER, Every, ProbeCallback
from qkscope.train.probe import Probe, ProbeOptions, training_continues

if TYPE_CHECKING:
    from torch import nn


def _callback_class() -> Any:
    """The base class of the package that a script uses: both can be installed."""
    from importlib import import_module

    places = ("lightning.pytorch", "pytorch_lightning")
    for place in sorted(places, key=lambda each: each not in sys.modules):
        try:
            return import_module(place).Callback
        except ImportError:
            continue
    raise InputError("Lightning is not installed: pip install 'qkscope[lightning]'")


class LightningHeadsCallback(ProbeCallback, _callback_class()):  # type: ignore[misc]
    """Measure the heads of the transformers model in a LightningModule, as `HeadsCallback` does.

    `model` is the attribute that holds it; by default the first transformers model in the module is taken.
    """

    def __init__(
        self,
        documents: Any,
        *,
        model: str | None = None,
        every: Every | None = None,
        out: Path | str | None = None,
        **options: Unpack[ProbeOptions],
    ) -> None:
        super().__init__(documents, every, out, options)
        self._name = model

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Read the documents, and measure where the training begins."""
        advice = "in this training; give a number of steps"
        never = {
            "evaluation": None if trainer.enable_validation else f"nothing is validated {advice}",
            "save": None if trainer.checkpoint_callbacks else f"no checkpoint is saved {advice}",
        }
        self._choose_every(trainer.estimated_stepping_batches, never)
        out = self._out or Path(trainer.default_root_dir) / FOLDER
        self.probe = Probe(self._find(pl_module), self._documents, out, **self._options)
        self._measure(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Every so many optimizer steps."""
        if self._is_due(trainer.global_step):
            self._measure(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """At evaluation; not at the check of the first batches before a training."""
        if self._every == "evaluation" and not trainer.sanity_checking:
            self._measure(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """When a checkpoint is saved."""
        if self._every == "save":
            self._measure(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure the last step, and bring the page up to date."""
        self._measure(trainer)
        self._finish(trainer.global_step)

    def _measure(self, trainer: Any) -> None:
        step = trainer.global_step
        with trainer.precision_plugin.forward_context():
            scalars = self._measured(step)
        if scalars and trainer.is_global_zero:
            with training_continues(step, strict=self._strict):
                for logger in trainer.loggers:
                    logger.log_metrics(scalars, step=step)

    def _find(self, pl_module: Any) -> nn.Module:
        """The model to measure."""
        if self._name is not None:
            named: nn.Module | None = getattr(pl_module, self._name, None)
            if named is None:
                raise InputError(f"{type(pl_module).__name__} has no attribute {self._name!r}")
            return named
        for module in pl_module.modules():
            if hasattr(module, "get_decoder") and hasattr(module, "config"):
                inner: nn.Module = module
                return inner
        raise InputError(
            f"{type(pl_module).__name__} holds no transformers model; its attention can be measured with a hook: see "
            "`qkscope docs training`"
        )
