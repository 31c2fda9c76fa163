"""`LightningHeadsCallback` for Lightning, of either name of its package: `Trainer(callbacks=[...])`.

Validation runs in inference mode there by default; the measurement leaves it for the while. Scalars go to every logger
of the trainer, at its global step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from qkscope.errors import InputError
from qkscope.train.probe import Probe, ProbeOptions, ProbeSettings
from qkscope.train.schedule import Every, choose_every, is_due, require_every, training_continues

if TYPE_CHECKING:
    from torch import nn

FOLDER = "qkscope"  # in the trainer's default_root_dir


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


class LightningHeadsCallback(_callback_class()):  # type: ignore[misc]
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
        super().__init__()
        ProbeSettings.of(options)
        self._documents, self._name, self._stated = documents, model, require_every(every)
        self._every: Every = self._stated or "evaluation"  # chosen when the training begins
        self._out, self._strict, self._options = out, options.get("strict", False), options
        self.probe: Probe | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Read the documents, and measure where the training begins."""
        self._every = choose_every(
            self._stated, evaluates=bool(trainer.enable_validation), steps=trainer.estimated_stepping_batches
        )
        self._require_events(trainer)
        out = self._out or Path(trainer.default_root_dir) / FOLDER
        self.probe = Probe(self._find(pl_module), self._documents, out, **self._options)
        self._measure(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Every so many optimizer steps."""
        if is_due(self._every, trainer.global_step):
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
        if self.probe is not None:
            with training_continues(trainer.global_step, strict=self._strict):
                self.probe.finish()
            self.probe = None

    def _measure(self, trainer: Any) -> None:
        step = trainer.global_step
        if self.probe is None or self.probe.last_step == step:
            return
        with trainer.precision_plugin.forward_context():
            scalars = self.probe(step)
        if scalars and trainer.is_global_zero:
            with training_continues(step, strict=self._strict):
                for logger in trainer.loggers:
                    logger.log_metrics(scalars, step=step)

    def _require_events(self, trainer: Any) -> None:
        """Refuse to wait for something that never happens."""
        never = {
            "evaluation": (not trainer.enable_validation, "nothing is validated"),
            "save": (not trainer.checkpoint_callbacks, "no checkpoint is saved"),
        }
        happens_not, why = never.get(str(self._every), (False, ""))
        if happens_not:
            raise InputError(f"every={self._every!r}, but {why} in this training; give a number of steps")

    def _find(self, pl_module: Any) -> nn.Module:
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
