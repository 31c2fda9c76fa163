"""The worker's side of an ablation, for every engine: load a checkpoint with its head, run shards, write outcomes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qkscope.ablate.measure import AblatedText, EditSource, Measurer
from qkscope.ablate.work import AblationShard, CheckpointAblation
from qkscope.documents.tokens import group_of
from qkscope.errors import InputError, located
from qkscope.moments.moments import Moments
from qkscope.results.folder import moments_path
from qkscope.run.engines.base import Advanced, Finished, Report, Task

if TYPE_CHECKING:
    from qkscope.run.options import CaptureOptions


class AblationWorker:
    """Runs shards one after the other; a checkpoint stays loaded until one of another comes."""

    def __init__(
        self,
        ablations: Sequence[CheckpointAblation],
        folder: Path,
        on_report: Callable[[Report], None],
        *,
        options: CaptureOptions,  # of a capture: none changes an ablation
        shared: bool = True,
    ) -> None:
        self._ablations, self._folder, self._on_report, self._shared = ablations, folder, on_report, shared
        self._loaded: int | None = None
        self._measurer: Measurer | None = None
        self._open = ExitStack()

    def run(self, task: Task, following: int | None = None) -> None:
        """Run all shards of the task."""
        if not self._shared:
            raise InputError(
                "an ablation needs a results folder that every worker sees, for its moments; this one does not"
            )
        ablation = self._ablations[task.checkpoint]
        with located(f"checkpoint {task.name!r}"):
            measurer = self._load(task.checkpoint)
            for shard in task.shards:
                assert isinstance(shard, AblationShard)
                rows = measurer.measure(_text(ablation, shard), shard.edit, shard.units)
                ablation.write_outcomes(self._folder, shard, rows)
                self._on_report(Advanced(task.checkpoint, 0, len(shard.units) * ablation.variants * ablation.tokens))
                self._on_report(Finished(task.checkpoint, shard.number))

    def close(self) -> None:
        """Take all hooks off the model and release it."""
        self._open.close()
        self._measurer = self._loaded = None
        gc.collect()  # before the next one comes

    def _load(self, checkpoint: int) -> Measurer:
        from qkscope.ablate.passes import EditableModel
        from qkscope.capture.load import load_backbone

        if self._measurer is None or self._loaded != checkpoint:
            self.close()
            ablation = self._ablations[checkpoint]
            plan, study = ablation.plan, ablation.plan.study
            moments = Moments.load(moments_path(self._folder, ablation.name))
            model = load_backbone(plan.source, plan.config, dtype=study.dtype, device=study.device, head=True)
            source = EditSource(moments, ablation.tokens, ablation.settings.seed)
            editable = self._open.enter_context(EditableModel(model))
            self._measurer = Measurer(editable, source, ablation.settings, plan.tokenizer)
            self._loaded = checkpoint
        return self._measurer


def _text(ablation: CheckpointAblation, shard: AblationShard) -> AblatedText:
    plan, (document,) = ablation.plan, shard.documents
    (window,) = plan.corpus.windows(plan.tokenizer, plan.context, [document])
    ids = np.asarray(window.ids[: ablation.tokens], dtype=np.int64)
    return AblatedText(document, group_of(document, plan.layout.groups), ids)
