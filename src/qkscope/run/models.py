"""Every model of a study looked at before anything runs: the one place where `inspect`, `run` and all others check.

What costs nothing comes first and for all checkpoints: the device, every path, whether a revision can apply. Then
configs, GGUF files last because they take seconds; then layers as shapes; then tokenizers; then equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.capture.config import config_text
from qkscope.capture.source import ModelSource, find_source
from qkscope.errors import StudyError, located
from qkscope.lenses.heads import LayerChoice, choose_heads, head_sample, layer_choice
from qkscope.study.load import StudyFile
from qkscope.study.schema import Checkpoint, Study

SLOW_FIRST_LAST = {"local": 0, "hub": 1, "gguf": 2}
MOST_NAMED = 20  # checkpoints in one message
MOST_BLUEPRINTS = 64  # that are remembered: a watch, or a notebook, plans the same models again and again

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
    """All models of a study, in its order; the first thing that is wrong is an error that names its checkpoint."""
    from qkscope.capture.hub import adapter_tokenizer
    from qkscope.capture.load import choose_device
    from qkscope.capture.tensors import require_tensors

    study, checkpoints = file.study, file.study.resolved_checkpoints()
    choose_device(study.device, here=here)
    sources = []
    for checkpoint in checkpoints:
        with located(f"checkpoint {checkpoint.name!r}"):
            sources.append(_sources(checkpoint, file.folder, trust_remote_code))
    order = sorted(range(len(sources)), key=lambda number: SLOW_FIRST_LAST[sources[number][0].kind])
    configured: dict[int, tuple[ModelSource, Any]] = {}
    for number in order:
        with located(f"checkpoint {checkpoints[number].name!r}"):
            configured[number] = _configured(study, checkpoints[number], sources[number][0], noted)
    models = []
    for number, checkpoint in enumerate(checkpoints):
        source, config = configured[number]
        with located(f"checkpoint {checkpoint.name!r}"):
            layers = _blueprint(config, trust_remote_code)
            if check_tensors:
                require_tensors(source, config)
            choose_heads(layers.probe.layers, head_sample(study), layer_choice(study))  # leaves something to analyse
            tokenizer = sources[number][1] or adapter_tokenizer(source) or source.without_adapter
        models.append(Model(checkpoint, source, tokenizer, config, layers))
    return models


def _sources(checkpoint: Checkpoint, folder: Path, trust_remote_code: bool) -> tuple[ModelSource, ModelSource | None]:
    model = model_source(checkpoint, folder, trust_remote_code)
    if checkpoint.tokenizer is None:
        return model, None
    tokenizer = find_source(
        checkpoint.tokenizer,
        checkpoint.tokenizer_revision,
        folder,
        role="tokenizer",
        trust_remote_code=trust_remote_code,
    )
    return model, tokenizer


def model_source(checkpoint: Checkpoint, folder: Path, trust_remote_code: bool) -> ModelSource:
    """Where one checkpoint's weights are, from paths alone."""
    base = (checkpoint.base, checkpoint.base_revision)
    return find_source(
        checkpoint.model or "", checkpoint.revision, folder, trust_remote_code=trust_remote_code, base=base
    )


def _configured(study: Study, checkpoint: Checkpoint, unpinned: ModelSource, noted: OnNote) -> tuple[ModelSource, Any]:
    """The source at its commit and its config, checked: config and weights are then of one moment."""
    from qkscope.capture.config import check_config, find_value, load_config
    from qkscope.capture.hub import pin_revision

    tell_slow(unpinned, noted)
    source = pin_revision(unpinned, "config.json")
    config = load_config(source, checkpoint.config)
    check_config(config, checkpoint.context or 0, checkpoint.expect)
    _require_layers(layer_choice(study), find_value(config, "num_hidden_layers"))
    return source, config


def _require_layers(choice: LayerChoice, count: Any) -> None:
    beyond = (
        [layer for layer in choice if layer >= count] if isinstance(choice, tuple) and isinstance(count, int) else []
    )
    if beyond:
        raise StudyError(f"layers: there is no layer {beyond[0]}; this model has layers 0 to {count - 1}")


def tell_slow(source: ModelSource, noted: OnNote) -> None:
    """Say that a file is being read which takes seconds."""
    if source.gguf_file:
        path = Path(source.location) / source.gguf_file
        noted(f"reading {path.name} ({path.stat().st_size / 1e6:.0f} MB), which takes a while")


_blueprints: dict[str, Any] = {}


def _blueprint(config: Any, trust_remote_code: bool) -> Any:
    """The layers as shapes, made once of each config: those of one training run are usually all the same."""
    from qkscope.capture.blueprint import blueprint

    text = config_text(config)
    if trust_remote_code:  # the code that lies with a checkpoint may be another's, and change, whatever its config says
        return blueprint(config, trust_remote_code=True)
    if text not in _blueprints:
        if len(_blueprints) >= MOST_BLUEPRINTS:
            _blueprints.clear()
        _blueprints[text] = blueprint(config)
    return _blueprints[text]


# -- equal weights -----------------------------------------------------------------------------------------


def check_equal_weights(models: Sequence[Model], tokenizer_of: Callable[[Model], str], noted: OnNote) -> list[str]:
    """Refuse two checkpoints whose rows would be identical; returns notes about those that share weights otherwise."""
    groups, unknown = _same_weights(models, noted)
    notes = []
    for group in groups:
        settings = {model.checkpoint.name: _settings(model, tokenizer_of(model)) for model in group}
        for number, model in enumerate(group):
            same = [
                each for each in group[number:] if settings[each.checkpoint.name] == settings[model.checkpoint.name]
            ]
            if len(same) > 1:
                raise StudyError(_identical(same))
        different = [key for key in settings[group[0].checkpoint.name] if len({s[key] for s in settings.values()}) > 1]
        names = ", ".join(repr(model.checkpoint.name) for model in group)
        notes.append(f"checkpoints {names} have the same weights; they differ in {' and '.join(different)}")
    if unknown:
        notes.append(
            f"could not check whether {len(unknown)} checkpoints on the Hub have the same weights as others: the Hub "
            "was not reached, or lists no hashes of their files"
        )
    return notes


def _settings(model: Model, tokenizer: str) -> dict[str, str]:
    return {
        "context": str(model.checkpoint.context),
        "config": config_text(model.config),
        "tokenizer": tokenizer,
    }


def _identical(same: Sequence[Model]) -> str:
    """Which checkpoints would have the same rows; two of them with where they are, of many the first."""
    one, other = same[:2]
    where = str(one.source) if one.source == other.source else f"{one.source} and {other.source}"
    names = [repr(model.checkpoint.name) for model in same]
    listed = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
    listed = " and ".join(names) if len(names) == 2 else listed
    return (
        f"checkpoints {listed} have the same weights ({where}), context, config and tokenizer, so all their rows would "
        "be identical; keep one of them (`exclude` leaves names out of a series), or point `model:` or `revision:` at "
        "the checkpoint you mean"
    )


def _same_weights(models: Sequence[Model], noted: OnNote) -> tuple[list[list[Model]], list[Model]]:
    """Groups of two or more checkpoints with equal weights, and the checkpoints of which nothing is known."""
    from qkscope.capture.fingerprint import WeightContent

    contents = {source: WeightContent(source, noted) for source in dict.fromkeys(model.source for model in models)}
    groups: list[list[int]] = []
    for number, model in enumerate(models):
        alike = [k for k in range(number) if contents[models[k].source].equals(contents[model.source])]
        # It may join two groups to one: of A, B and C, only A and C, and B and C, may be comparable.
        joined = [group for group in groups if set(group) & set(alike)]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([number, *(k for group in joined for k in group)]))
    unknown = [model for model in models if not contents[model.source].known()] if len(contents) > 1 else []
    return [[models[k] for k in group] for group in sorted(groups) if len(group) > 1], unknown
