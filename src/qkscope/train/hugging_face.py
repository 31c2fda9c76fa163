"""`HeadsCallback` for Hugging Face's Trainer: one line, `trainer.add_callback(HeadsCallback(documents, trainer))`.

The trainer is needed to log: what a callback puts into `logs` in `on_log` comes after the reporters have read them.
Scalars are logged by `Trainer.log` itself: trainers that override it (TRL's) average and clear their own metrics at
each call, and the training's own numbers must not change. The trainer's own log at the same step still happens.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from qkscope.errors import InputError, QkscopeWarning
from qkscope.train.probe import Probe, ProbeOptions, ProbeSettings
from qkscope.train.scalars import PREFIX
from qkscope.train.schedule import Every, choose_every, is_due, require_every, training_continues

if TYPE_CHECKING:
    import torch

FOLDER = "qkscope"  # in the trainer's output_dir
CONSOLE = ("r_q_mean", "r_q_mean_se", "r_k_mean", "r_k_mean_se", "share/position-dominated", "cost_share")


class HeadsCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Measure the heads of the model that is trained: every so many steps, at evaluation, or when it is saved.

    By default at evaluation, or about twenty times in a training run without evaluation; the first and the last step
    are measured, too. Without `documents` the first rows of the trainer's eval set are used. A model that can never be
    measured is refused when the training begins; what fails later, or for want of disk space, is a warning, and the
    training continues (`strict=True` raises it). All other options are those of `Probe`.
    """

    def __init__(
        self,
        documents: Any = None,
        trainer: Trainer | None = None,
        *,
        every: Every | None = None,
        out: Path | str | None = None,
        **options: Unpack[ProbeOptions],
    ) -> None:
        if isinstance(documents, Trainer):
            raise InputError("the documents come first: HeadsCallback(documents, trainer)")
        if documents is None and trainer is None:
            raise InputError("give documents, or the trainer whose eval set they are to be taken from")
        ProbeSettings.of(options)  # refuses what is wrong, here
        self._documents, self._trainer, self._stated = documents, trainer, require_every(every)
        self._every: Every = self._stated or "evaluation"  # chosen when the training begins
        self._out, self._strict, self._options = out, options.get("strict", False), options
        self._counts_tokens = False
        self.probe: Probe | None = None  # while the model trains

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the documents, and measure where the training begins."""
        if kwargs.get("model") is None:
            raise InputError("the trainer has no model")
        self._every = choose_every(self._stated, evaluates=_happens(args, "eval_strategy"), steps=state.max_steps)
        self._require_events(args)
        self._counts_tokens = args.include_num_input_tokens_seen not in (False, "no")
        if self._trainer is None:
            warnings.warn(
                "HeadsCallback writes tables and page, but logs nothing: it was not given the trainer; use "
                "trainer.add_callback(HeadsCallback(documents, trainer))",
                QkscopeWarning,
                stacklevel=2,
            )
        options: ProbeOptions = {
            "tokenizer": kwargs.get("processing_class"),
            "autocast": _autocast(args),
            "expected": self._expected(args, state),
            **self._options,
        }
        out = self._out or Path(args.output_dir) / FOLDER
        self.probe = Probe(kwargs["model"], self._chosen_documents(), out, **options)
        self._measure(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every so many steps, and the last."""
        if is_due(self._every, state.global_step) or control.should_training_stop:
            self._measure(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """At evaluation."""
        if self._every == "evaluation":
            self._measure(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """When a checkpoint is saved."""
        if self._every == "save":
            self._measure(state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bring the page up to date. The model is not measured: it may be the best one now, and not the last."""
        if self.probe is not None:
            with training_continues(state.global_step, strict=self._strict):
                self.probe.finish()
            self.probe = None

    def _measure(self, state: Any, control: Any) -> None:
        if self.probe is None or self.probe.last_step == state.global_step:
            return
        scalars = self.probe(state.global_step, self._tokens(state))
        if scalars and state.is_world_process_zero and self._trainer is not None:
            with training_continues(state.global_step, strict=self._strict):
                self._log({f"eval_{name}": value for name, value in scalars.items()}, state, control)

    def _tokens(self, state: Any) -> int | None:
        """What the model was trained on so far, where the trainer counts it (`include_num_input_tokens_seen`)."""
        return int(state.num_input_tokens_seen) if self._counts_tokens else None

    def _log(self, scalars: dict[str, float], state: Any, control: Any) -> None:
        """Log once: a resumed training has the lines of its checkpoint's own step already."""
        here = [line for line in state.log_history if line.get("step") == state.global_step]
        if any(name in line for line in here for name in scalars):
            return
        to_log = control.should_log  # logging clears it, and the training's own line would not come
        handler = self._trainer.callback_handler  # type: ignore[union-attr]  # only called with a trainer
        callbacks = handler.callbacks
        printing = [each for each in callbacks if isinstance(each, PrinterCallback | ProgressCallback)]
        handler.callbacks = [each for each in callbacks if each not in printing]  # trackers get every scalar
        try:
            Trainer.log(self._trainer, scalars)
        finally:
            handler.callbacks = callbacks
        for each in printing:  # the console gets one short line
            each.on_log(self._trainer.args, state, control, logs=_for_console(scalars))  # type: ignore[union-attr]
        control.should_log = to_log

    def _require_events(self, args: Any) -> None:
        """Refuse to wait for something that never happens."""
        strategy = {"evaluation": "eval_strategy", "save": "save_strategy"}.get(str(self._every))
        if strategy is not None and not _happens(args, strategy):
            raise InputError(f"every={self._every!r}, but {strategy} is 'no'; set it, or give a number of steps")

    def _chosen_documents(self) -> Any:
        if self._documents is not None:
            return self._documents
        held_out = getattr(self._trainer, "eval_dataset", None)
        if isinstance(held_out, dict):
            held_out = next(iter(held_out.values()), None)
        if held_out is None:
            raise InputError("no documents were given, and the trainer has no eval_dataset to take them from")
        return held_out

    def _expected(self, args: Any, state: Any) -> int | None:
        """How many steps will be measured, where that can be told."""
        names = {"evaluation": ("eval_strategy", "eval_steps"), "save": ("save_strategy", "save_steps")}
        interval: Any = self._every
        if isinstance(interval, str):
            strategy, steps = (getattr(args, name) for name in names[interval])
            interval = steps if str(strategy).rpartition(".")[2].lower() == "steps" else None
        return state.max_steps // int(interval) + 2 if interval and interval >= 1 else None


def _happens(args: Any, strategy: str) -> bool:
    """Whether a trainer ever evaluates, or saves."""
    return str(getattr(args, strategy)).rpartition(".")[2].lower() != "no"


def _for_console(scalars: Mapping[str, float]) -> dict[str, float]:
    """The scalars a person reads while a model trains, rounded."""
    names = (f"eval_{PREFIX}{name}" for name in CONSOLE)
    return {name: round(scalars[name], 4) for name in names if name in scalars}


def _autocast(args: Any) -> torch.dtype | None:
    """The precision that accelerate casts a mixed-precision training's forward pass to."""
    import torch

    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
