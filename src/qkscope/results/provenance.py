"""What produced a result, as one typed record: `provenance.json`, and inside every moments file its checkpoint's part.

What is written must be of these types. What is read may be older or come from a stranger: there a value of a wrong type
counts as not recorded (None), and unknown keys are kept. Each record remembers what it was made from, so that writing
it again changes nothing. `left_out.json` lists checkpoints that a run went on without.
"""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import ValidatorFunctionWrapHandler as Check
from pydantic.functional_validators import ModelWrapValidatorHandler as MakeModel

from qkscope._version import __version__
from qkscope.errors import InputError
from qkscope.files import remove_file, replacing, write_text
from qkscope.foreign import Missing, Unreadable, is_finite, parse_json, read_bytes
from qkscope.kinds import Architecture, StudyKind
from qkscope.results.folder import LEFT_OUT_JSON, LEFT_OUT_LOCK, PROVENANCE_JSON, results_file
from qkscope.results.lock import wait_for_lock
from qkscope.study.schema import Name

SCHEMA = 1
LONGEST = 2**31  # tokens of a window
SAME_NETWORK = 0.5  # of the projections of the smaller model; less may be a layer that was never trained
MOST_STEPS = 1e18  # steps, or tokens in training
LONGEST_REASON = 2000  # characters of why a checkpoint was left out
LARGEST_LEFT_OUT = 16 * 2**20  # bytes; ten thousand checkpoints with reasons are below
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "accelerate", "datasets")
_READING = "reading"  # the context in which wrong types are forgiven

Value = TypeVar("Value")


def environment() -> dict[str, str]:
    """Versions of everything that could change a number."""
    versions = {"qkscope": __version__, "python": platform.python_version(), "platform": platform.platform()}
    installed = {package: _installed(package) for package in PACKAGES}
    return versions | {package: number for package, number in installed.items() if number is not None}


def numeric_versions() -> dict[str, str | None]:
    """Versions of what computes the sums: parts made by different ones are not added up."""
    return {"qkscope": __version__, "torch": _installed("torch"), "transformers": _installed("transformers")}


@cache
def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def one_line(text: str) -> str:
    """Text from a file as one printable line: control characters would break an SVG, a card or a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


# -- records ---------------------------------------------------------------------------------------------------


def _forgiving(value: Any, check: Check, info: pydantic.ValidationInfo) -> Any:
    """None for a value of a wrong type in a file that is read; an error in one that is written."""
    try:
        return check(value)
    except pydantic.ValidationError:
        if info.context != _READING:
            raise
        return None


def _amount(amount: int | float) -> int | float | None:
    return amount if is_finite(amount) and 0 <= amount <= MOST_STEPS else None


def _tokens(value: Any, check: Check, info: pydantic.ValidationInfo) -> int | None:
    """A whole number of tokens; in a file that is read, None for anything else."""
    if info.context != _READING:
        checked: int | None = check(value)
        return checked
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if number and 0 <= value <= LONGEST else None


Recorded = Annotated[Value | None, pydantic.WrapValidator(_forgiving)]
SingleLine = pydantic.AfterValidator(lambda text: one_line(text) or None)
Text = Recorded[Annotated[str, SingleLine]]  # to be shown
Amount = Recorded[Annotated[int | float, pydantic.AfterValidator(_amount)]]  # of steps, or of tokens in training
Tokens = Annotated[int | None, pydantic.WrapValidator(_tokens)]  # of a window or a context


class Record(pydantic.BaseModel):
    """A part of a provenance."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True, strict=True, protected_namespaces=())

    _recorded: dict[str, Any] = pydantic.PrivateAttr(default_factory=dict)

    @classmethod
    def read(cls, stored: object) -> Self:
        """The record in a file; empty for anything but a JSON object."""
        return cls.model_validate(stored if isinstance(stored, dict) else {}, context=_READING)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """A record to be written, whose values must be of the right types."""
        return cls.model_validate(dict(values))

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _remember(cls, values: Any, make: MakeModel[Self]) -> Self:
        made = make(values)
        if isinstance(values, dict):
            made._recorded = values
        return made

    @property
    def says_something(self) -> bool:
        """Whether anything is recorded."""
        return bool(self._recorded)

    def to_json(self) -> dict[str, Any]:
        """As it was recorded, with what is not known here."""
        return {key: _plain(value) for key, value in self._recorded.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


class CorpusRecord(Record):
    """The documents."""

    source: Text = None
    fingerprint: Text = None
    documents: Recorded[int] = None
    special_tokens: Recorded[Any] = None


class CheckpointRecord(Record):
    """One checkpoint's capture; or what a dataset of vectors records about itself."""

    name: Recorded[str] = None  # as the tables spell it
    label: Text = None
    phase: Text = None
    step: Amount = None  # of training
    trained_tokens: Amount = None  # before this checkpoint; `tokens` are those that were measured
    run: Text = None  # which of several runs, or seeds
    context: Tokens = None
    family: Text = None
    parameters: Recorded[int] = None
    tags: Recorded[dict[str, str]] = None
    attention_hashes: Recorded[list[str]] = None  # one per projection to queries or keys
    model: Text = None
    revision: Recorded[str] = None
    commit: Recorded[str] = None  # of an adapter's base model, where there is an adapter
    adapter_commit: Recorded[str] = None
    weights: Recorded[str] = None
    weights_file_state: Recorded[str] = None  # of the local files, when they were measured
    config_overrides: Recorded[dict[str, Any]] = None
    tokenizer: Recorded[str] = None
    tokenizer_fingerprint: Recorded[str] = None
    model_type: Text = None
    n_layers: Recorded[int] = None
    layers_without_attention: Recorded[list[Recorded[int]]] = None
    rope_theta: Any = None  # a number, or numbers by kind of layer, as configs have them
    max_position_embeddings: Any = None
    dtype: Text = None
    stage: Recorded[str] = None
    corpus: Recorded[CorpusRecord] = None
    texts_begin_with: Recorded[list[str]] = None  # special tokens, as the tokenizer spells them
    documents: Recorded[int] = None
    documents_skipped: Recorded[list[dict[str, Any]]] = None
    tokens: Recorded[int] = None
    tokens_fingerprint: Recorded[str] = None
    skip_positions: Recorded[int] = None
    layers: Recorded[list[dict[str, Any]]] = None
    fingerprint: Recorded[str] = None
    settings: Recorded[dict[str, Any]] = None
    environment: Recorded[dict[str, Any]] = None
    seconds: Recorded[float] = None
    shards: Recorded[int] = None

    @property
    def architecture(self) -> Architecture:
        """Model type, layers, heads and widths, as far as they are recorded."""
        return Architecture.of_record(self._recorded)


class StudyRecord(Record):
    """The study file's settings, as far as later stages use them."""

    study: Text = None
    title: Text = None
    kind: Recorded[StudyKind] = None
    heads: Recorded[str | dict[str, Any]] = None
    figure_checkpoints: Recorded[list[Any]] = None
    axis: Recorded[Literal["entries", "step", "tokens"]] = None
    axis_scale: Recorded[Literal["linear", "log"]] = None
    groups: Recorded[int] = None


class AnalysisRecord(Record):
    """How sums became tables."""

    components: Recorded[int] = None
    heads: Recorded[str | dict[str, Any]] = None
    common_window: Tokens = None  # the common window
    common_characters: Recorded[int] = None  # the same in characters, if the study gives it so
    skip_positions: Recorded[int] = None


class LeftOutRecord(Record):
    """A checkpoint that the tables are without, and why."""

    name: Text = None
    reason: Text = None


class Provenance(Record):
    """`provenance.json`: what produced the tables of a results folder."""

    schema_: Annotated[Recorded[int], pydantic.Field(alias="schema")] = None
    qkscope: Text = None
    command: Recorded[str] = None
    study: Recorded[StudyRecord] = None
    kind: Recorded[StudyKind] = None
    kind_stated: Recorded[bool] = None
    corpus: Recorded[CorpusRecord] = None
    checkpoints: Recorded[list[Recorded[CheckpointRecord]]] = None
    checkpoints_left_out: Recorded[list[Recorded[LeftOutRecord]]] = None
    analysis: Recorded[AnalysisRecord] = None
    environment: Recorded[dict[str, Any]] = None

    def by_name(self) -> dict[str, CheckpointRecord]:
        """The checkpoints that have a name, in order; of a name that is there twice, the first."""
        records: dict[str, CheckpointRecord] = {}
        for each in self.checkpoints or []:
            if each is not None and each.name is not None and each.name.strip():
                records.setdefault(each.name, each)
        return records

    def left_out(self) -> Sequence[str]:
        """Names of the checkpoints that the tables are without."""
        return [each.name for each in self.checkpoints_left_out or [] if each is not None and each.name]


def write_provenance(folder: Path, provenance: Provenance) -> Path:
    """Write `provenance.json` into a results folder."""
    path = results_file(folder, PROVENANCE_JSON)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        json.dump(provenance.to_json(), file, indent=1, ensure_ascii=False)  # piece by piece: a sweep's is long
        file.write("\n")
    return path


# -- networks that are there twice ----------------------------------------------------------------------------


def same_networks(records: Sequence[CheckpointRecord]) -> list[tuple[str, str, int, int]]:
    """Pairs of names that share at least half of their projections to queries and keys, number for number.

    With how many projections both have, and how many the smaller model has. A model with a vision tower, a renamed
    copy or an adapter that leaves attention alone has the text weights of another. Counted as two models, they make
    everything look more certain than it is.
    """
    known = [(record.name or "?", set(record.attention_hashes)) for record in records if record.attention_hashes]
    pairs = []
    for (one, first), (other, second) in itertools.combinations(known, 2):
        shared, fewest = len(first & second), min(len(first), len(second))
        if shared >= SAME_NETWORK * fewest:
            pairs.append((one, other, shared, fewest))
    return pairs


def shared_attention(records: Sequence[CheckpointRecord]) -> list[str]:
    """A sentence for each of these pairs."""
    return [
        f"{one!r} and {other!r} share {shared} of {fewest} projections to queries and keys, number for number: "
        "they are not two independent entries, and count as one in any comparison over entries"
        for one, other, shared, fewest in same_networks(records)
    ]


# -- checkpoints that were left out ---------------------------------------------------------------------------


class StrictRecord(pydantic.BaseModel):
    """A part of a file of ours that is used as it is stated, or not at all."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class _LeftOut(StrictRecord):
    checkpoints: dict[Name, Annotated[str, pydantic.Field(max_length=LONGEST_REASON)]]


def read_left_out(folder: Path) -> dict[str, str]:
    """Name and reason of each checkpoint that was left out of the results in `folder`."""
    path = results_file(folder, LEFT_OUT_JSON)
    try:
        record = _LeftOut.model_validate(parse_json(read_bytes(path, LARGEST_LEFT_OUT)))
    except Missing:
        return {}
    except (Unreadable, pydantic.ValidationError) as error:
        raise InputError(f"{path}: cannot be used ({str(error).splitlines()[0]}); remove it") from None
    return {name: one_line(reason) for name, reason in record.checkpoints.items()}


def leave_out(folder: Path, name: str, reason: str | None) -> None:
    """Record that the results are without this checkpoint; without a reason, that they are not."""
    with wait_for_lock(results_file(folder, LEFT_OUT_LOCK)):  # shards of other checkpoints may record theirs
        reasons = {other: why for other, why in read_left_out(folder).items() if other != name}
        reasons |= {} if reason is None else {name: one_line(reason)[:LONGEST_REASON]}
        path = results_file(folder, LEFT_OUT_JSON)
        if reasons:
            write_text(path, json.dumps({"checkpoints": reasons}, indent=1, ensure_ascii=False) + "\n")
        else:
            remove_file(path)


def remove_left_out(folder: Path, name: str) -> None:
    """Remove the record of a checkpoint that was measured after all."""
    if name in read_left_out(folder):
        leave_out(folder, name, None)
