"""Plan a study without loading a weight: check every config, tokenize every document.

Mistakes show before hours of work, and the same study does the same work everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from qkscope.capture.fingerprint import tokenizer_files_fingerprint
from qkscope.capture.source import ModelSource
from qkscope.documents.tokens import Corpus, load_corpus, survey, tokens_key
from qkscope.errors import InputError, MomentsFileError, located
from qkscope.kinds import Architecture, StudyKind, kind_of, kind_sentence, require_kind
from qkscope.moments.file import read_header
from qkscope.moments.layout import Layout, capture_layout
from qkscope.moments.sizes import FEW_GROUPS, default_groups
from qkscope.results.folder import moments_folder, moments_path, tokens_path
from qkscope.run.checkpoint_plan import CheckpointPlan, Shard
from qkscope.run.models import Model, check_equal_weights, open_models
from qkscope.run.progress import Events
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.study.load import StudyFile
from qkscope.study.schema import Study
from qkscope.text import are, byte_size, counted

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
    def kind(self) -> StudyKind:
        """What the checkpoints are to each other: what the study says, or the runs that it names."""
        return self.study.kind or kind_of([each.checkpoint.run for each in self.checkpoints])

    def how_read(self) -> str:
        """How the study's checkpoints are related, in a sentence."""
        return kind_sentence(self.kind, len(self.checkpoints), self.study.kind is not None)

    def cost_line(self) -> str:
        """Memory and disk that a run takes, predicted."""
        sizes = [plan.sizes for plan in self.checkpoints]
        files = [size.file for size in sizes]
        least, most = byte_size(min(files)), byte_size(max(files))
        memory, each = byte_size(max(size.memory for size in sizes)), most if least == most else f"{least} to {most}"
        disk = f"{each} on disk per checkpoint, {byte_size(sum(files))} in total"
        return f"sums: {memory} of memory where the layers run, {disk}"

    @property
    def tokens(self) -> int:
        """Tokens over all checkpoints."""
        return sum(plan.tokens for plan in self.checkpoints)

    def numbered_shards(self) -> list[tuple[CheckpointPlan, Shard]]:
        """Every shard of the study; its index in this list is its number on the command line."""
        return [(each, shard) for each in self.checkpoints for shard in each.shards()]

    def notes(self) -> list[str]:
        """What a careful reader should know before believing a comparison between checkpoints."""
        plans, notes = self.checkpoints, list(self.remarks)
        fewest = min(plans, key=lambda plan: len(plan.documents))
        if fewest.too_short:
            longest = max(plan.context for plan in plans)
            needed = longest if self.study.same_documents else fewest.context
            notes.append(
                f"{fewest.too_short} of {counted(len(fewest.corpus.documents), 'document')} {are(fewest.too_short)} "
                f"left out at checkpoint {fewest.checkpoint.name!r} for having fewer than {counted(needed, 'token')}"
                + ("; same_documents: false lets shorter contexts see more of them" if needed > fewest.context else "")
            )
        counts = {len(plan.documents) for plan in plans}
        if len(counts) > 1:
            notes.append(
                f"checkpoints see different documents ({min(counts)} to {max(counts)} of them), because longer "
                "contexts, or other tokenizers, leave more of them out: differences between checkpoints are partly "
                "differences between documents"
            )
        return notes + _duplicate_notes(plans) + _group_notes(plans)


def _duplicate_notes(plans: Sequence[CheckpointPlan]) -> list[str]:
    """Documents that are copies, that a short context does not distinguish, or whose tokens are uncertain."""
    notes = []
    most = max(plans, key=lambda plan: len(plan.duplicates))
    if copies := len(most.duplicates):
        known = most.corpus.documents
        pairs = [f"{known[copy].name} = {known[first].name}" for copy, first in most.duplicates.items()]
        shown = ", ".join(pairs[:NAMED]) + (", ..." if copies > NAMED else "")
        notes.append(
            f"{copies} of {counted(len(known), 'document')} {are(copies)} left out at checkpoint "
            f"{most.checkpoint.name!r} for having the same tokens as an earlier document ({shown})"
        )
    # Documents with the same tokens as another within this context, which differ only later.
    alike = [
        len(plan.documents) - len({plan.corpus.documents[index].prefixes[plan.context] for index in plan.documents})
        for plan in plans
    ]
    if number := max(alike):
        plan = plans[alike.index(number)]
        notes.append(
            f"checkpoint {plan.checkpoint.name!r}: {number} of {counted(len(plan.documents), 'document')} "
            f"{'begins' if number == 1 else 'begin'} with the same {counted(plan.context, 'token')} as another "
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


def _group_notes(plans: Sequence[CheckpointPlan]) -> list[str]:
    """Standard errors that rest on fewer groups than the study asks for, or that do not exist."""
    filled_groups = [len({index % plan.layout.groups for index in plan.documents}) for plan in plans]
    filled = min(filled_groups)
    fewest = plans[filled_groups.index(filled)]
    groups = fewest.layout.groups
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
    tokenizers = _load_tokenizers(models)
    remarks = check_equal_weights(models, lambda model: tokenizers[model.tokenizer_source].digest, events.noted)
    read = count(1)
    plans: list[CheckpointPlan] = []
    corpora: dict[str, Corpus] = {}
    for model in models:
        tokenizer = tokenizers[model.tokenizer_source]
        with located(f"checkpoint {model.checkpoint.name!r}"):
            if tokenizer.digest not in corpora:  # tokenized once, as far as the longest context of all
                corpora[tokenizer.digest] = _tokenize(file, tokenizer, results, lambda: events.surveying(next(read)))
            plans.append(_plan_one(file.study, model, tokenizer, corpora[tokenizer.digest]))
    shapes = [
        Architecture.of_layers(
            getattr(each.config, "model_type", None), each.blueprint.probe.n_layers, each.blueprint.probe.layers
        )
        for each in plans
    ]
    require_kind(file.study.kind, [(each.checkpoint.name, shape) for each, shape in zip(plans, shapes, strict=True)])
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


def _plan_one(study: Study, model: Model, tokenizer: LoadedTokenizer, corpus: Corpus) -> CheckpointPlan:
    context = model.checkpoint.context or 0
    chosen = corpus.choose(max(tokenizer.contexts) if study.same_documents else context)
    common = study.window_in_common() or _characters(study, context, corpus, chosen.documents)
    return CheckpointPlan(
        checkpoint=model.checkpoint,
        source=model.source,
        config=model.config,
        tokenizer=tokenizer.tokenizer,
        tokenizer_source=tokenizer.source,
        tokenizer_fingerprint=tokenizer.digest,
        corpus=corpus,
        documents=chosen.documents,
        layout=_layout(study, context, common),
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
        rows=study.attention_rows,
        repeated=study.head_types,
    )
    # With `stage: pre_rope`, vectors are captured before rotation: there is nothing to undo.
    return layout if study.stage == "post_rope" else replace(layout, unrotated_every=0, rows=0, repeated=0)


# -- documents -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer of some of the checkpoints; ten of them in ten folders usually have ten copies of one."""

    source: ModelSource  # at its commit
    tokenizer: Any
    digest: str  # equal for tokenizers that encode alike
    contexts: set[int]  # of all checkpoints with tokenizers that encode alike


def _load_tokenizers(models: Sequence[Model]) -> dict[ModelSource, LoadedTokenizer]:
    """The tokenizers of all models, by where they are from; equal files are loaded once."""
    from qkscope.capture.load import load_tokenizer

    by_source: dict[ModelSource, LoadedTokenizer] = {}
    by_files: dict[str, LoadedTokenizer] = {}
    by_digest: dict[str, LoadedTokenizer] = {}
    for model in models:
        source = model.tokenizer_source
        with located(f"checkpoint {model.checkpoint.name!r}"):
            if source not in by_source:
                files = tokenizer_files_fingerprint(source)
                if files is not None and files in by_files:
                    by_source[source] = replace(by_files[files], source=source)
                else:
                    tokenizer, exact = load_tokenizer(source)
                    digest = tokenizer_digest(tokenizer)
                    first = by_digest.setdefault(digest, LoadedTokenizer(exact, tokenizer, digest, set()))
                    by_source[source] = replace(first, source=exact)
                if files is not None:
                    by_files[files] = by_source[source]
            by_source[source].contexts.add(model.checkpoint.context or 0)
    return by_source


def _tokenize(
    file: StudyFile, tokenizer: LoadedTokenizer, results: Path | None, on_document: Callable[[], None]
) -> Corpus:
    """The documents as an earlier run tokenized them, if they are still the same, or tokenized now."""
    study, contexts = file.study, tokenizer.contexts
    characters = study.characters_in_common
    key = tokens_key(study.documents, tokenizer.digest, contexts, characters)
    if results is not None:
        stored = load_corpus(tokens_path(results, key), key, study.documents, file.folder)
        if stored is not None:
            return stored
    return survey(
        study.documents,
        file.folder,
        tokenizer.tokenizer,
        contexts,
        lambda _: on_document(),
        key=key,
        characters=characters,
    )


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
