"""Refuse checkpoints whose tensors do not fit their architecture.

transformers fills missing tensors with random numbers and drops unexpected ones; both only log a warning. Here either
is an error. Before anything runs, transformers' own loader fills a model on torch's meta device with the names and
shapes of the checkpoint's headers, so all of its renaming and fusing applies and no weight is read. When weights are
loaded, the loader's report is checked again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qkscope.capture.adapter import require_adapter_fits
from qkscope.capture.blueprint import build_on_meta
from qkscope.capture.config import config_text
from qkscope.capture.gguf import gguf_names, gguf_shapes, rename_tensors
from qkscope.capture.hub import cached_adapter, cached_weights, explain_failure, is_unconverted, weights_index
from qkscope.capture.source import ModelSource
from qkscope.capture.weights import INDEX, listed_tensors, read_shapes, weight_files
from qkscope.errors import ModelError
from qkscope.text import counted

SHOWN = 5  # tensors of each kind in a message
# What a backbone does not use: output heads, value heads, multi-token prediction.
HEADS = re.compile(r"(lm_head|embed_out|score|classifier|qa_outputs|v_head|mtp)\.")
PREFIXES = {
    "_orig_mod.": "which torch.compile adds: save the original with model._orig_mod.save_pretrained(folder)",
    "module.": "which DataParallel and DistributedDataParallel add: save with model.module.save_pretrained(folder)",
    "_fsdp_wrapped_module.": "which FSDP adds: save the full state dict of the unwrapped model",
    "base_model.model.": "which peft adds: save with model.merge_and_unload().save_pretrained(folder)",
    "model.model.": "which a wrapper adds: save the model inside it, with wrapper.model.save_pretrained(folder)",
}

Shapes = dict[str, tuple[int, ...] | None]  # by name; None where only the name is known

_fitting: set[int] = set()  # hashes of configs and tensors that fit: those of one training run are all the same


class Misfits(NamedTuple):
    """Tensors that a checkpoint and its architecture do not share."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]  # with both shapes


def require_tensors(source: ModelSource, config: Any) -> None:
    """Refuse a checkpoint whose headers do not fit its config; reads no weights.

    Undecided cases pass, and `require_loaded` decides: weights that are not on this machine yet, quantized models, and
    GGUF architectures whose tensors have no one-to-one names in transformers.
    """
    stored = _stored(source)
    if stored is not None and getattr(config, "quantization_config", None) is None:
        key = hash((config_text(config), str(getattr(config, "architectures", None)), frozenset(stored.items())))
        if key not in _fitting or source.trust_remote_code:
            info = _load_shapes(source, config, stored)
            if info is not None:
                require_loaded(source, config, info)
            _fitting.add(key)
    folder = cached_adapter(source)
    if folder is not None:
        require_adapter_fits(folder, build_on_meta(config, source.trust_remote_code, head=True))


def require_loaded(source: ModelSource, config: Any, info: Mapping[str, Any], *, head: bool = True) -> None:
    """Refuse what transformers' loading info says was missing, unexpected, or of another shape, unless harmless.

    With `head=False`, the model has a head that is not used, which may be missing.
    """
    unused = _unused(info["unexpected_keys"], config)
    misfits = Misfits(
        sorted(name for name in info["missing_keys"] if head or not HEADS.match(name)),
        sorted(set(info["unexpected_keys"]) - unused),
        sorted(f"{name}: {_shape(stored)}, not {_shape(needed)}" for name, stored, needed in info["mismatched_keys"]),
    )
    if any(misfits):
        raise ModelError(_message(source, config, misfits))


def _unused(names: Iterable[str], config: Any) -> set[str]:
    """Those of a checkpoint's tensors that belong to a head: by name, or because the class that was saved has them."""
    import transformers

    unused = {name for name in names if HEADS.match(name)}
    kind = getattr(transformers, str((getattr(config, "architectures", None) or [""])[0]), None)
    if unused.issuperset(names) or not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return unused
    try:
        with torch.device("meta"):
            model = kind(deepcopy(config))
    except Exception:  # a class of another config
        return unused
    backbone, own = f"{model.base_model_prefix}.", model.state_dict().keys()
    return unused | {name for name in names if name in own and not name.startswith(backbone)}


# -- shapes ------------------------------------------------------------------------------------------------


def _stored(source: ModelSource) -> Shapes | None:
    """Names and shapes in the headers of a source's weight files; None while they are not on this machine.

    Of sharded weights on the Hub, the index has the names.
    """
    if source.gguf_file:
        return gguf_shapes(source.location, source.gguf_file)
    files = weight_files(Path(source.location)) if source.kind == "local" else cached_weights(source)
    if files is not None:
        return {name: shape for path in files for name, shape in read_shapes(path).items()}
    index = weights_index(source)
    return None if index is None else dict.fromkeys(listed_tensors(index))


def _load_shapes(source: ModelSource, config: Any, stored: Shapes) -> dict[str, Any] | None:
    """The loading info of transformers for these tensors; None where it cannot be had without weights."""
    model, file_names = build_on_meta(config, source.trust_remote_code), {}
    names_only = None in stored.values()
    if source.gguf_file:
        names = gguf_names(source.location, source.gguf_file, model)
        if names is None:
            return None
        stored, file_names = rename_tensors(stored, names, model), names
    try:
        with _quiet():
            shapes = {name: torch.empty(shape or (), device="meta") for name, shape in stored.items()}
            _, info = type(model).from_pretrained(
                None,
                config=deepcopy(config),
                state_dict=shapes,
                device_map="meta",
                dtype=torch.bfloat16,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:
        if is_unconverted(error) and not names_only:
            raise explain_failure(source, error) from error
        return None  # code that needs values: loading decides
    prefix = f"{model.base_model_prefix}."
    twice = {name for name in model.state_dict() if name in stored and prefix + name in stored}
    return {
        **info,
        "missing_keys": [file_names.get(name, name) for name in info["missing_keys"]],
        "mismatched_keys": () if names_only else info["mismatched_keys"],
        "unexpected_keys": twice | set(info["unexpected_keys"]),
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and its report, of which the error says the same."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


# -- the message -------------------------------------------------------------------------------------------


def _message(source: ModelSource, config: Any, misfits: Misfits) -> str:
    parts = [
        f"{counted(len(names), 'tensor')} {what} ({_listed(names)})"
        for names, what in zip(misfits, ("missing", "unexpected", "of another shape"), strict=True)
        if names
    ]
    return (
        f"{_file(source)} does not fit its config (type {config.model_type!r}): {'; '.join(parts)}."
        " transformers would fill missing tensors with random numbers and drop unexpected ones; "
        f"{_cure(misfits.unexpected)}"
    )


def _file(source: ModelSource) -> str:
    """The file whose tensors were compared, where its name is known."""
    if source.kind != "local" or source.adapter:
        return str(source)
    files = weight_files(Path(source.location))
    return str(files[0] if len(files) == 1 else Path(source.location) / INDEX)


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:120] for name in names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


def _cure(names: list[str]) -> str:
    """What to do about it; where most names contain what only a wrapper adds, how to save without it."""
    for prefix, cure in PREFIXES.items():
        if 2 * sum(f".{prefix}" in f".{name}" for name in names) > len(names):
            return f"the names contain `{prefix}`, {cure}"
    return "save the checkpoint again, or correct its config"


def _shape(shape: Any) -> str:
    return str(list(shape))
