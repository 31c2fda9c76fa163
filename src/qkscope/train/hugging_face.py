"""`HeadsCallback` for Hugging Face's Trainer: one line, `trainer.add_callback(HeadsCallback(documents, trainer))`.

The trainer is needed to log: what a callback puts into `logs` in `on_log` comes after the reporters have read them.
Scalars are logged by `Trainer.log` itself: trainers that override it (TRL's) average and clear their own metrics at
each call, and the training's own numbers must not change. The trainer's own log at the same step still happens.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from qkscope.errors import InputError, QkscopeWarning
from qkscope.train.callback import FOLDER, Every, ProbeCallback
from qkscope.train.folder import PREFIX
from qkscope.train.probe import Probe, ProbeOptions, training_continues

if TYPE_CHECKING:
    import torch

CONSOLE = ("r_q_mean", "r_q_mean_se", "r_k_mean", "r_k_mean_se", "share/position-dominated", "cost_share")


class HeadsCallback(ProbeCallback, TrainerCallback):  # type: ignore[misc]  # transformers is not typed
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
        super().__init__(documents, every, out, options)
        self._trainer = trainer
        self._counts_tokens = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the documents, and measure where the training begins."""
        if kwargs.get("model") is None:
            raise InputError("the trainer has no model")
        names = {"evaluation": "eval_strategy", "save": "save_strategy"}
        advice = "set it, or give a number of steps"
        never = {
            event: f"{name} is 'no'; {advice}" if _strategy(args, name) == "no" else None
            for event, name in names.items()
        }
        self._choose_every(state.max_steps, never)
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
        documents = self._eval_set() if self._documents is None else self._documents
        self.probe = Probe(kwargs["model"], documents, self._out or Path(args.output_dir) / FOLDER, **options)
        self._measure(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every so many steps, and the last."""
        if self._is_due(state.global_step) or control.should_training_stop:
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
        self._finish(state.global_step)

    def _measure(self, state: Any, control: Any) -> None:
        tokens = int(state.num_input_tokens_seen) if self._counts_tokens else None
        scalars = self._measured(state.global_step, tokens)
        if scalars and state.is_world_process_zero and self._trainer is not None:
            with training_continues(state.global_step, strict=self._strict):
                self._log(self._trainer, {f"eval_{name}": value for name, value in scalars.items()}, state, control)

    def _log(self, trainer: Trainer, scalars: dict[str, float], state: Any, control: Any) -> None:
        """Log once: a resumed training has the lines of its checkpoint's own step already."""
        here = [line for line in state.log_history if line.get("step") == state.global_step]
        if any(name in line for line in here for name in scalars):
            return
        to_log = control.should_log  # logging clears it, and the training's own line would not come
        callbacks = trainer.callback_handler.callbacks
        printing = [each for each in callbacks if isinstance(each, PrinterCallback | ProgressCallback)]
        trainer.callback_handler.callbacks = [each for each in callbacks if each not in printing]
        try:
            Trainer.log(trainer, scalars)  # trackers get every scalar
        finally:
            trainer.callback_handler.callbacks = callbacks
        names = [f"eval_{PREFIX}{name}" for name in CONSOLE]
        line = {name: round(scalars[name], 4) for name in names if name in scalars}
        for each in printing:  # the console gets one short line
            each.on_log(trainer.args, state, control, logs=line)
        control.should_log = to_log

    def _eval_set(self) -> Any:
        dataset = getattr(self._trainer, "eval_dataset", None)
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()), None)
        if dataset is None:
            raise InputError("no documents were given, and the trainer has no eval_dataset to take them from")
        return dataset

    def _expected(self, args: Any, state: Any) -> int | None:
        """How many steps will be measured, where that is known."""
        interval: Any = self._every
        if isinstance(interval, str):
            kind = "eval" if interval == "evaluation" else "save"
            interval = getattr(args, f"{kind}_steps") if _strategy(args, f"{kind}_strategy") == "steps" else None
        return state.max_steps // int(interval) + 2 if interval and interval >= 1 else None


def _strategy(args: Any, name: str) -> str:
    """`no`, `steps` or `epoch`."""
    return str(getattr(args, name)).rpartition(".")[2].lower()


def _autocast(args: Any) -> torch.dtype | None:
    """The precision that accelerate casts a mixed-precision training's forward pass to."""
    import torch

    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
