"""One checkpoint's work: load it, run its documents, keep its sums (and on request a sample of its vectors)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.documents.tokens import batches, group_of
from qkscope.errors import InputError, MomentsFileError
from qkscope.files import remove_unfinished
from qkscope.moments.moments import Moments
from qkscope.pipeline.events import Events
from qkscope.pipeline.plan import CheckpointPlan, Shard
from qkscope.pipeline.tables import moments_path
from qkscope.vectors.layout import stored_sample
from qkscope.vectors.sample import VectorSampler, published_rate, sampled_positions

if TYPE_CHECKING:
    from qkscope.capture.probe import Probe
    from qkscope.capture.tap import AttentionCall
    from qkscope.moments.collect import Batch, Keep
    from qkscope.vectors.write import VectorWriter


@dataclass(frozen=True)
class VectorSample:
    """A request to keep raw vectors: a share of tokens, or (None) one in as many as a bucket has positions."""

    rate: float | None = None
    seed: int = 0


def capture_checkpoint(plan: CheckpointPlan, folder: Path, events: Events, vectors: VectorSample | None = None) -> None:
    """One checkpoint's moments, shard by shard, unless they are there and still hold."""
    path, kept = moments_path(folder, plan.checkpoint.name), vectors_path(folder, plan.checkpoint.name)
    missing = None if vectors is None or kept.is_dir() else (kept, vectors)
    holds = _still_holds(path, plan.fingerprint(), plan, events)
    if vectors is not None and kept.is_dir():
        _require_same_sample(kept, plan, vectors, holds)
    if holds and missing is None:
        events.reused(plan)
        return
    events.started(plan)
    begun = time.perf_counter()
    parts = folder / "moments" / ".shards" / plan.checkpoint.name
    remove_unfinished(path.parent, parts)
    # Vectors are kept of a whole checkpoint or not at all, so where they are wanted every shard runs.
    done = [] if missing else [shard for shard in plan.shards() if _shard_holds(parts, shard, plan, events)]
    if done:
        events.resumed(plan, len(done), sum(len(shard.documents) for shard in done))
    left = [shard for shard in plan.shards() if shard not in done]
    if left:
        _capture_shards(plan, left, parts, events, missing)
    _merge_shards(plan, parts).save(path)
    shutil.rmtree(parts)
    with suppress(OSError):  # not empty: another checkpoint has shards there
        parts.parent.rmdir()
    events.finished(plan, time.perf_counter() - begun)


def _require_same_sample(kept: Path, plan: CheckpointPlan, wanted: VectorSample, holds: bool) -> None:
    """Refuse vectors that an earlier run kept of something else: they must not pass for this run's."""
    rate = published_rate(plan.context) if wanted.rate is None else wanted.rate
    if not holds or stored_sample(kept) != (rate, wanted.seed):
        raise InputError(f"{kept} holds vectors of another run or rate; remove it, or give another --out")


def shard_path(parts: Path, shard: Shard) -> Path:
    """Where a shard's moments wait until the checkpoint is whole."""
    return parts / f"{shard.number:06d}.safetensors"


def _shard_holds(parts: Path, shard: Shard, plan: CheckpointPlan, events: Events) -> bool:
    return _still_holds(shard_path(parts, shard), plan.fingerprint(shard), plan, events)


def _merge_shards(plan: CheckpointPlan, parts: Path) -> Moments:
    """All shards added up in plan order, always from their files: the same bytes however the run went."""
    merged: Moments | None = None
    seconds = 0.0
    for shard in plan.shards():
        part = Moments.load(shard_path(parts, shard))
        seconds += float(part.provenance.get("seconds", 0.0))
        merged = part if merged is None else merged.merge(part)
    assert merged is not None  # a plan has at least one document
    merged.provenance.update(fingerprint=plan.fingerprint(), seconds=round(seconds, 3), shards=len(plan.shards()))
    merged.provenance.pop("shard", None)
    return merged


def vectors_path(folder: Path, checkpoint: str) -> Path:
    """Where a checkpoint's sample of vectors is kept."""
    return folder / "vectors" / checkpoint


def _capture_shards(
    plan: CheckpointPlan,
    shards: list[Shard],
    parts: Path,
    events: Events,
    vectors: tuple[Path, VectorSample] | None,
) -> None:
    """Load the checkpoint once and write the moments of each shard as it is finished."""
    from qkscope.capture.load import load_backbone
    from qkscope.capture.probe import probe_model
    from qkscope.moments.collect import collect_moments
    from qkscope.pipeline.provenance import checkpoint_provenance

    model = load_backbone(plan.source, plan.config, dtype=plan.study.dtype, device=plan.study.device)
    probe = probe_model(model)
    about = checkpoint_provenance(plan, probe, model)
    with ExitStack() as stack:
        writer = None if vectors is None else stack.enter_context(_writer(plan, probe, *vectors))
        for shard in shards:
            begun = time.perf_counter()
            moments = collect_moments(
                model,
                _token_batches(plan, shard),
                plan.layout,
                probe=probe,
                provenance={**about, "shard": shard.number, "fingerprint": plan.fingerprint(shard)},
                stage=plan.study.stage,
                keep=None if plan.layout.rate == 1 else _keep(plan),
                watch=None if writer is None else partial(_watch, writer),
                done=lambda batch: events.advanced(len(batch.names), batch.tokens),
            )
            moments.provenance["seconds"] = round(time.perf_counter() - begun, 3)
            moments.save(shard_path(parts, shard))


def _watch(writer: VectorWriter, call: AttentionCall, batch: Batch) -> None:
    writer.observe(call, batch.documents, batch.positions)


def _token_batches(plan: CheckpointPlan, shard: Shard) -> Iterator[Batch]:
    from qkscope.moments.collect import make_batch

    groups = plan.study.groups
    windows = plan.corpus.windows(plan.tokenizer, plan.context, shard.documents)
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


def _still_holds(path: Path, fingerprint: str, plan: CheckpointPlan, events: Events) -> bool:
    """Whether the file is whole (its checksum is checked) and made from what the plan would make it from."""
    if not path.exists():
        return False
    try:
        made_from = Moments.load(path).provenance.get("fingerprint")
    except MomentsFileError as error:
        events.replacing(plan, f"{error}")
        return False
    if made_from != fingerprint:
        events.replacing(plan, "its moments were made from other weights, documents or settings")
        return False
    return True
