"""One checkpoint's work: load it, run its documents, keep its sums (and on request a sample of its vectors)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.documents.tokens import batches, group_of
from qkscope.errors import MomentsFileError
from qkscope.moments.moments import Moments
from qkscope.pipeline.events import Events
from qkscope.pipeline.plan import CheckpointPlan
from qkscope.pipeline.tables import moments_path
from qkscope.vectors.sample import VectorSampler, published_rate, sampled_positions

if TYPE_CHECKING:
    from qkscope.capture.probe import Probe
    from qkscope.moments.collect import Batch, Keep
    from qkscope.vectors.write import VectorWriter


@dataclass(frozen=True)
class VectorSample:
    """A request to keep raw vectors: a share of tokens, or (None) one in as many as a bucket has positions."""

    rate: float | None = None
    seed: int = 0


def capture_checkpoint(plan: CheckpointPlan, folder: Path, events: Events, vectors: VectorSample | None = None) -> None:
    """One checkpoint's moments, unless a file with the same fingerprint is already there."""
    path = moments_path(folder, plan.checkpoint.name)
    kept = vectors_path(folder, plan.checkpoint.name)
    if _still_holds(path, plan, events) and (vectors is None or kept.is_dir()):
        events.reused(plan)
        return
    events.started(plan)
    begun = time.perf_counter()
    moments = _collect(plan, events, None if vectors is None or kept.is_dir() else (kept, vectors))
    seconds = time.perf_counter() - begun
    moments.provenance["seconds"] = round(seconds, 3)
    moments.save(path)
    events.finished(plan, seconds)


def vectors_path(folder: Path, checkpoint: str) -> Path:
    """Where a checkpoint's sample of vectors is kept."""
    return folder / "vectors" / checkpoint


def _collect(plan: CheckpointPlan, events: Events, vectors: tuple[Path, VectorSample] | None) -> Moments:
    from qkscope.capture.load import load_backbone
    from qkscope.capture.probe import probe_model
    from qkscope.moments.collect import collect_moments
    from qkscope.pipeline.provenance import checkpoint_provenance

    model = load_backbone(plan.source, plan.config, dtype=plan.study.dtype, device=plan.study.device)
    probe = probe_model(model)
    with ExitStack() as stack:
        writer = None if vectors is None else stack.enter_context(_writer(plan, probe, *vectors))
        return collect_moments(
            model,
            _token_batches(plan),
            plan.layout,
            probe=probe,
            provenance=checkpoint_provenance(plan, probe, model),
            stage=plan.study.stage,
            keep=None if plan.layout.rate == 1 else _keep(plan),
            watch=None
            if writer is None
            else lambda call, batch: writer.observe(call, batch.documents, batch.positions),
            done=lambda batch: events.advanced(len(batch.names), batch.tokens),
        )


def _token_batches(plan: CheckpointPlan) -> Iterator[Batch]:
    from qkscope.moments.collect import make_batch

    groups = plan.study.groups
    windows = plan.corpus.windows(plan.tokenizer, plan.context, plan.documents)
    for batch in batches(windows, plan.context, plan.study.batch_tokens, groups):
        numbers = [window.index for window in batch]
        of_groups = [group_of(number, groups) for number in numbers]
        yield make_batch([window.ids for window in batch], of_groups, [window.name for window in batch], numbers)


def _keep(plan: CheckpointPlan) -> Keep:
    """Which tokens the study's sample sums, layer by layer."""

    def keep(layer: int, batch: Batch) -> Any:
        return sampled_positions(
            batch.documents,
            batch.ids.shape[1],
            layer=layer,
            rate=plan.layout.rate,
            seed=plan.layout.seed,
            positions=batch.positions,
        )

    return keep


def _writer(plan: CheckpointPlan, probe: Probe, folder: Path, sample: VectorSample) -> VectorWriter:
    from qkscope.vectors.write import VectorWriter

    rate = published_rate(plan.context) if sample.rate is None else sample.rate
    sampler = VectorSampler(rate, sample.seed, plan.layout)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return VectorWriter(folder, sampler, probe.layers, n_layers=probe.n_layers)


def _still_holds(path: Path, plan: CheckpointPlan, events: Events) -> bool:
    """Whether the file is whole (its checksum is checked) and made from what the plan would make it from."""
    if not path.exists():
        return False
    try:
        made_from = Moments.load(path).provenance.get("fingerprint")
    except MomentsFileError as error:
        events.replacing(plan, f"{error}")
        return False
    if made_from != plan.fingerprint():
        events.replacing(plan, "its moments were made from other weights, documents or settings")
        return False
    return True
