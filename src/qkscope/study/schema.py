"""The study file's keys, their types, their defaults and why those are the defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from qkscope.kinds import StudyKind
from qkscope.layers import Stage
from qkscope.study.values import file_safe, locatable, overrides, plain_text

# The published study: 300 heads of full-attention layers. Tokens are sampled at 1 / bucket size, see `sampling`.
ATTENTION_ROWS = 8  # over heads, their means correlate .996 to .9985 with those of all rows
PUBLISHED_PROTOCOL: dict[str, Any] = {"heads": {"sample": 300, "seed": 0}, "layers": "full", "buckets": 16}
MOST_IN_DETAIL = 20  # checkpoints; 20 of a 3B model have about 50 MB in each table with a row per head and bucket

Name = Annotated[str, AfterValidator(file_safe)]
ShortText = Annotated[str, Field(max_length=200), AfterValidator(plain_text)]
Location = Annotated[str, AfterValidator(locatable)]  # a path, a glob, a Hub id, a revision, a column
Positive = Annotated[int, Field(ge=1, lt=2**53)]
# Token counts are bounded so that a slip (4096e6) is found before memory is asked for.
TokenCount = Annotated[int, Field(ge=2, le=2**24)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Tags = Annotated[dict[ShortText, ShortText], Field(max_length=32)]
Overrides = Annotated[dict[str, Any], AfterValidator(overrides)]
TrainingAmount = Annotated[int | float, Field(ge=0, le=1e18)]  # steps, or training tokens


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Phase(_Strict):
    """What the checkpoints of one training phase have in common."""

    context: TokenCount | None = None
    config: Overrides | None = None
    expect: Overrides | None = None


class Checkpoint(_Strict):
    """One row of the study: where the weights are and how long its context is."""

    name: Name
    model: Location | None = None  # Hub id, local directory or .gguf file; the study's by default
    revision: Location | None = None
    tokenizer: Location | None = None  # the study's by default, else the model's own
    tokenizer_revision: Location | None = None
    label: ShortText | None = None  # short, for axes; the name by default
    phase: ShortText | None = None
    context: TokenCount | None = None  # the phase's by default
    config: Overrides | None = None  # changes to the model's config, for instance RoPE scaling
    expect: Overrides | None = None  # config values that must be found before anything is run
    family: ShortText | None = None  # of models: what figures colour by, and joins leave out together
    parameters: Positive | None = None  # their number; counted from the weights by default
    tags: Tags | None = None  # anything else to be kept with the entry, by name
    step: TrainingAmount | None = None  # of training; a place on the x axis
    tokens: TrainingAmount | None = None  # that it was trained on; likewise
    run: ShortText | None = None  # which of several runs, or seeds, it is of
    base: Location | None = None  # of an adapter: the model it belongs to; what the adapter names by default
    base_revision: Location | None = None


class Series(_Strict):
    """Several checkpoints at once: folders, or branches of a repository; the other keys apply to each of them."""

    folder: Location | None = None  # a glob, relative to the study file
    revisions: Location | None = None  # a pattern over the branches of `model`
    exclude: list[Location] | None = None  # patterns of names that are not taken
    every: Positive | None = None  # each of these four chooses; what any of them chooses is in
    first: Positive | None = None
    last: Positive | None = None
    log: Positive | None = None  # so many, evenly spaced along the logarithm of the step
    prefix: Annotated[str, Field(max_length=40), AfterValidator(file_safe)] | None = None  # of names and labels
    model: Location | None = None
    tokenizer: Location | None = None
    tokenizer_revision: Location | None = None
    phase: ShortText | None = None
    context: TokenCount | None = None
    config: Overrides | None = None
    expect: Overrides | None = None
    run: ShortText | None = None
    base: Location | None = None
    base_revision: Location | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.folder is None) == (self.revisions is None):
            raise ValueError("give either `folder` or `revisions`")
        if self.folder is not None and self.model is not None:
            raise ValueError("`folder` finds the models itself; leave `model` out")
        return self


class Documents(_Strict):
    """Where the texts come from; each gives its first `context` tokens."""

    files: Location | list[Location] | None = None  # globs, relative to the study file: text, .jsonl, .parquet
    dataset: Location | None = None  # a Hub dataset, or a local folder that `datasets` can load
    subset: Location | None = None
    split: Location | None = None
    revision: Location | None = None
    text: Location = "text"  # the column that holds the text
    limit: Positive | None = None  # the first so many documents
    min_tokens: TokenCount | None = None  # leave out shorter documents everywhere, so all checkpoints see the same ones
    special_tokens: Literal["default", "none", "bos"] = "default"  # what the tokenizer adds; none; or BOS alone

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.files is None) == (self.dataset is None):
            raise ValueError("give either `files` or `dataset`")
        if self.dataset is not None and self.split is None:
            raise ValueError("a `dataset` needs its `split`, for instance test")
        if self.files is not None and (self.subset or self.split or self.revision):
            raise ValueError("`subset`, `split` and `revision` belong to a `dataset`, not to `files`")
        return self


class Characters(_Strict):
    """A window given in characters of text: its length in tokens depends on the tokenizer."""

    characters: TokenCount


class Heads(_Strict):
    """A sample of query heads, as the published protocol draws it."""

    sample: Positive
    seed: Seed = 0


class Study(_Strict):
    """A whole study file."""

    study: Name
    title: ShortText | None = None  # figure titles start with it; the study's name by default
    kind: StudyKind | None = None  # what the checkpoints are to each other; by default seeds if they name several runs
    model: Location | None = None
    tokenizer: Location | None = None
    tokenizer_revision: Location | None = None
    context: TokenCount | None = None  # for checkpoints that, like their phase, say none
    config: Overrides | None = None  # for all checkpoints; phases and checkpoints add to it
    expect: Overrides | None = None  # likewise
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # float32 on CPU, the checkpoint's own on GPU
    device: Location = "auto"  # GPUs if there are any (layers spread over them), else the CPU
    phases: dict[ShortText, Phase] = {}
    checkpoints: Annotated[list[Checkpoint], Field(min_length=1, max_length=10_000)]
    documents: Documents
    same_documents: bool = True  # for checkpoints of one tokenizer: those that fill the longest of their contexts
    protocol: Literal["exact", "published"] = "exact"  # every token; or the published study's samples
    stage: Stage = "post_rope"  # what the scores are made of; or before rotation
    layers: Literal["all", "full"] | list[Annotated[int, Field(ge=0, lt=2**31)]] = "all"  # tables have their types
    heads: Literal["all"] | Heads = "all"
    components: Annotated[int, Field(ge=1, le=1024)] = 10  # as published
    buckets: Annotated[int, Field(ge=1, le=1024)] = 16  # windows double four times from one bucket to the context
    groups: Annotated[int, Field(ge=1, le=256)] | None = None  # by default 16 or 8 (moments/sizes.py:default_groups)
    attention_rows: Annotated[int, Field(ge=0, le=1024)] = ATTENTION_ROWS  # queries per document; 0: no attention
    head_types: bool = False  # also run repeated random tokens: previous-token, duplicate-token, and induction scores
    skip_positions: Annotated[int, Field(ge=0)] = 0  # attention sinks sit at position 0
    common_window: TokenCount | Characters | None = None  # the shortest context by default
    batch_tokens: Positive = 8192  # tokens per forward pass; documents are never split
    shard_tokens: Positive = 2**22  # what a run that is killed loses at most; a shard is a whole number of documents
    detail: bool | None = None  # tables with many rows per head; by default up to MOST_IN_DETAIL checkpoints have them
    figure_checkpoints: list[str] | None = None  # which checkpoints the phase portraits show
    axis: Literal["entries", "step", "tokens"] = "entries"  # of figures: evenly spaced, or by a number
    axis_scale: Literal["linear", "log"] = "linear"

    @field_validator("heads", mode="before")
    @classmethod
    def _all_or_sample(cls, heads: Any) -> Any:
        if heads != "all" and not isinstance(heads, dict):
            raise ValueError("should be `all` or a sample such as {sample: 300, seed: 0}")
        if isinstance(heads, dict) and heads.get("sample") == 0:
            raise ValueError("a sample of 0 heads leaves nothing to analyse; use `all` or a positive number")
        return heads

    @field_validator("common_window", mode="before")
    @classmethod
    def _tokens_or_characters(cls, window: Any) -> Any:
        if (window is not None and not isinstance(window, int | dict | Characters)) or isinstance(window, bool):
            raise ValueError("should be a number of tokens, or of characters such as {characters: 8000}")
        return window

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_or_kind(cls, layers: Any) -> Any:
        if layers not in ("all", "full") and not (isinstance(layers, list) and layers):
            raise ValueError("should be `all`, `full` or a list of layer numbers")
        return layers

    @model_validator(mode="before")
    @classmethod
    def _published_protocol(cls, settings: Any) -> Any:
        """`protocol: published` stands for its own samples; other keys of the study must agree."""
        if not isinstance(settings, dict) or settings.get("protocol") != "published":
            return settings
        for key, value in PUBLISHED_PROTOCOL.items():
            if settings.setdefault(key, value) != value:
                raise ValueError(f"protocol: published has {key} {value}, but the study says {settings[key]}")
        return settings

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names: dict[str, str] = {}  # some file systems ignore case, and names become file names
        labels: dict[str, str] = {}  # axes and sentences call a checkpoint by its label
        for checkpoint in self.checkpoints:
            name, label = checkpoint.name, checkpoint.label or checkpoint.name
            if name.lower() in names:
                times = sum(each.name.lower() == name.lower() for each in self.checkpoints)
                raise ValueError(
                    f"{times} checkpoints are named {name.lower()!r}; every checkpoint needs a name of its own"
                )
            if label in labels:
                raise ValueError(
                    f"checkpoints {labels[label]!r} and {name!r} both have the label {label!r} (the name "
                    "where none is set), so figures and sentences could not distinguish them; give each its own"
                )
            names[name.lower()], labels[label] = name, name
        for shown in self.figure_checkpoints or ():
            if shown not in names.values():
                raise ValueError(f"figure_checkpoints names {shown!r}, which is not a checkpoint of this study")
        shortest = min(self._checked_context(checkpoint) for checkpoint in self.checkpoints)
        if self.axis != "entries":
            self._check_axis(self.axis)
        window = self.common_window
        if isinstance(window, int) and not self.skip_positions + 1 < window <= shortest:
            raise ValueError(
                f"common_window {window} should be longer than skip_positions and at most the shortest "
                f"context, {shortest}"
            )
        return self

    def _check_axis(self, axis: str) -> None:
        """An axis of numbers needs them of every checkpoint, and they rise."""
        earlier = None
        for checkpoint in self.checkpoints:
            if getattr(checkpoint, axis) is None:
                raise ValueError(
                    f"axis: {axis}, but checkpoint {checkpoint.name!r} has no `{axis}`; give each its own, or leave "
                    "`axis` out"
                )
            if earlier is not None and getattr(checkpoint, axis) <= getattr(earlier, axis):
                raise ValueError(
                    f"axis: {axis}, but checkpoint {checkpoint.name!r} comes after {earlier.name!r} and has no larger "
                    f"`{axis}`; leave `axis` out, or put each run into a study of its own"
                )
            earlier = checkpoint

    def _checked_context(self, checkpoint: Checkpoint) -> int:
        """The checkpoint's context, if the study says all that is needed to measure it."""
        name, resolved = checkpoint.name, self.resolved(checkpoint)
        if resolved.model is None:
            raise ValueError(f"checkpoint {name!r} has no model, and the study names none")
        if self.phases and checkpoint.phase is not None and checkpoint.phase not in self.phases:
            raise ValueError(f"checkpoint {name!r} is in phase {checkpoint.phase!r}, which `phases` does not list")
        if resolved.tokenizer_revision is not None and resolved.tokenizer is None:
            raise ValueError(
                f"checkpoint {name!r} has a tokenizer_revision but no `tokenizer` it could belong to; a model's own "
                "tokenizer is of the model's `revision`"
            )
        if resolved.context is None:
            raise ValueError(f"checkpoint {name!r} has no context, and neither its phase nor the study sets one")
        if self.skip_positions >= resolved.context - 1:
            raise ValueError(
                f"skip_positions {self.skip_positions} would skip all of checkpoint {name!r}, whose context is "
                f"{resolved.context}"
            )
        return resolved.context

    def resolved(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with everything it takes from its phase and from the study filled in."""
        phase = self.phases.get(checkpoint.phase or "", Phase())
        own_model = checkpoint.model is not None
        return checkpoint.model_copy(
            update={
                "model": checkpoint.model or self.model,
                "tokenizer": checkpoint.tokenizer or (None if own_model and not self.tokenizer else self.tokenizer),
                "tokenizer_revision": checkpoint.tokenizer_revision
                or (self.tokenizer_revision if checkpoint.tokenizer is None else None),
                "label": checkpoint.label or checkpoint.name,
                "context": checkpoint.context or phase.context or self.context,
                "config": {**(self.config or {}), **(phase.config or {}), **(checkpoint.config or {})},
                "expect": {**(self.expect or {}), **(phase.expect or {}), **(checkpoint.expect or {})},
            }
        )

    def resolved_checkpoints(self) -> list[Checkpoint]:
        """All checkpoints, resolved, in study order."""
        return [self.resolved(checkpoint) for checkpoint in self.checkpoints]

    def window_in_common(self) -> int | None:
        """The window at which all checkpoints can be compared: `common_window`, or the shortest context.

        None where it is given in characters: how many tokens that is depends on the tokenizer and the documents.
        """
        if isinstance(self.common_window, Characters):
            return None
        return self.common_window or min(checkpoint.context or 0 for checkpoint in self.resolved_checkpoints())

    @property
    def characters_in_common(self) -> int | None:
        """The common window in characters, if the study gives it so."""
        return self.common_window.characters if isinstance(self.common_window, Characters) else None
