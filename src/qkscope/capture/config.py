"""A model's config: read it, change it as the study says, check it against what the study expects."""

from __future__ import annotations

import difflib
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

from qkscope.capture.gguf import shared_gguf_reader
from qkscope.capture.hub import explain_failure, needs_remote_code
from qkscope.capture.source import ModelSource
from qkscope.capture.weights import require_safe_config
from qkscope.errors import ModelError, QkscopeWarning

MISSING = object()  # of a config that has no such key; a value may be None
INDIFFERENT = ("_name_or_path", "transformers_version", "use_cache", "architectures")  # change no number
# Far above any model: a slip or a trap, which would be found only after minutes of building layers.
MOST = {"num_hidden_layers": 4096, "num_attention_heads": 10_000, "num_key_value_heads": 10_000, "head_dim": 4096}


def load_config(source: ModelSource, overrides: Mapping[str, Any] | None = None) -> Any:
    """The checkpoint's config with `overrides` applied; failures say what to do."""
    from transformers import AutoConfig

    try:
        with shared_gguf_reader(source.gguf_file):
            config = AutoConfig.from_pretrained(source.location, **source.arguments)
    except Exception as error:
        raise explain_failure(source, error) from error
    # A type that transformers does not know comes back as a bare config whose code lives with the checkpoint.
    if not source.trust_remote_code and not type(config).__module__.startswith("transformers."):
        raise needs_remote_code(source)
    _warn_of_unused_code(source, config)
    require_safe_config(config, source)
    _refuse_fetched_kernels(source, config)
    for key, value in (overrides or {}).items():
        _override(config, key, value)
    return config


def text_part(config: Any) -> Any:
    """The config of the text backbone, which multimodal configs nest."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def config_text(config: Any) -> str:
    """A config as text, equal where nothing differs that changes a number."""
    relevant = {key: value for key, value in config.to_dict().items() if key not in INDIFFERENT}
    return json.dumps(relevant, sort_keys=True, default=str)


def _warn_of_unused_code(source: ModelSource, config: Any) -> None:
    """Warn where a checkpoint brings its own code and transformers' class of that type is used instead."""
    brought = getattr(config, "auto_map", None)
    if brought and not source.trust_remote_code:
        warnings.warn(
            f"{source} comes with Python code of its own, which is not run: transformers' own {config.model_type!r} "
            "model is used instead (the checkpoint's own runs if remote code is trusted)",
            QkscopeWarning,
            stacklevel=3,
        )


def _refuse_fetched_kernels(source: ModelSource, config: Any) -> None:
    """Attention and expert kernels named like a repository would be downloaded and run: that is code as well."""
    for name, value in vars(config).items():
        if name.endswith("_implementation_internal") and "/" in str(value) and not source.trust_remote_code:
            raise ModelError(
                f"{source}: its config asks for the kernel {str(value)[:80]!r}, which is code to be downloaded and is "
                "not run unless you allow it"
            ).advised(python="pass trust_remote_code=True if you trust it", command="--trust-remote-code runs it")
        if isinstance(getattr(value, "model_type", None), str) and hasattr(value, "to_dict"):
            _refuse_fetched_kernels(source, value)


def _require_sane(config: Any) -> None:
    """Refuse sizes that no model has before anything of that size is built."""
    for key, most in MOST.items():
        value = find_value(config, key)
        if isinstance(value, int | float) and not 0 <= value <= most:
            raise ModelError(f"the config has {key} {value!r}, which no model has (at most {most})")
    text = text_part(config)
    _require_sane_rope({"rope_theta": getattr(text, "rope_theta", None)})
    _require_sane_rope(getattr(text, "rope_parameters", None))


def _require_sane_rope(rope: Any) -> None:
    """Angles are position / rope_theta ** x: a base of 0, or of no number at all, leaves them undefined."""
    for key, value in rope.items() if isinstance(rope, Mapping) else ():
        if isinstance(value, Mapping):  # kinds of layers may have parameters of their own
            _require_sane_rope(value)
        elif key in ("rope_theta", "factor") and value is not None:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise ModelError(
                    f"the config has {key} {value!r}, where RoPE needs a positive, finite number; correct its "
                    "config.json, or set it under `config:`"
                )


def check_config(config: Any, context: int, expect: Mapping[str, Any] | None = None) -> None:
    """Refuse a config that is not what the study expects, or whose maximum is below `context`."""
    _require_sane(config)
    for key, wanted in (expect or {}).items():
        value = find_value(config, key)
        if value is MISSING:
            raise ModelError(f"expect: the config has no {key!r}{_closest(config, key)}")
        if not _same(value, wanted):
            raise ModelError(f"expect: {key} should be {wanted!r} but the loaded config has {value!r}")
    longest = find_value(config, "max_position_embeddings")
    if isinstance(longest, int) and context > longest:
        raise ModelError(
            f"context {context} is longer than the model's maximum of {longest} positions; shorten it, or raise "
            "max_position_embeddings (and set RoPE scaling) under `config:`"
        )


def find_value(config: Any, key: str) -> Any:
    """A config value wherever this transformers version keeps it (the text part, or its RoPE parameters), or MISSING.

    Dotted keys descend. Where layer types have RoPE parameters of their own, the result maps types to values, unless
    all agree.
    """
    text = text_part(config)
    for holder in (text, config):
        for part in key.split("."):
            holder = holder.get(part, MISSING) if isinstance(holder, Mapping) else getattr(holder, part, MISSING)
        if holder is not MISSING:
            return holder
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return MISSING
    if key in rope:
        return rope[key]
    by_type = {kind: part[key] for kind, part in rope.items() if isinstance(part, Mapping) and key in part}
    values = list(by_type.values())
    return by_type if any(value != values[0] for value in values) else next(iter(values), MISSING)


def _override(config: Any, key: str, value: Any) -> None:
    text = text_part(config)
    rope = getattr(text, "rope_parameters", None)
    try:
        if hasattr(text, key) and not callable(getattr(text, key)):
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


def _same(actual: Any, wanted: Any) -> bool:
    if isinstance(actual, int | float) and isinstance(wanted, int | float):
        return float(actual) == float(wanted)
    if isinstance(actual, Mapping) and isinstance(wanted, Mapping):
        return all(key in actual and _same(actual[key], value) for key, value in wanted.items())
    return bool(actual == wanted)
