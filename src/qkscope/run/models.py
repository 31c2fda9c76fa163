"""Check every model of a study before anything runs, for `inspect`, `run` and all other commands.

Checks that cost nothing come first, for all checkpoints: the device, every path, whether a revision can apply. Then
configs, GGUF files last because they take seconds; then layers as shapes; then tokenizers; then equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qkscope.capture.load import config_text
from qkscope.capture.source import ModelSource, find_source
from qkscope.errors import StudyError, located
from qkscope.study.load import StudyFile
from qkscope.study.rows import choose_heads, row_settings
from qkscope.study.schema import Checkpoint

READ_ORDER = {"local": 0, "hub": 1, "gguf": 2}  # the slowest last
MAX_NAMES = 20  # checkpoints in one message
MAX_BLUEPRINTS = 64  # that are remembered: a watch, or a notebook, plans the same models again and again

OnNote = Callable[[str], None]


@dataclass(frozen=True)
class Model:
    """A checkpoint's model, checked against the study from its config alone."""

    checkpoint: Checkpoint  # resolved
    source: ModelSource  # at its commit
    tokenizer_source: ModelSource
    config: Any
    blueprint: Any  # capture.blueprint.Blueprint


def open_models(
    file: StudyFile, noted: OnNote, *, here: bool, trust_remote_code: bool, check_tensors: bool = True
) -> list[Model]:
    """All models of a study, in its order; the first problem is an error that names its checkpoint."""
    from qkscope.capture.blueprint import require_tensors
    from qkscope.capture.hub import adapter_tokenizer, pin_revision
    from qkscope.capture.load import check_config, choose_device, load_config

    study, checkpoints = file.study, file.study.resolved_checkpoints()
    choose_device(study.device, here=here)
    sources, tokenizers = [], []
    for checkpoint in checkpoints:
        with located(f"checkpoint {checkpoint.name!r}"):
            sources.append(model_source(checkpoint, file.folder, trust_remote_code))
            name, revision = checkpoint.tokenizer, checkpoint.tokenizer_revision
            trusted = partial(find_source, role="tokenizer", trust_remote_code=trust_remote_code)
            tokenizers.append(None if name is None else trusted(name, revision, file.folder))
    configs: dict[int, Any] = {}
    for number in sorted(range(len(sources)), key=lambda number: READ_ORDER[sources[number].kind]):
        checkpoint = checkpoints[number]
        with located(f"checkpoint {checkpoint.name!r}"):
            note_slow_file(sources[number], noted)
            # At its commit, so that config and weights belong together.
            sources[number] = pin_revision(sources[number], "config.json")
            configs[number] = load_config(sources[number], checkpoint.config)
            check_config(configs[number], checkpoint.context or 0, checkpoint.expect)
    models = []
    for number, checkpoint in enumerate(checkpoints):
        source, config = sources[number], configs[number]
        with located(f"checkpoint {checkpoint.name!r}"):
            layers = _blueprint(config, trust_remote_code)
            if check_tensors:
                require_tensors(source, config)
            rows = row_settings(study)
            choose_heads(layers.probe.layers, rows.heads, rows.layers)  # raises if no head is left
            tokenizer = tokenizers[number] or adapter_tokenizer(source) or source.without_adapter
        models.append(Model(checkpoint, source, tokenizer, config, layers))
    return models


def model_source(checkpoint: Checkpoint, folder: Path, trust_remote_code: bool) -> ModelSource:
    """Where one checkpoint's weights are, from paths alone."""
    base = (checkpoint.base, checkpoint.base_revision)
    return find_source(
        checkpoint.model or "", checkpoint.revision, folder, trust_remote_code=trust_remote_code, base=base
    )


def note_slow_file(source: ModelSource, noted: OnNote) -> None:
    """Say that a file is being read which takes seconds."""
    if source.gguf_file:
        path = Path(source.location) / source.gguf_file
        noted(f"reading {path.name} ({path.stat().st_size / 1e6:.0f} MB), which takes a while")


_blueprints: dict[str, Any] = {}


def _blueprint(config: Any, trust_remote_code: bool) -> Any:
    """The layers as shapes, cached by config: all checkpoints of a training run usually have the same."""
    from qkscope.capture.blueprint import blueprint

    text = config_text(config)
    if trust_remote_code:  # the code that comes with a checkpoint may differ from another's with the same config
        return blueprint(config, trust_remote_code=True)
    if text not in _blueprints:
        if len(_blueprints) >= MAX_BLUEPRINTS:
            _blueprints.clear()
        _blueprints[text] = blueprint(config)
    return _blueprints[text]


# -- equal weights -----------------------------------------------------------------------------------------


def check_equal_weights(models: Sequence[Model], tokenizer_of: Callable[[Model], str], noted: OnNote) -> list[str]:
    """Refuse two checkpoints whose rows would be identical; returns notes about those that share weights otherwise."""
    groups, unknown = _same_weights(models, noted)
    notes = []
    for group in groups:
        settings = [
            {
                "context": str(model.checkpoint.context),
                "config": config_text(model.config),
                "tokenizer": tokenizer_of(model),
            }
            for model in group
        ]
        for number in range(len(group)):
            same = [model for model, its in zip(group, settings, strict=True) if its == settings[number]]
            if len(same) > 1:
                raise StudyError(_identical(same))
        different = [key for key in settings[0] if len({each[key] for each in settings}) > 1]
        names = ", ".join(repr(model.checkpoint.name) for model in group)
        notes.append(f"checkpoints {names} have the same weights; they differ in {' and '.join(different)}")
    if unknown:
        notes.append(
            f"could not check whether {unknown} checkpoints on the Hub have the same weights as others: the Hub "
            "was not reached, or lists no hashes of their files"
        )
    return notes


def _identical(same: Sequence[Model]) -> str:
    """The message about checkpoints that would have the same rows."""
    one, other = same[:2]
    where = str(one.source) if one.source == other.source else f"{one.source} and {other.source}"
    names = [repr(model.checkpoint.name) for model in same]
    listed = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
    listed = " and ".join(names) if len(names) == 2 else listed
    return (
        f"checkpoints {listed} have the same weights ({where}), context, config and tokenizer, so all their rows would "
        "be identical; keep one of them (`exclude` leaves names out of a series), or point `model:` or `revision:` at "
        "the checkpoint you mean"
    )


def _same_weights(models: Sequence[Model], noted: OnNote) -> tuple[list[list[Model]], int]:
    """Groups of two or more checkpoints with equal weights, and how many checkpoints have unknown weights."""
    from qkscope.capture.fingerprint import WeightContent

    contents = {source: WeightContent(source, noted) for source in dict.fromkeys(model.source for model in models)}
    groups: list[list[int]] = []
    for number, model in enumerate(models):
        alike = [k for k in range(number) if contents[models[k].source].equals(contents[model.source])]
        # It may join two groups to one: of A, B and C, only A and C, and B and C, may be comparable.
        joined = [group for group in groups if set(group) & set(alike)]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([number, *(k for group in joined for k in group)]))
    unknown = sum(not contents[model.source].known() for model in models) if len(contents) > 1 else 0
    return [[models[k] for k in group] for group in sorted(groups) if len(group) > 1], unknown
