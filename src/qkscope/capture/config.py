"""A model's config: read it, change it as the study says, check it against what the study expects."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from qkscope.capture.hub import explain
from qkscope.capture.source import ModelSource
from qkscope.errors import ModelError

MISSING = object()


def load_config(source: ModelSource, overrides: Mapping[str, Any] | None = None) -> Any:
    """The checkpoint's config with `overrides` applied; failures say what to do."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source.location, **source.arguments)
    except Exception as error:
        raise explain(source, error) from error
    # A type that transformers does not know comes back as a bare config whose code lives with the checkpoint.
    if not type(config).__module__.startswith("transformers."):
        raise ModelError(f"{source} needs remote code, which qkscope does not run")
    for key, value in (overrides or {}).items():
        _override(config, key, value)
    return config


def check_config(config: Any, context: int, expect: Mapping[str, Any] | None = None) -> None:
    """Refuse a config that is not what the study expects, or whose maximum is below `context`."""
    for key, wanted in (expect or {}).items():
        found = find_value(config, key)
        if found is MISSING:
            raise ModelError(f"expect: the config has no {key!r}{_closest(config, key)}")
        if not _same(found, wanted):
            raise ModelError(f"expect: {key} should be {wanted!r} but the loaded config has {found!r}")
    longest = find_value(config, "max_position_embeddings")
    if isinstance(longest, int) and context > longest:
        raise ModelError(
            f"context {context} is longer than the model's maximum of {longest} positions; shorten it, or raise "
            "max_position_embeddings (and set RoPE scaling) under `config:`"
        )


def find_value(config: Any, key: str) -> Any:
    """A config value wherever this transformers version keeps it: the text part, or its RoPE parameters.

    Dotted keys descend. Where layer kinds have RoPE parameters of their own, the result maps kinds to values,
    unless all agree.
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    for holder in (text, config):
        found = _descend(holder, key.split("."))
        if found is not MISSING:
            return found
    return _rope_value(getattr(text, "rope_parameters", None), key)


def _descend(holder: Any, parts: list[str]) -> Any:
    for part in parts:
        holder = holder.get(part, MISSING) if isinstance(holder, Mapping) else getattr(holder, part, MISSING)
        if holder is MISSING:
            return MISSING
    return holder


def _rope_value(rope: Any, key: str) -> Any:
    if not isinstance(rope, Mapping):
        return MISSING
    if key in rope:
        return rope[key]
    per_kind = {kind: part[key] for kind, part in rope.items() if isinstance(part, Mapping) and key in part}
    if not per_kind:
        return MISSING
    values = list(per_kind.values())
    return values[0] if all(value == values[0] for value in values) else per_kind


def _override(config: Any, key: str, value: Any) -> None:
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None)
    try:
        if hasattr(text, key):
            old = getattr(text, key)
            merged = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
            setattr(text, key, merged)
        elif isinstance(rope, Mapping) and key in rope:
            text.rope_parameters = {**rope, key: value}
        else:
            raise ModelError(f"config: the model's config has no {key!r}{_closest(config, key)}")
    except (TypeError, ValueError) as error:
        raise ModelError(f"config: {key} cannot be set to {value!r} ({error})") from None


def _closest(config: Any, key: str) -> str:
    known = [*config.to_dict(), *(getattr(config, "rope_parameters", None) or {})]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return float(found) == float(wanted)
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return all(key in found and _same(found[key], value) for key, value in wanted.items())
    return bool(found == wanted)
