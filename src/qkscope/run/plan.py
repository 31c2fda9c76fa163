"""What a study will do, learnt without loading a weight: every config checked, every document measured.

A plan is a function of the study and of what it names, never of the machine, so mistakes show before hours of
work and the same study does the same work everywhere.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qkscope.capture.fingerprint import weights_fingerprint
from qkscope.capture.source import ModelSource
from qkscope.documents.tokens import Corpus, group_of
from qkscope.errors import InputError, MomentsFileError, located
from qkscope.kinds import Architecture, StudyKind, kind_of, kind_sentence, require_kind
from qkscope.lenses.heads import choose_heads, layer_choice
from qkscope.moments.header import SCHEMA, read_header
from qkscope.moments.layout import Layout, capture_layout
from qkscope.moments.sizes import FEW_GROUPS, Sizes, default_groups, predict_sizes
from qkscope.results.environment import numeric_versions
from qkscope.results.folder import moments_folder, moments_path, tokens_path
from qkscope.run.corpora import Corpora
from qkscope.run.events import Events
from qkscope.run.models import Model, check_equal_weights, open_models
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.study.load import StudyFile
from qkscope.study.schema import Checkpoint, Study
from qkscope.text import are, counted
from qkscope.vectors.sample import published_rate

NAMED = 3  # duplicates that a note names


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
    tokenizer_fingerprint: str  # equal for tokenizers that encode alike
    corpus: Corpus
    documents: list[int]  # indices into the corpus
    layout: Layout
    blueprint: Any  # capture.blueprint.Blueprint
    study: Study = field(repr=False)
    duplicates: dict[int, int] = field(default_factory=dict)  # documents left out, and the one with the same tokens

    @property
    def too_short(self) -> int:
        """How many documents were left out for having too few tokens."""
        return len(self.corpus.documents) - len(self.documents) - len(self.duplicates)

    @property
    def alike(self) -> int:
        """How many documents have the same tokens as another within this context, and differ only behind it."""
        known = self.corpus.documents
        return len(self.documents) - len({known[index].prefixes[self.context] for index in self.documents})

    @property
    def uncertain(self) -> int:
        """How many documents' ids are not certain to be those of the whole text."""
        return sum(not self.corpus.documents[index].exact for index in self.documents)

    @property
    def filled_groups(self) -> set[int]:
        """The document groups that have documents."""
        return {group_of(index, self.layout.groups) for index in self.documents}

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
    def last_layer(self) -> int | None:
        """The last layer that the study analyses, where the model has later ones: a pass need not go further."""
        layers = self.blueprint.probe.layers
        chosen = max(choose_heads(layers, None, layer_choice(self.study)))
        return chosen if chosen < max(facts.layer for facts in layers) else None

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
            "model": weights_fingerprint(self.source) or self.commit,
            "config": self.checkpoint.config,
            "tokens": self.corpus.tokens_fingerprint(self.context, shard.documents if shard else self.documents),
            "edges": self.layout.edges,
            "groups": self.layout.groups,
            "common_window": self.layout.common,
            "unrotated_every": self.layout.unrotated_every,
            "sample": None if self.layout.rate == 1 else [self.layout.rate, self.layout.seed],
            "stage": self.study.stage,
            "last_layer": self.last_layer,
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
            "tokenizer": self.tokenizer_fingerprint,
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
    def kind(self) -> StudyKind:
        """What the checkpoints are to each other: what the study says, or the runs that it names."""
        return self.study.kind or kind_of([each.checkpoint.run for each in self.checkpoints])

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
        if fewest.too_short:
            longest = max(plan.context for plan in self.checkpoints)
            needed = longest if self.study.same_documents else fewest.context
            notes.append(
                f"{fewest.too_short} of {counted(len(fewest.corpus.documents), 'document')} {are(fewest.too_short)} "
                f"left out at checkpoint {fewest.checkpoint.name!r} for having fewer than {counted(needed, 'token')}"
                + ("; same_documents: false lets shorter contexts see more of them" if needed > fewest.context else "")
            )
        counts = {len(plan.documents) for plan in self.checkpoints}
        if len(counts) > 1:
            notes.append(
                f"checkpoints see different documents ({min(counts)} to {max(counts)} of them), because longer "
                "contexts, or other tokenizers, leave more of them out: differences between checkpoints are partly "
                "differences between documents"
            )
        return notes + _duplicate_notes(self.checkpoints) + _group_notes(self.checkpoints)


def _duplicate_notes(plans: list[CheckpointPlan]) -> list[str]:
    """Documents that count once, those that a short context does not distinguish, and those with uncertain tokens."""
    notes = []
    most = max(plans, key=lambda plan: len(plan.duplicates))
    if count := len(most.duplicates):
        known = most.corpus.documents
        pairs = [f"{known[copy].name} = {known[first].name}" for copy, first in most.duplicates.items()]
        shown = ", ".join(pairs[:NAMED]) + (", ..." if count > NAMED else "")
        notes.append(
            f"{count} of {counted(len(known), 'document')} {are(count)} left out at checkpoint "
            f"{most.checkpoint.name!r} for having the same tokens as an earlier document ({shown})"
        )
    alike = max(plans, key=lambda plan: plan.alike)
    if alike.alike:
        notes.append(
            f"checkpoint {alike.checkpoint.name!r}: {alike.alike} of {counted(len(alike.documents), 'document')} "
            f"{'begins' if alike.alike == 1 else 'begin'} with the same {counted(alike.context, 'token')} as another "
            "and only later differ, so its standard errors are too small; use documents with different beginnings"
        )
    uncertain = max(plans, key=lambda plan: plan.uncertain)
    if uncertain.uncertain:
        notes.append(
            f"checkpoint {uncertain.checkpoint.name!r}: {counted(uncertain.uncertain, 'document')} had to be cut where "
            "the tokens before the cut may depend on the text behind it, so their ids may differ from those of the "
            "whole text (docs/study-files.md, Long texts)"
        )
    return notes


def _group_notes(plans: list[CheckpointPlan]) -> list[str]:
    """Standard errors that rest on fewer groups than the study asks for, or that do not exist."""
    fewest = min(plans, key=lambda plan: len(plan.filled_groups))
    filled, groups = len(fewest.filled_groups), fewest.layout.groups
    if filled == groups:
        return []
    effect = (
        f"standard errors rest on {counted(filled, 'group')}"
        if filled >= FEWEST_GROUPS
        else f"it has no standard errors, which need documents in {FEWEST_GROUPS} groups"
    )
    return [
        f"checkpoint {fewest.checkpoint.name!r} reads {counted(len(fewest.documents), 'document')} in {filled} of "
        f"{counted(groups, 'document group')}: {effect}; add documents"
    ]


def make_plan(
    file: StudyFile,
    events: Events = Events(),  # noqa: B008 - says nothing
    *,
    here: bool = True,
    trust_remote_code: bool = False,
    results: Path | None = None,
    check_tensors: bool = True,
) -> Plan:
    """Resolve, check and measure everything; the first thing that is wrong is an error that names its checkpoint.

    `here` says that this machine will do the work, so that it must have the study's device.
    `trust_remote_code` lets Python code that lies with a checkpoint run; a study file cannot ask for it.
    `results` is a folder in which an earlier run may have kept the documents' tokens; nothing is written there.
    `check_tensors` refuses checkpoints whose tensors do not fit their config; without it, loading them does.
    """
    models = open_models(
        file, events.noted, here=here, trust_remote_code=trust_remote_code, check_tensors=check_tensors
    )
    corpora = Corpora(file, events.surveying, results)
    for model in models:
        with located(f"checkpoint {model.checkpoint.name!r}"):
            corpora.need(model.tokenizer_source, model.checkpoint.context or 0)
    remarks = check_equal_weights(models, lambda model: corpora.digest(model.tokenizer_source), events.noted)
    plans = []
    for model in models:
        with located(f"checkpoint {model.checkpoint.name!r}"):
            plans.append(_plan_one(file.study, model, corpora))
    require_kind(file.study.kind, [(each.checkpoint.name, each.architecture) for each in plans])
    return Plan(file, _with_groups(plans, file.study, results), [*file.notes, *remarks])


def _with_groups(plans: list[CheckpointPlan], study: Study, results: Path | None) -> list[CheckpointPlan]:
    """The same plans with one number of document groups: the study's, that of moments already there, or the default."""
    if study.groups is not None or not plans:
        return plans
    own = [moments_path(results, each.checkpoint.name) for each in plans] if results else []
    others = sorted(moments_folder(results).glob("*.safetensors")) if results else []
    groups = next((number for number in map(_groups_there, own + others) if number), 0) or default_groups(
        min(len(each.documents) for each in plans), [(each.layout, each.blueprint.probe.layers) for each in plans]
    )
    return [replace(each, layout=replace(each.layout, groups=groups)) for each in plans]


def _groups_there(path: Path) -> int | None:
    try:
        return read_header(path).layout.groups if path.exists() else None
    except MomentsFileError:
        return None


def with_tokens_kept(plan: Plan, folder: Path) -> Plan:
    """The same plan with the documents' tokens in a results folder, where whoever comes next finds them."""
    there: dict[int, Corpus] = {}
    for corpus in (each.corpus for each in plan.checkpoints):
        if id(corpus) not in there:
            there[id(corpus)] = corpus.stored_at(tokens_path(folder, corpus.key))
    return replace(plan, checkpoints=[replace(each, corpus=there[id(each.corpus)]) for each in plan.checkpoints])


def _plan_one(study: Study, model: Model, corpora: Corpora) -> CheckpointPlan:
    context = model.checkpoint.context or 0
    tokenizer, tokenizer_source, corpus = corpora.under(model.tokenizer_source)
    chosen = corpus.choose(corpora.longest(model.tokenizer_source) if study.same_documents else context)
    return CheckpointPlan(
        checkpoint=model.checkpoint,
        source=model.source,
        config=model.config,
        tokenizer=tokenizer,
        tokenizer_source=tokenizer_source,
        tokenizer_fingerprint=corpora.digest(model.tokenizer_source),
        corpus=corpus,
        documents=chosen.documents,
        layout=_layout(
            study, context, study.window_in_common() or _characters(study, context, corpus, chosen.documents)
        ),
        blueprint=model.blueprint,
        study=study,
        duplicates=chosen.duplicates,
    )


def _characters(study: Study, context: int, corpus: Corpus, documents: list[int]) -> int:
    """The common window of a study that says it in characters, in tokens of one tokenizer."""
    characters, window = corpus.characters or 0, corpus.window_of_characters(documents)
    said = f"the first {characters:,} characters of its documents (common_window) are {counted(window, 'token')}"
    if window > context:
        raise InputError(
            f"{said} on average, more than its context of {context:,}: there is no window that all checkpoints share; "
            f"give it a longer context, or about {characters * context // window:,} characters at most"
        )
    if window <= study.skip_positions + 1:
        raise InputError(f"{said} on average, all of which skip_positions {study.skip_positions} would skip")
    return window


def _layout(study: Study, context: int, common: int) -> Layout:
    """The sums' axes; the published protocol keeps on average one token per position bucket."""
    seed = study.sample_seed()
    layout = capture_layout(
        context,
        buckets=study.buckets,
        groups=study.groups or FEW_GROUPS,
        common=common,
        skip=study.skip_positions,
        sample=None if seed is None else (published_rate(context), seed),
    )
    # Vectors that are taken before rotation have nothing to be turned back.
    return layout if study.stage == "post_rope" else replace(layout, unrotated_every=0)
