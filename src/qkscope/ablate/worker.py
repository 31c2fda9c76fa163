"""The worker's side of an ablation, for every engine: load a checkpoint with its head, run shards, keep outcomes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qkscope.ablate.kept import keep
from qkscope.ablate.work import AblationShard, CheckpointAblation
from qkscope.documents.tokens import group_of
from qkscope.errors import InputError, located
from qkscope.moments.moments import Moments
from qkscope.results.folder import moments_path
from qkscope.run.engines.base import Advanced, Finished, Report, Task
from qkscope.run.options import CaptureOptions

if TYPE_CHECKING:
    from qkscope.ablate.measure import AblatedText, Measurer


class AblationWorker:
    """Runs shards one after the other; a checkpoint stays loaded until one of another comes."""

    def __init__(
        self,
        works: Sequence[CheckpointAblation],
        folder: Path,
        on_report: Callable[[Report], None],
        *,
        options: CaptureOptions,  # of the capture: none changes an ablation
        shared: bool = True,
    ) -> None:
        self._works, self._folder, self._on_report, self._shared = works, folder, on_report, shared
        self._loaded: int | None = None
        self._measurer: Measurer | None = None
        self._open = ExitStack()

    def run(self, task: Task, following: int | None = None) -> None:
        """Run all shards of the task."""
        if not self._shared:
            raise InputError(
                "an ablation needs a results folder that every worker sees, for its moments; this one does not"
            )
        with located(f"checkpoint {task.name!r}"):
            measurer = self._load(task.checkpoint)
            for shard in task.shards:
                assert isinstance(shard, AblationShard)
                work = self._works[task.checkpoint]
                keep(self._folder, work, shard, measurer.measure(self._text(work, shard), shard.edit, shard.units))
                self._on_report(Advanced(task.checkpoint, 0, len(shard.units) * work.variants * work.tokens))
                self._on_report(Finished(task.checkpoint, shard.number))

    def close(self) -> None:
        """Take all hooks off the model and let it go."""
        self._open.close()
        self._measurer = self._loaded = None
        gc.collect()  # before the next one comes

    def _load(self, checkpoint: int) -> Measurer:
        from qkscope.ablate.measure import EditSource, Measurer
        from qkscope.ablate.passes import Ablation
        from qkscope.capture.load import load_backbone

        if self._measurer is None or self._loaded != checkpoint:
            self.close()
            work = self._works[checkpoint]
            plan, study = work.plan, work.plan.study
            moments = Moments.load(moments_path(self._folder, work.name))
            model = load_backbone(plan.source, plan.config, dtype=study.dtype, device=study.device, head=True)
            source = EditSource(moments, work.tokens, work.settings.seed)
            ablation = self._open.enter_context(Ablation(model))
            self._measurer, self._loaded = Measurer(ablation, source, work.settings, plan.tokenizer), checkpoint
        return self._measurer

    def _text(self, work: CheckpointAblation, shard: AblationShard) -> AblatedText:
        from qkscope.ablate.measure import AblatedText

        plan, (document,) = work.plan, shard.documents
        (window,) = plan.corpus.windows(plan.tokenizer, plan.context, [document])
        ids = np.asarray(window.ids[: work.tokens], dtype=np.int64)
        return AblatedText(document, group_of(document, plan.layout.groups), ids)
