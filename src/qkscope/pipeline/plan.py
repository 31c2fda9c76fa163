"""What a study will do, learnt without loading a weight: every config checked, every document measured.

A plan is a function of the study and of what it names, never of the machine, so mistakes show before hours of
work and the same study does the same work everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkscope.capture.source import ModelSource, find_source, weights_fingerprint
from qkscope.documents.tokens import Corpus, survey
from qkscope.errors import InputError, located
from qkscope.kinds import MODELS, Architecture, Kind, differ, kind_of, kind_sentence
from qkscope.moments.file import SCHEMA
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.sizes import Sizes, predict_sizes
from qkscope.study.load import StudyFile
from qkscope.study.schema import Checkpoint, Study
from qkscope.vectors.sample import published_rate


@dataclass(frozen=True)
class Shard:
    """A block of a checkpoint's documents: the unit that is finished or not."""

    number: int
    documents: tuple[int, ...]  # indices into the corpus


@dataclass(frozen=True)
class CheckpointPlan:
    """One checkpoint's work."""

    checkpoint: Checkpoint  # resolved
    source: ModelSource
    config: Any
    tokenizer: Any
    tokenizer_source: ModelSource
    corpus: Corpus
    documents: list[int]  # indices into the corpus
    layout: Layout
    blueprint: Any  # capture.blueprint.Blueprint
    study: Study = field(repr=False)

    @property
    def trust_remote_code(self) -> bool:
        """Whether Python code that lies with the checkpoint may run: a flag of the command line, never of a study."""
        return self.source.trust_remote_code

    @property
    def context(self) -> int:
        """Tokens per document."""
        return self.layout.context

    @property
    def tokens(self) -> int:
        """Tokens that will go through the model (a sample sums fewer of them)."""
        return len(self.documents) * self.context

    @property
    def sizes(self) -> Sizes:
        """What the sums will cost."""
        return predict_sizes(self.layout, self.blueprint.probe.layers)

    @property
    def architecture(self) -> Architecture:
        """Model type, layers, heads and widths."""
        probe = self.blueprint.probe
        return Architecture.of_layers(getattr(self.config, "model_type", None), probe.n_layers, probe.layers)

    @property
    def commit(self) -> str | None:
        """The Hub commit that the revision stands for."""
        return self.source.revision if self.source.kind == "hub" else None

    def shards(self) -> list[Shard]:
        """The documents in blocks: a function of the study alone, never of the machine or the number of workers."""
        size = max(1, self.study.shard_tokens // self.context)
        starts = range(0, len(self.documents), size)
        return [Shard(number, tuple(self.documents[at : at + size])) for number, at in enumerate(starts)]

    def fingerprint(self, shard: Shard | None = None) -> str:
        """A hash of everything the moments (of one shard) depend on; equal means they need not be made again."""
        facts = {
            "schema": SCHEMA,
            "model": self.commit or weights_fingerprint(self.source),
            "config": self.checkpoint.config,
            "tokens": self.corpus.tokens_fingerprint(self.context, shard.documents if shard else None),
            "edges": self.layout.edges,
            "groups": self.layout.groups,
            "skip_positions": self.layout.skip_positions,
            "sample": None if self.layout.rate == 1 else [self.layout.rate, self.layout.seed],
            "stage": self.study.stage,
            "dtype": self.study.dtype,
            "batch_tokens": self.study.batch_tokens,
            "shard_tokens": None if shard else self.study.shard_tokens,
        }
        if self.trust_remote_code:
            facts["trust_remote_code"] = True
        return f"sha256:{hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()}"


@dataclass(frozen=True)
class Plan:
    """All of a study's work."""

    file: StudyFile
    checkpoints: list[CheckpointPlan]

    @property
    def study(self) -> Study:
        """The study itself."""
        return self.file.study

    @property
    def disk(self) -> int:
        """Bytes of all moments files."""
        return sum(plan.sizes.file for plan in self.checkpoints)

    @property
    def kind(self) -> Kind:
        """What the checkpoints are to each other: what the study says, else what their architectures tell."""
        return self.study.kind or kind_of([each.architecture for each in self.checkpoints])

    def how_read(self) -> str:
        """How the study's entries are read, in a sentence."""
        return kind_sentence(self.kind, len(self.checkpoints), self.study.kind is not None)

    @property
    def memory(self) -> int:
        """Bytes of the largest checkpoint's sums while it runs."""
        return max(plan.sizes.memory for plan in self.checkpoints)

    @property
    def tokens(self) -> int:
        """Tokens over all checkpoints."""
        return sum(plan.tokens for plan in self.checkpoints)

    def numbered_shards(self) -> list[tuple[CheckpointPlan, Shard]]:
        """Every shard of the study; its place in this list is its number on the command line."""
        return [(each, shard) for each in self.checkpoints for shard in each.shards()]

    def notes(self) -> list[str]:
        """What a careful reader should know before believing a comparison between checkpoints."""
        notes = []
        fewest = min(self.checkpoints, key=lambda plan: len(plan.documents))
        left_out = len(fewest.corpus.documents) - len(fewest.documents)
        if left_out:
            notes.append(
                f"{left_out} of {len(fewest.corpus.documents)} documents are left out at checkpoint "
                f"{fewest.checkpoint.name!r}, because they have fewer than its {fewest.context} tokens"
            )
        counts = {len(plan.documents) for plan in self.checkpoints}
        if len(counts) > 1:
            notes.append(
                f"checkpoints see different documents ({min(counts)} to {max(counts)} of them), because longer "
                "contexts leave more of them out; set documents.min_tokens to the longest context to give all the same"
            )
        short = [plan for plan in self.checkpoints if len(plan.documents) < self.study.groups]
        if short:
            notes.append(
                f"{len(short[0].documents)} documents fill only as many of the {self.study.groups} document groups: "
                "error bars will rest on fewer"
            )
        return notes


def make_plan(
    file: StudyFile, surveyed: Callable[[int], None] = lambda documents: None, *, trust_remote_code: bool = False
) -> Plan:
    """Resolve, check and measure everything; the first thing that is wrong is told with its checkpoint.

    `trust_remote_code` lets Python code that lies with a checkpoint run; a study file cannot ask for it.
    """
    study = file.study
    checkpoints = study.resolved_checkpoints()
    models = []
    for checkpoint in checkpoints:
        with located(f"checkpoint {checkpoint.name!r}"):
            models.append(_model(checkpoint, file.folder, trust_remote_code))
    corpora = _Corpora(file, surveyed)
    plans = []
    for checkpoint, (source, config, layers) in zip(checkpoints, models, strict=True):
        with located(f"checkpoint {checkpoint.name!r}"):
            plans.append(_plan_one(study, checkpoint, source, config, layers, corpora))
    _check_kind(study.kind, plans)
    return Plan(file, plans)


def _check_kind(kind: Kind | None, plans: list[CheckpointPlan]) -> None:
    """Refuse a study that calls different architectures checkpoints of one run, or seeds: they share no heads."""
    first = plans[0]
    for other in plans[1:]:
        if kind not in (None, MODELS) and differ([first.architecture, other.architecture], with_type=False):
            raise InputError(
                f"kind: {kind}, but checkpoints {first.checkpoint.name!r} and {other.checkpoint.name!r} differ in "
                "their layers, heads or widths; write `kind: models`, or leave `kind` out"
            )


def _model(checkpoint: Checkpoint, folder: Path, trust_remote_code: bool) -> tuple[ModelSource, Any, Any]:
    """Everything about the model that its config tells, checked against the study."""
    from qkscope.capture.blueprint import blueprint
    from qkscope.capture.config import check_config, load_config
    from qkscope.capture.hub import pinned

    # From here on the commit, not the branch: config and weights are of one moment.
    found = find_source(checkpoint.model or "", checkpoint.revision, folder, trust_remote_code=trust_remote_code)
    source = pinned(found, "config.json")
    config = load_config(source, checkpoint.config)
    check_config(config, checkpoint.context or 0, checkpoint.expect)
    return source, config, blueprint(config, trust_remote_code=trust_remote_code)


def _plan_one(
    study: Study, checkpoint: Checkpoint, source: ModelSource, config: Any, layers: Any, corpora: _Corpora
) -> CheckpointPlan:
    context = checkpoint.context or 0
    tokenizer_source = source
    if checkpoint.tokenizer is not None:
        tokenizer_source = find_source(
            checkpoint.tokenizer,
            checkpoint.tokenizer_revision,
            corpora.folder,
            trust_remote_code=source.trust_remote_code,
        )
    tokenizer, tokenizer_source, corpus = corpora.under(tokenizer_source)
    edges = bucket_edges(context, study.buckets, also=[study.common_window()])
    return CheckpointPlan(
        checkpoint=checkpoint,
        source=source,
        config=config,
        tokenizer=tokenizer,
        tokenizer_source=tokenizer_source,
        corpus=corpus,
        documents=corpus.usable(context),
        layout=_layout(study, edges),
        blueprint=layers,
        study=study,
    )


def _layout(study: Study, edges: tuple[int, ...]) -> Layout:
    """The sums' axes; the published protocol keeps one token in as many as a bucket has positions."""
    seed = study.sample_seed()
    if seed is None:
        return Layout(edges, study.groups, study.skip_positions)
    return Layout(edges, study.groups, study.skip_positions, published_rate(edges[-1]), seed)


class _Corpora:
    """The documents measured under each tokenizer, once, however many checkpoints share it."""

    def __init__(self, file: StudyFile, surveyed: Callable[[int], None]) -> None:
        self.folder = file.folder
        self._settings = file.study.documents
        self._surveyed = surveyed
        self._by_source: dict[ModelSource, tuple[Any, ModelSource, Corpus]] = {}
        self._by_vocabulary: dict[str, tuple[Any, Corpus]] = {}
        self._count = 0

    def under(self, source: ModelSource) -> tuple[Any, ModelSource, Corpus]:
        """The tokenizer of `source`, the source at its commit, and the corpus measured with it."""
        from qkscope.capture.load import load_tokenizer

        if source not in self._by_source:
            tokenizer, exact = load_tokenizer(source)
            # Ten checkpoints in ten folders usually carry the same tokenizer ten times.
            same = tokenizer_digest(tokenizer)
            if same not in self._by_vocabulary:
                corpus = survey(self._settings, self.folder, tokenizer, lambda document: self._seen())
                self._by_vocabulary[same] = (tokenizer, corpus)
            first, corpus = self._by_vocabulary[same]
            self._by_source[source] = (first, exact, corpus)
        return self._by_source[source]

    def _seen(self) -> None:
        self._count += 1
        self._surveyed(self._count)


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash that is equal for tokenizers that encode alike."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow tokenizer: its class and vocabulary have to do
        described = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    else:
        described = backend.to_str()
    return f"sha256:{hashlib.sha256(f'{described} {tokenizer.bos_token_id}'.encode()).hexdigest()}"
