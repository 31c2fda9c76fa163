"""What a study will do, learnt without loading a weight: every config checked, every document measured.

A plan is a function of the study and of what it names, never of the machine, so mistakes show before hours of
work and the same study does the same work everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qkscope.capture.source import ModelSource, weights_fingerprint
from qkscope.documents.tokens import Corpus, survey
from qkscope.errors import InputError, located
from qkscope.kinds import MODELS, Architecture, Kind, differ, kind_of, kind_sentence
from qkscope.moments.file import SCHEMA
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.sizes import Sizes, predict_sizes
from qkscope.results.environment import numeric_versions
from qkscope.run.events import Events
from qkscope.run.models import Model, check_equal_weights, open_models
from qkscope.study.load import StudyFile
from qkscope.study.schema import Checkpoint, Study
from qkscope.text import are, counted
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
        facts = self._facts(shard)
        return f"sha256:{hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()}"

    def _facts(self, shard: Shard | None) -> dict[str, Any]:
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
        if shard:  # parts of one sum are made by one version of everything; a finished sum says which made it
            facts["versions"] = numeric_versions()
        return facts

    def settings(self) -> dict[str, Any]:
        """What the checkpoint's moments depend on, told apart: kept with them, so that a change can be named."""
        seen = (f"{index} {self.corpus.documents[index].digest}" for index in self.documents)
        return {
            **self._facts(None),
            "edges": list(self.layout.edges),
            "context": self.context,
            "buckets": self.study.buckets,
            "documents": f"sha256:{hashlib.sha256(' '.join(seen).encode()).hexdigest()}",
            "tokenizer": tokenizer_digest(self.tokenizer),
            "special_tokens": self.corpus.settings.special_tokens,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass(frozen=True)
class Plan:
    """All of a study's work."""

    file: StudyFile
    checkpoints: list[CheckpointPlan]
    remarks: list[str] = field(default_factory=list)  # what was noticed about the models

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
        notes = list(self.remarks)
        fewest = min(self.checkpoints, key=lambda plan: len(plan.documents))
        left_out = len(fewest.corpus.documents) - len(fewest.documents)
        if left_out:
            notes.append(
                f"{left_out} of {counted(len(fewest.corpus.documents), 'document')} {are(left_out)} left out at "
                f"checkpoint {fewest.checkpoint.name!r} for having fewer than its {counted(fewest.context, 'token')}"
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
                f"checkpoint {short[0].checkpoint.name!r} sees {counted(len(short[0].documents), 'document')}, fewer "
                f"than the {counted(self.study.groups, 'document group')}: error bars will rest on fewer groups"
            )
        return notes


def make_plan(
    file: StudyFile,
    events: Events = Events(),  # noqa: B008 - says nothing
    *,
    here: bool = True,
    trust_remote_code: bool = False,
) -> Plan:
    """Resolve, check and measure everything; the first thing that is wrong is an error that names its checkpoint.

    `here` says that this machine will do the work, so that it must have the study's device.
    `trust_remote_code` lets Python code that lies with a checkpoint run; a study file cannot ask for it.
    """
    models = open_models(file, events.noted, here=here, trust_remote_code=trust_remote_code)
    corpora = _Corpora(file, events.surveying)
    for model in models:
        with located(f"checkpoint {model.checkpoint.name!r}"):
            corpora.need(model.tokenizer_source, model.checkpoint.context or 0)
    remarks = check_equal_weights(models, lambda model: corpora.digest(model.tokenizer_source))
    plans = []
    for model in models:
        with located(f"checkpoint {model.checkpoint.name!r}"):
            plans.append(_plan_one(file.study, model, corpora))
    _check_kind(file.study.kind, plans)
    return Plan(file, plans, remarks)


def _check_kind(kind: Kind | None, plans: list[CheckpointPlan]) -> None:
    """Refuse a study that calls different architectures checkpoints of one run, or seeds: they share no heads."""
    first = plans[0]
    for other in plans[1:]:
        if kind not in (None, MODELS) and differ([first.architecture, other.architecture], with_type=False):
            raise InputError(
                f"kind: {kind}, but checkpoints {first.checkpoint.name!r} and {other.checkpoint.name!r} differ in "
                "their layers, heads or widths; write `kind: models`, or leave `kind` out"
            )


def _plan_one(study: Study, model: Model, corpora: _Corpora) -> CheckpointPlan:
    context = model.checkpoint.context or 0
    tokenizer, tokenizer_source, corpus = corpora.under(model.tokenizer_source)
    edges = bucket_edges(context, study.buckets, also=[study.window_in_common()])
    return CheckpointPlan(
        checkpoint=model.checkpoint,
        source=model.source,
        config=model.config,
        tokenizer=tokenizer,
        tokenizer_source=tokenizer_source,
        corpus=corpus,
        documents=corpus.usable(context),
        layout=_layout(study, edges),
        blueprint=model.blueprint,
        study=study,
    )


def _layout(study: Study, edges: tuple[int, ...]) -> Layout:
    """The sums' axes; the published protocol keeps one token in as many as a bucket has positions."""
    seed = study.sample_seed()
    if seed is None:
        return Layout(edges, study.groups, study.skip_positions)
    return Layout(edges, study.groups, study.skip_positions, published_rate(edges[-1]), seed)


class _Corpora:
    """The documents measured under each tokenizer, once, however many checkpoints share it.

    All contexts are named first (`need`), so that the documents are tokenized only once, as far as the longest of them.
    """

    def __init__(self, file: StudyFile, surveyed: Callable[[int], None]) -> None:
        self.folder = file.folder
        self._settings = file.study.documents
        self._surveyed = surveyed
        self._by_source: dict[ModelSource, tuple[str, ModelSource]] = {}  # digest of the tokenizer, its exact source
        # By digest: ten checkpoints in ten folders usually carry the same tokenizer ten times.
        self._tokenizers: dict[str, Any] = {}
        self._contexts: dict[str, set[int]] = {}
        self._corpora: dict[str, Corpus] = {}
        self._count = 0

    def need(self, source: ModelSource, context: int) -> None:
        """A checkpoint with the tokenizer of `source` will be shown so many tokens of each document."""
        from qkscope.capture.load import load_tokenizer

        if source not in self._by_source:
            tokenizer, exact = load_tokenizer(source)
            same = tokenizer_digest(tokenizer)
            self._tokenizers.setdefault(same, tokenizer)
            self._by_source[source] = (same, exact)
        self._contexts.setdefault(self._by_source[source][0], set()).add(context)

    def digest(self, source: ModelSource) -> str:
        """Equal for sources whose tokenizers encode alike."""
        return self._by_source[source][0]

    def under(self, source: ModelSource) -> tuple[Any, ModelSource, Corpus]:
        """The tokenizer of `source`, the source at its commit, and the corpus measured with it."""
        same, exact = self._by_source[source]
        tokenizer = self._tokenizers[same]
        if same not in self._corpora:
            contexts = self._contexts[same]
            self._corpora[same] = survey(self._settings, self.folder, tokenizer, contexts, lambda _: self._seen())
        return tokenizer, exact, self._corpora[same]

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
