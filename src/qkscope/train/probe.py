"""`Probe`: fixed documents through a model in training, at the steps where it is called.

    probe = Probe(model, documents, out="runs/a/qkscope", tokenizer=tokenizer)
    for step in range(steps):
        train_step()
        if step % 100 == 0:
            print(probe(step))
    probe.finish()

Every rank of a distributed training calls it. A trainer's callback only decides when.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from qkscope.api import require_stage, whole_argument
from qkscope.capture.backbone import head_ranks, model_limits
from qkscope.errors import InputError, QkscopeWarning
from qkscope.layers import Stage
from qkscope.moments.layout import Layout, capture_layout
from qkscope.study.schema import MOST_IN_DETAIL
from qkscope.train.cost import Clock, Cost
from qkscope.train.documents import ProbeDocuments, probe_documents
from qkscope.train.folder import PREFIX, TrainingFolder
from qkscope.train.measure import measure
from qkscope.train.ranks import Ranks

if TYPE_CHECKING:
    import torch
    from torch import nn

SAME = 1e-3  # tolerance of r for a step that is measured again: what another order of summation can change

_LEAST = {"limit": 1, "batch_tokens": 1, "components": 1, "skip_positions": 0, "buckets": 1, "groups": 1}


class ProbeOptions(TypedDict, total=False):
    """The options of `Probe` and of the callbacks; `ProbeSettings` has the defaults and why."""

    tokenizer: Any
    context: int | None
    limit: int
    text: str
    special_tokens: str
    buckets: int
    groups: int
    stage: Stage
    batch_tokens: int
    components: int
    skip_positions: int
    autocast: torch.dtype | None
    detail: bool | None
    keep_moments: bool
    page: bool
    at_most: float | None
    all_ranks: bool
    title: str
    expected: int | None
    strict: bool
    clock: Clock


@dataclass(frozen=True)
class ProbeSettings:
    """How documents are read, summed and written."""

    tokenizer: Any = None  # for texts
    context: int | None = None  # tokens of each document; by default as many as half of them have, at most 1024
    limit: int = 64  # the first so many rows of a dataset or a file
    text: str = "text"  # the column of texts
    special_tokens: str = "default"  # as in a study: default, none or bos
    buckets: int = 16  # as in a study
    groups: int = 8  # document groups, for errors; as in a study
    stage: Stage = "post_rope"
    batch_tokens: int = 8192  # of a pass, as in a study
    components: int = 10
    skip_positions: int = 0
    autocast: torch.dtype | None = None  # the precision of a mixed-precision training; by default what is in force
    detail: bool | None = None  # tables with many rows per head; by default where few steps are expected
    keep_moments: bool = False  # one moments file per step
    page: bool = True  # refresh report.html
    at_most: float | None = None  # the share of the training's time that measuring may take, such as 0.02
    all_ranks: bool = True  # every rank calls, takes its share of documents, and sums are added up
    title: str = "Training"
    expected: int | None = None  # steps that will be measured, where that is known
    strict: bool = False  # raise what keeps a step from being measured, instead of a warning
    clock: Clock = field(default=time.perf_counter, repr=False)

    @classmethod
    def of(cls, options: ProbeOptions) -> ProbeSettings:
        """The settings, if all options are known and of the right kind."""
        known = [each.name for each in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise InputError(f"there is no option {unknown[0]!r}; there are {', '.join(known)}")
        made = cls(**options)
        require_stage(made.stage)
        for name, least in _LEAST.items():
            whole_argument(name, getattr(made, name), least)
        if made.context is not None:
            whole_argument("context", made.context, 2)
        if made.special_tokens not in ("default", "none", "bos"):
            raise InputError(f"special_tokens should be 'default', 'none' or 'bos', not {made.special_tokens!r}")
        Cost(made.at_most)
        return made

    def layout(self, context: int) -> Layout:
        """The axes of the sums; vectors from before rotation need no sums of their own before rotation."""
        made = capture_layout(context, buckets=self.buckets, groups=self.groups, skip=self.skip_positions)
        return made if self.stage == "post_rope" else replace(made, unrotated_every=0)


class Probe:
    """Measure a model's heads on fixed documents: `probe(step)`, on every rank.

    Tables, provenance and page grow in `out`. Each call returns the step's scalars (on rank 0, and nothing where the
    budget did not allow a measurement). The model, its mode, random numbers and compiled graphs stay as they are. A
    measurement that fails is a warning; the first call raises what can never be measured.
    """

    def __init__(
        self, model: nn.Module, documents: Any, out: Path | str = "qkscope-training", **options: Unpack[ProbeOptions]
    ) -> None:
        self.settings = settings = ProbeSettings.of(options)
        self._model = model
        self._ranks = Ranks.all(head_ranks(model)) if settings.all_ranks else Ranks()
        vocabulary, positions = model_limits(model)
        self.documents: ProbeDocuments = probe_documents(
            documents,
            settings.tokenizer,
            context=settings.context,
            limit=settings.limit,
            text=settings.text,
            special_tokens=settings.special_tokens,
            vocabulary=vocabulary,
            positions=positions,
        )
        self._ranks.share(len(self.documents.windows))  # refuses too few, now
        self._cost = Cost(settings.at_most, settings.clock)
        self._measured: set[int] = set()
        self._compared = False
        self.last_step: int | None = None  # at which it was called
        self.folder: TrainingFolder | None = None  # on rank 0
        self._ranks.decided(lambda: self._open(Path(out)))

    @property
    def cost_share(self) -> float:
        """Seconds spent on measuring, tables and page, over the training's own, including those before a resume."""
        return self._cost.share

    def __call__(self, step: int, tokens: int | None = None) -> dict[str, float]:
        """Measure now; the step's scalars on rank 0, empty elsewhere and where nothing was measured.

        `tokens` are those that the model was trained on so far, for the record.
        """
        self.last_step = step = whole_argument("step", step, 0)
        if tokens is not None:
            whole_argument("tokens", tokens, 0)
        scalars: dict[str, float] = {}
        with training_continues(step, strict=self.settings.strict, refuse=not self._measured):
            scalars.update(self._measure(step, tokens))
        return scalars

    def finish(self) -> None:
        """Bring the page up to date, whatever it costs: the training has ended."""
        if self.folder is not None and self.settings.page:
            self.folder.write_page()

    def _open(self, out: Path) -> None:
        """The folder, with tables in detail as its steps have them, or where few steps will come."""
        settings = self.settings
        folder = TrainingFolder(
            out,
            title=settings.title,
            components=settings.components,
            skip_positions=settings.skip_positions,
            keep_moments=settings.keep_moments,
        )
        few = settings.expected is not None and settings.expected <= MOST_IN_DETAIL
        recorded = folder.recorded("detail")
        folder.detail = settings.detail if settings.detail is not None else bool(few if recorded is None else recorded)
        self._cost.earlier = folder.seconds
        self.folder = folder

    def _measure(self, step: int, tokens: int | None) -> dict[str, float]:
        decision = self._ranks.decided(lambda: self._decide(step))
        if decision == "skip":
            return self._recorded(step)
        _synchronize(self._model)
        with self._cost.counted("measure"):
            moments = measure(self._model, self.documents, self.settings, self._ranks)
            self._measured.add(step)
            if moments is None or self.folder is None:
                return {}
            if decision == "compare":
                self._warn_of_difference(step, self.folder.difference(step, moments), self.folder.path)
                return self._recorded(step)
            first = not self.folder.steps
            scalars = self.folder.add(step, moments, tokens, self._cost)
        if self.settings.page and self._cost.fits("page"):
            with self._cost.counted("page"):
                self.folder.write_page()
        costs = {f"{PREFIX}seconds": self._cost.last["measure"]}
        if not first:  # before the first measurement there was no training to compare with
            costs[f"{PREFIX}cost_share"] = self._cost.share
        return {**scalars, **costs}

    def _decide(self, step: int) -> Literal["measure", "compare", "skip"]:
        """On rank 0: whether to measure this step, or, after a resume, to compare it with what was recorded of it."""
        if self.folder is not None and step in self.folder.steps:
            first = not self._compared and step not in self._measured
            self._compared = True
            return "compare" if first else "skip"
        return "measure" if self._cost.fits("measure") else "skip"

    def _recorded(self, step: int) -> dict[str, float]:
        """The scalars of a step that was measured before; empty where it was not, and on ranks other than 0."""
        return (self.folder.scalars(step) if self.folder is not None else None) or {}

    def _warn_of_difference(self, step: int, difference: float, folder: Path) -> None:
        """A training that was resumed should be where it was: one step that is there already shows it."""
        if not difference <= SAME:
            warnings.warn(
                f"step {step} is in {folder} already, but r_q or r_k of a head now differs by {difference:.2g}: "
                "this is not the training that was measured there. Its steps are kept; to measure them again, give "
                "another folder",
                QkscopeWarning,
                stacklevel=3,
            )


@contextmanager
def training_continues(step: int, *, strict: bool, refuse: bool = False) -> Iterator[None]:
    """Turn a failed measurement into a warning, because the training run is worth more; `strict` raises it instead.

    With `refuse`, what can never be measured (an InputError) is raised too; a full disk is still a warning.
    """
    try:
        yield
    except Exception as error:
        if strict or (refuse and isinstance(error, InputError)):
            raise
        warnings.warn(
            f"step {step} could not be measured; training continues ({type(error).__name__}: {error})",
            QkscopeWarning,
            stacklevel=4,
        )


def _synchronize(model: nn.Module) -> None:
    """Wait for what the training has asked of its device: those seconds are its own."""
    import torch

    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    wait = getattr(getattr(torch, kind, None), "synchronize", None)
    if wait is not None and kind != "cpu":
        wait()
