"""Plan a study without loading a weight: check every config, tokenize every document.

Mistakes show before hours of work, and the same study does the same work everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qkscope.capture.fingerprint import tokenizer_files_fingerprint
from qkscope.capture.source import ModelSource
from qkscope.documents.tokens import Corpus, load_corpus, survey, tokens_key
from qkscope.errors import InputError, MomentsFileError, located
from qkscope.kinds import StudyKind, kind_of, kind_sentence, require_kind
from qkscope.moments.file import read_header
from qkscope.moments.layout import Layout, capture_layout
from qkscope.moments.sizes import FEW_GROUPS, default_groups
from qkscope.results.folder import moments_folder, moments_path, tokens_path
from qkscope.run.checkpoint_plan import CheckpointPlan, Shard
from qkscope.run.events import Events
from qkscope.run.models import Model, check_equal_weights, open_models
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.study.load import StudyFile
from qkscope.study.schema import Study
from qkscope.text import are, counted

NAMED = 3  # duplicates that a note names


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

    def chosen(self, names: Collection[str]) -> list[CheckpointPlan]:
        """The checkpoints of these names; all of them if no names are given."""
        return [each for each in self.checkpoints if not names or each.checkpoint.name in names]

    @property
    def disk(self) -> int:
        """Bytes of all moments files."""
        return sum(plan.sizes.file for plan in self.checkpoints)

    @property
    def kind(self) -> StudyKind:
        """What the checkpoints are to each other: what the study says, or the runs that it names."""
        return self.study.kind or kind_of([each.checkpoint.run for each in self.checkpoints])

    def how_read(self) -> str:
        """How the study's checkpoints are related, in a sentence."""
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
        """Every shard of the study; its index in this list is its number on the command line."""
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
    """Documents that are copies, that a short context does not distinguish, or whose tokens are uncertain."""
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
            "whole text (`qkscope docs study-files`, Long texts)"
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
    """Resolve and check everything; the first problem is an error that names its checkpoint.

    `here`: this machine will do the work, so it must have the study's device.
    `trust_remote_code`: allow Python code that comes with a checkpoint to run; a study file cannot ask for it.
    `results`: a folder in which an earlier run may have stored the documents' tokens; nothing is written there.
    `check_tensors`: refuse checkpoints whose tensors do not fit their config now, not when they are loaded.
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
    """The plans with one number of document groups: the study's, that of existing moments, or the default."""
    if study.groups is not None or not plans:
        return plans
    own = [moments_path(results, each.checkpoint.name) for each in plans] if results else []
    others = sorted(moments_folder(results).glob("*.safetensors")) if results else []
    groups = next((number for number in map(_groups_in, own + others) if number), 0) or default_groups(
        min(len(each.documents) for each in plans), [(each.layout, each.blueprint.probe.layers) for each in plans]
    )
    return [replace(each, layout=replace(each.layout, groups=groups)) for each in plans]


def _groups_in(path: Path) -> int | None:
    try:
        return read_header(path).layout.groups if path.exists() else None
    except MomentsFileError:
        return None


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
    """The common window of a study that states it in characters, in tokens of one tokenizer."""
    characters, window = corpus.index.characters or 0, corpus.window_of_characters(documents)
    stated = f"the first {characters:,} characters of its documents (common_window) are {counted(window, 'token')}"
    if window > context:
        raise InputError(
            f"{stated} on average, more than its context of {context:,}: there is no window that all checkpoints "
            f"share; give it a longer context, or about {characters * context // window:,} characters at most"
        )
    if window <= study.skip_positions + 1:
        raise InputError(f"{stated} on average, all of which skip_positions {study.skip_positions} would skip")
    return window


def _layout(study: Study, context: int, common: int) -> Layout:
    """The axes of the sums; the published protocol keeps one token per position bucket on average."""
    from qkscope.validation.layout import published_rate

    seed = 0 if study.protocol == "published" else None  # None: every token counts
    layout = capture_layout(
        context,
        buckets=study.buckets,
        groups=study.groups or FEW_GROUPS,
        common=common,
        skip=study.skip_positions,
        sample=None if seed is None else (published_rate(context), seed),
    )
    # With `stage: pre_rope`, vectors are captured before rotation: there is nothing to undo.
    return layout if study.stage == "post_rope" else replace(layout, unrotated_every=0)


# -- documents -----------------------------------------------------------------------------------------------


class Corpora:
    """The documents, tokenized once under each tokenizer however many checkpoints share it.

    All contexts are named first (`need`), so that documents are tokenized once, as far as the longest context.
    """

    def __init__(self, file: StudyFile, on_document: Callable[[int], None], results: Path | None) -> None:
        self._file, self._on_document, self._results = file, on_document, results
        self._by_source: dict[ModelSource, tuple[str, ModelSource]] = {}  # digest, source at its commit
        # By digest: ten checkpoints in ten folders usually have ten copies of one tokenizer.
        self._tokenizers: dict[str, Any] = {}
        self._digest_of_files: dict[str, str] = {}  # so that equal files are loaded once
        self._contexts: dict[str, set[int]] = {}
        self._corpora: dict[str, Corpus] = {}
        self._documents = 0

    def need(self, source: ModelSource, context: int) -> None:
        """A checkpoint with the tokenizer of `source` will read this many tokens of each document."""
        if source not in self._by_source:
            files = tokenizer_files_fingerprint(source)
            known = None if files is None else self._digest_of_files.get(files)
            self._by_source[source] = (known, source) if known else self._load(source)
            if files is not None:
                self._digest_of_files[files] = self.digest(source)
        self._contexts.setdefault(self.digest(source), set()).add(context)

    def _load(self, source: ModelSource) -> tuple[str, ModelSource]:
        from qkscope.capture.load import load_tokenizer

        tokenizer, exact = load_tokenizer(source)
        digest = tokenizer_digest(tokenizer)
        self._tokenizers.setdefault(digest, tokenizer)
        return digest, exact

    def longest(self, source: ModelSource) -> int:
        """The longest context of all checkpoints with this tokenizer."""
        return max(self._contexts[self.digest(source)])

    def digest(self, source: ModelSource) -> str:
        """Equal for sources whose tokenizers encode alike."""
        return self._by_source[source][0]

    def under(self, source: ModelSource) -> tuple[Any, ModelSource, Corpus]:
        """The tokenizer of `source`, the source at its commit, and the documents in its tokens."""
        digest, exact = self._by_source[source]
        if digest not in self._corpora:
            self._corpora[digest] = self._tokenized(digest)
        return self._tokenizers[digest], exact, self._corpora[digest]

    def _tokenized(self, digest: str) -> Corpus:
        """The documents as an earlier run tokenized them, if they are still the same, or tokenized now."""
        study, folder, contexts = self._file.study, self._file.folder, self._contexts[digest]
        characters = study.characters_in_common
        key = tokens_key(study.documents, digest, contexts, characters)
        if self._results is not None:
            stored = load_corpus(tokens_path(self._results, key), key, study.documents, folder)
            if stored is not None:
                return stored
        tokenizer = self._tokenizers[digest]
        return survey(study.documents, folder, tokenizer, contexts, self._read_one, key=key, characters=characters)

    def _read_one(self, _: Any) -> None:
        self._documents += 1
        self._on_document(self._documents)


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash that is equal for tokenizers that encode alike."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow tokenizer: its class and vocabulary have to do
        described = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    else:
        described = backend.to_str()
    return f"sha256:{hashlib.sha256(f'{described} {tokenizer.bos_token_id}'.encode()).hexdigest()}"


def with_tokens_kept(plan: Plan, folder: Path) -> Plan:
    """The same plan with the documents' tokens stored in a results folder, for workers and later runs."""
    stored: dict[int, Corpus] = {}
    for corpus in (each.corpus for each in plan.checkpoints):
        if id(corpus) not in stored:
            stored[id(corpus)] = corpus.stored_at(tokens_path(folder, corpus.index.key))
    return replace(plan, checkpoints=[replace(each, corpus=stored[id(each.corpus)]) for each in plan.checkpoints])
