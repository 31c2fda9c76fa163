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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from qkscope.api import require_stage, whole_argument
from qkscope.capture.backbone import head_ranks, model_limits, text_config
from qkscope.errors import CaptureError, InputError, QkscopeWarning
from qkscope.layers import LayerFacts, Stage
from qkscope.moments.layout import PADDING, Layout, capture_layout
from qkscope.results.provenance import CheckpointRecord, environment
from qkscope.study.schema import MOST_IN_DETAIL
from qkscope.train.alerts import ALERT, alerts_of, require_alerts
from qkscope.train.cost import Clock, Cost
from qkscope.train.documents import ProbeDocuments, probe_documents
from qkscope.train.folder import PREFIX, TrainingFolder
from qkscope.train.ranks import Ranks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from qkscope.capture.collect import Batch
    from qkscope.capture.probe import ProbedModel
    from qkscope.moments.moments import Moments

SPARE = -1  # the number of a document that is run and not summed
SAME = 1e-3  # tolerance of r for a step that is measured again: what another order of summation can change

_LEAST = {"limit": 1, "batch_tokens": 1, "components": 1, "skip_positions": 0, "buckets": 1, "groups": 1}


ALERTED = ("max_logit", "entropy", "sink_mass", "distance_90", "r_q_mean", "r_k_mean")  # scalars with limits


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
    alerts: Mapping[str, float] | None
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
    # Limits of scalars, such as {"max_logit": 100}; "trend": standard errors off the line of the last four. They warn.
    alerts: Mapping[str, float] | None = None
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
        require_alerts(made.alerts, ALERTED)
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
        if self.settings.page and self._cost.fits("page"):
            with training_continues(step, strict=self.settings.strict):
                self.finish()
        return scalars

    def finish(self) -> None:
        """Make the tables, and the page if it is wanted, whatever that costs: the training has ended."""
        if self.folder is not None and self.folder.steps:
            with self._cost.counted("page"):
                (self.folder.write_page if self.settings.page else self.folder.write_tables)()
            self.folder.note_seconds(self._cost)

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
        scalars |= self._alerted(step, scalars)
        costs = {f"{PREFIX}seconds": self._cost.last["measure"]}
        if not first:  # before the first measurement there was no training to compare with
            costs[f"{PREFIX}cost_share"] = self._cost.share
        return {**scalars, **costs}

    def _alerted(self, step: int, scalars: Mapping[str, float]) -> dict[str, float]:
        """Warn of what is above a limit or off its trend; the number of alerts, where some were asked for."""
        limits = require_alerts(self.settings.alerts, ALERTED)
        if not limits or self.folder is None:
            return {}
        earlier = [(each, self.folder.scalars(each) or {}) for each in self.folder.steps if each < step]
        sentences = alerts_of(limits, step, scalars, earlier)
        for sentence in sentences:
            warnings.warn(sentence, QkscopeWarning, stacklevel=2)
        return {f"{PREFIX}{ALERT}": float(len(sentences))}

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


# -- the sums of one step ------------------------------------------------------------------------------------------


def measure(model: nn.Module, documents: ProbeDocuments, settings: ProbeSettings, ranks: Ranks) -> Moments | None:
    """The sums of all ranks, on rank 0 (None elsewhere); the model and its training are left as they were."""
    from qkscope.train.preserve_state import untouched

    with untouched(model, settings.autocast):
        mine = ranks.together(
            lambda: _sums(model, documents, settings, ranks),
            same=lambda moments: (documents.fingerprint, tuple(moments.layers.values())),
        )
        return ranks.merged(mine)


def _sums(model: nn.Module, documents: ProbeDocuments, settings: ProbeSettings, ranks: Ranks) -> Moments:
    """This rank's sums."""
    from qkscope.capture.collect import collect_moments
    from qkscope.capture.probe import probe_model

    probed = probe_model(model, context=documents.context, some_heads=ranks.heads)
    _require_even(probed.layers, text_config(model), ranks)
    return collect_moments(
        model,
        _batches(documents, settings, ranks),
        settings.layout(documents.context),
        probe=probed,
        provenance=_provenance(model, probed, documents, settings, ranks),
        stage=settings.stage,
        choose_positions=_summed_positions,
    )


def _provenance(
    model: nn.Module, probed: ProbedModel, documents: ProbeDocuments, settings: ProbeSettings, ranks: Ranks
) -> dict[str, Any]:

    parameter, config = next(model.parameters()), text_config(model)
    values = {
        "context": documents.context,
        "model_type": getattr(config, "model_type", None),
        "n_layers": probed.n_layers,
        "layers_without_attention": list(probed.gaps),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "autocast": _autocast_in_force(parameter),
        "device": str(parameter.device),
        "kernel": getattr(config, "_attn_implementation", None) or ", ".join(probed.kernels),
        "kernel_functions": list(probed.kernels),
        "stage": settings.stage,
        "corpus": documents.record(),
        "documents": len(documents.windows),
        "documents_too_short": documents.too_short,
        "tokens": len(documents.windows) * documents.context,
        "ranks": ranks.size,
        "layers": [facts.outline() for facts in probed.layers],
        "environment": environment(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return CheckpointRecord.of(values).to_json()


def _require_even(layers: Sequence[LayerFacts], config: Any, ranks: Ranks) -> None:
    """Refuse key heads that several ranks of a tensor-parallel model hold at once: they would count twice."""
    stated = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    over_ranks = max((facts.kv_heads for facts in layers), default=0) * ranks.size
    if ranks.heads and isinstance(stated, int) and over_ranks != stated:
        raise CaptureError(
            f"the {stated} key heads of a tensor-parallel model are {over_ranks} over its {ranks.size} ranks: some are "
            "duplicated; measure saved checkpoints"
        )


def _autocast_in_force(parameter: torch.Tensor) -> str | None:
    """The precision that products are cast to now."""
    import torch

    kind = parameter.device.type
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None


def _batches(documents: ProbeDocuments, settings: ProbeSettings, ranks: Ranks) -> Iterator[Batch]:
    """This rank's documents, pass by pass; document i is in group i mod groups, whoever runs it."""
    from qkscope.capture.collect import make_batch

    share, rows = ranks.share(len(documents.windows)), max(1, settings.batch_tokens // documents.context)
    for start in range(0, len(share), rows):
        numbers = share[start : start + rows]
        run = [number or 0 for number in numbers]  # any document will do for a pass that only other ranks need
        yield make_batch(
            [documents.windows[number] for number in run],
            [number % settings.groups for number in run],
            [f"probe document {number}" for number in run],
            [SPARE if number is None else number for number in numbers],
        )


def _summed_positions(_layer: int, batch: Batch) -> NDArray[np.int64] | None:
    """All positions, but none of a document that is run only because other ranks run one."""
    if SPARE not in batch.documents:
        return batch.positions
    spare = np.asarray(batch.documents)[:, None] == SPARE  # (rows, 1)
    return np.where(spare, PADDING, np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape))
