"""Capture shards in this process, on its devices: the model stays loaded from one shard of a checkpoint to the next.

A shard is summed as a whole or not at all. When a document makes the model fail, or memory runs out, the sums of
that attempt are dropped and the shard starts again, without the document or with smaller batches.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.capture.source import ModelSource
from qkscope.documents.tokens import batches
from qkscope.errors import (
    BatchError,
    CaptureError,
    DocumentFailure,
    EveryDocumentFails,
    ModelError,
    OutOfMemory,
    located,
)
from qkscope.processes import free_memory
from qkscope.results.folder import vectors_path
from qkscope.run.checkpoint_plan import CheckpointPlan, Shard, checkpoint_provenance
from qkscope.run.engines import Advanced, CaptureOptions, Finished, LeftOut, Noted, OnReport, Task
from qkscope.run.finished import deliver, delivery_path, running_shard
from qkscope.validation.layout import VectorSample, sampled_positions

if TYPE_CHECKING:
    from qkscope.capture.collect import Batch
    from qkscope.capture.probe import ProbedModel
    from qkscope.capture.tap import AttentionCall
    from qkscope.moments.moments import Moments
    from qkscope.results.provenance import CheckpointRecord
    from qkscope.validation.write import VectorWriter

# What makes one checkpoint impossible to measure and says nothing about the others.
BAD_CHECKPOINT = (ModelError, CaptureError, OutOfMemory, EveryDocumentFails)
SPARE_MEMORY = 2**30  # bytes that stay free when the next checkpoint's weights are read ahead
PREFETCH_CHUNK = 8 * 2**20  # bytes read at a time


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory."""

    name: str
    model: Any
    probe: ProbedModel
    about: CheckpointRecord


@dataclass
class Attempt:
    """One attempt at a shard: what it leaves out, its batch size, and how far it came."""

    plan: CheckpointPlan
    shard: Shard
    batch_tokens: int
    restartable: bool  # kept vectors are written as they come, so their shards cannot start again
    skipped: list[dict[str, Any]] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0


class Worker:
    """Runs tasks one after the other and puts their moments where the run will find them, on every engine.

    `shared`: the run sees this folder too. `lock`: hold each shard's lock, which the caller may hold already.
    """

    def __init__(
        self,
        plans: Sequence[CheckpointPlan],
        folder: Path,
        on_report: OnReport,
        *,
        options: CaptureOptions = CaptureOptions(),  # noqa: B008 - frozen
        shared: bool = True,
        lock: bool = True,
    ) -> None:
        self._plans, self._folder, self._on_report = plans, folder, on_report
        self._options, self._shared, self._lock = options, shared, shared and lock
        self._checkpoint = 0  # index of the plan that runs
        self._loaded: Loaded | None = None
        self._next = Prefetch()
        self._batch_tokens: int | None = None  # smaller than the study's once memory ran out

    def run(self, task: Task, following: int | None = None) -> None:
        """Run all shards of the task; without a shared folder, report their moments as bytes.

        `following` is the checkpoint that will probably be next: its weights are fetched meanwhile. A checkpoint that
        cannot be measured is reported as left out, if the options allow that.
        """
        self._checkpoint, plan = task.checkpoint, self._plans[task.checkpoint]
        after = None if following is None else self._plans[following]
        with located(f"checkpoint {task.name!r}"):
            try:
                with nullcontext() if task.vectors is None else self._writer(plan, task.vectors) as writer:
                    for shard in task.shards:
                        with running_shard(self._folder, task.name, shard) if self._lock else nullcontext():
                            self._deliver(plan, shard, self.capture(plan, shard, writer, after))
            except BAD_CHECKPOINT as error:
                if not self._options.skip_bad_checkpoints:
                    raise error.advised(
                        python="CaptureOptions(skip_bad_checkpoints=True) goes on without this checkpoint",
                        command="--skip-bad-checkpoints goes on without this checkpoint",
                    ) from error
                self._on_report(LeftOut(task.checkpoint, str(error.args[0])))

    def close(self) -> None:
        """Nothing is open between tasks."""

    def _deliver(self, plan: CheckpointPlan, shard: Shard, moments: Moments) -> None:
        contents = None
        if self._shared:
            deliver(plan, moments, delivery_path(plan, shard.number, self._folder))
        else:
            with tempfile.TemporaryDirectory() as scratch:
                deliver(plan, moments, Path(scratch) / "shard.safetensors")
                contents = (Path(scratch) / "shard.safetensors").read_bytes()
        self._on_report(Finished(self._checkpoint, shard.number, contents))

    def _writer(self, plan: CheckpointPlan, sample: VectorSample) -> VectorWriter:
        """A writer of a sample of the checkpoint's raw vectors."""
        from qkscope.validation.write import VectorWriter

        folder, probe = vectors_path(self._folder, plan.checkpoint.name), self._load(plan).probe
        folder.parent.mkdir(parents=True, exist_ok=True)
        texts = token_texts(plan) if sample.tokens else None
        return VectorWriter(folder, sample, plan.layout, probe.layers, n_layers=probe.n_layers, tokens=texts)

    def _load(self, plan: CheckpointPlan) -> Loaded:
        from qkscope.capture.load import load_backbone
        from qkscope.capture.probe import probe_model

        name = plan.checkpoint.name
        if self._loaded is None or self._loaded.name != name:
            self._loaded = self._batch_tokens = None  # free the old model before the new one is loaded
            self._next.stop()
            model = load_backbone(plan.source, plan.config, dtype=plan.study.dtype, device=plan.study.device)
            probe = probe_model(model, plan.context)
            self._loaded = Loaded(name, model, probe, checkpoint_provenance(plan, probe, model))
        return self._loaded

    def capture(
        self,
        plan: CheckpointPlan,
        shard: Shard,
        writer: VectorWriter | None = None,
        following: CheckpointPlan | None = None,
    ) -> Moments:
        """The shard's moments, with their provenance; the weights of `following` are fetched meanwhile."""
        loaded = self._load(plan)
        if following is not None:
            self._next.start(following.source)
        attempt = Attempt(plan, shard, self._batch_tokens or plan.study.batch_tokens, writer is None)
        begun, moments = time.perf_counter(), None
        while moments is None:
            moments = self._collect(loaded, attempt, writer)
        moments.provenance.update(
            seconds=round(time.perf_counter() - begun, 3),
            batch_tokens=attempt.batch_tokens,
            documents_skipped=attempt.skipped,
        )
        return moments

    def _collect(self, loaded: Loaded, attempt: Attempt, writer: VectorWriter | None) -> Moments | None:
        """One attempt; None if it failed in a way that the next attempt avoids."""
        from qkscope.capture.collect import collect_moments

        plan, shard = attempt.plan, attempt.shard
        attempt.documents = attempt.tokens = 0

        def batch_done(batch: Batch) -> None:
            attempt.documents += len(batch.names)
            attempt.tokens += batch.tokens
            self._on_report(Advanced(self._checkpoint, len(batch.names), batch.tokens))

        def sampled(layer: int, batch: Batch) -> Any:
            rate, seed, width = plan.layout.rate, plan.layout.seed, batch.ids.shape[1]
            return sampled_positions(
                batch.documents, width, layer=layer, rate=rate, seed=seed, positions=batch.positions
            )

        def observe(call: AttentionCall, batch: Batch) -> None:
            assert writer is not None
            writer.observe(call, batch.documents, batch.positions)

        try:
            return collect_moments(
                loaded.model,
                _token_batches(attempt),
                plan.layout,
                probe=loaded.probe,
                provenance={**loaded.about.to_json(), "shard": shard.number, "fingerprint": plan.fingerprint(shard)},
                stage=plan.study.stage,
                last_layer=plan.last_layer,
                first_shard=shard.number == plan.shards()[0].number,
                choose_positions=None if plan.layout.rate == 1 else sampled,
                on_call=None if writer is None else observe,
                done=batch_done,
            )
        except BatchError as error:
            again = self._avoid(error, loaded, attempt)
        # Outside the handler, so that nothing keeps the failed batch's tensors alive.
        self._on_report(Advanced(self._checkpoint, -attempt.documents, -attempt.tokens))
        self._on_report(Noted(f"{plan.checkpoint.name}: {again}"))
        return None

    def _avoid(self, error: BatchError, loaded: Loaded, attempt: Attempt) -> str:
        """Change the attempt so that it avoids the failure, and say how; re-raise what cannot be avoided."""
        if isinstance(error, OutOfMemory):
            return self._halve(error, attempt)
        shard, skipping = attempt.shard, attempt.restartable and self._options.skip_bad_documents
        failure = error if isinstance(error, DocumentFailure) else _failing_document(error, loaded, attempt)
        if skipping:
            attempt.skipped.append({"document": failure.documents[0], "name": failure.name, "reason": failure.reason})
            if len(attempt.skipped) < len(shard.documents):
                return (
                    f"document {failure.name} is left out: {failure.reason}; shard {shard.number} starts again "
                    "without it"
                )
        failed = set(shard.documents if skipping else failure.documents)
        if (skipping or self._options.skip_bad_checkpoints) and not _any_works(loaded, attempt.plan, failed):
            raise EveryDocumentFails(
                f"every document fails, so the checkpoint is at fault; the last: {failure}"
            ) from None
        if skipping:
            raise BatchError(f"every document of shard {shard.number} fails; the last: {failure}") from None
        raise failure.advised(
            python="leave it out of the study, or give CaptureOptions(skip_bad_documents=True)",
            command="leave it out of the study, or give --skip-bad-documents",
        ) from None

    def _halve(self, error: OutOfMemory, attempt: Attempt) -> str:
        from qkscope.capture.load import release_memory

        if attempt.batch_tokens < 2 * attempt.plan.context or not attempt.restartable:
            raise OutOfMemory(
                f"{error}, with one document of {attempt.plan.context} tokens at a time; use a device with more "
                "memory, more devices, a shorter context, or dtype: bfloat16 on a GPU"
            ) from None
        smaller = attempt.batch_tokens // 2
        self._batch_tokens = attempt.batch_tokens = smaller
        release_memory()
        return f"{error}: batches are halved to {smaller} tokens from here on (batch_tokens in the study sets it)"


def _any_works(loaded: Loaded, plan: CheckpointPlan, failed: set[int]) -> bool:
    """Whether any other document of the checkpoint can be measured; they are tried one by one."""
    from qkscope.capture.collect import collect_moments

    for index in (index for index in plan.documents if index not in failed):
        alone = _token_batches(Attempt(plan, Shard(0, (index,)), plan.context, restartable=True))
        with suppress(BatchError):
            collect_moments(loaded.model, alone, plan.layout, probe=loaded.probe, stage=plan.study.stage)
            return True
    return False


def _failing_document(error: BatchError, loaded: Loaded, attempt: Attempt) -> DocumentFailure:
    """The document of a failed batch that fails alone."""
    from qkscope.capture.collect import try_document

    plan, suspects = attempt.plan, [index for index in attempt.shard.documents if index in error.documents]
    for window in plan.corpus.windows(plan.tokenizer, plan.context, suspects):
        reason = try_document(loaded.model, window.ids)
        if reason is not None:
            return DocumentFailure.of(window.index, window.name, reason)
    raise error


def _token_batches(attempt: Attempt) -> Iterator[Batch]:
    from qkscope.capture.collect import make_batch

    plan, groups = attempt.plan, attempt.plan.layout.groups
    left_out = {skipped["document"] for skipped in attempt.skipped}
    chosen = [index for index in attempt.shard.documents if index not in left_out]
    windows = plan.corpus.windows(plan.tokenizer, plan.context, chosen)
    for batch in batches(windows, plan.context, attempt.batch_tokens, groups):
        numbers = [window.index for window in batch]
        of_groups = [number % groups for number in numbers]
        yield make_batch([window.ids for window in batch], of_groups, [window.name for window in batch], numbers)


def token_texts(plan: CheckpointPlan) -> Callable[[Any, Any], list[str]]:
    """The texts of tokens by document and position, as the checkpoint's tokenizer spells them."""
    texts: dict[int, list[str]] = {}

    def of(documents: Any, positions: Any) -> list[str]:
        for document in sorted({int(each) for each in documents} - set(texts)):
            (window,) = plan.corpus.windows(plan.tokenizer, plan.context, [document])
            texts[document] = [str(plan.tokenizer.decode([int(token)])) for token in window.ids]
        return [texts[int(document)][int(position)] for document, position in zip(documents, positions, strict=True)]

    return of


# -- the next checkpoint ---------------------------------------------------------------------------------------


class Prefetch:
    """Downloads and reads the weights of the next checkpoint, one at a time, while this one computes.

    Errors are ignored: the checkpoint is loaded all the same later, and meets them there.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._source: ModelSource | None = None
        self._stopped = threading.Event()

    def start(self, source: ModelSource) -> None:
        """Fetch a checkpoint, unless that was done, or another is still being fetched."""
        if source == self._source or (self._thread is not None and self._thread.is_alive()):
            return
        self._source, self._stopped = source, threading.Event()
        # A daemon: a run that ends does not wait for a download, which the next attempt resumes.
        self._thread = threading.Thread(target=_fetch, args=(source, self._stopped), name="prefetch", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for what is being fetched (for tests)."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Read no further, because the checkpoint is being loaded. A download goes on, and loading waits for it."""
        self._stopped.set()


def _fetch(source: ModelSource, stopped: threading.Event) -> None:
    from qkscope.capture.hub import fetch_weights

    with suppress(Exception):
        files = fetch_weights(source)
        if sum(path.stat().st_size for path in files) + SPARE_MEMORY <= free_memory():
            read_through(files, stopped)


def read_through(paths: list[Path], stopped: threading.Event) -> int:
    """Read files from end to end into the system's file cache until `stopped`; returns the bytes read."""
    buffer, done = memoryview(bytearray(PREFETCH_CHUNK)), 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while not stopped.is_set() and (count := file.readinto(buffer)):
                done += count
    return done
