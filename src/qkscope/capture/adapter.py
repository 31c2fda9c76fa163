"""LoRA adapters as checkpoints: recognize one, find its base model, merge the two.

An adapter's config can ask for much more than a product of two small matrices. What is understood here is listed; an
adapter that uses anything else is refused, because merging it without that would give another model than was trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkscope.capture.weights import ADAPTER, PICKLES, read_header, read_shapes, require_safetensors
from qkscope.errors import ModelError, first_line
from qkscope.foreign import Unreadable, parse_json, read_bytes

WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG = 1024 * 1024  # bytes
# Keys of an adapter's config that make its matrices what they are.
SHAPING = (
    "r", "target_modules", "exclude_modules", "lora_alpha", "fan_in_fan_out", "bias", "use_rslora", "modules_to_save",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "trainable_token_indices", "use_dora",
    "lora_bias", "target_parameters",
)  # fmt: skip
# Keys that have nothing to do with what is merged: about training, or about finding the model.
INDIFFERENT = (
    "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "auto_mapping",
    "init_lora_weights", "megatron_core", "peft_version", "qalora_group_size", "ensure_weight_tying", "runtime_config",
)  # fmt: skip
KEPT = ("embed_tokens", "lm_head")  # what peft may save whole next to the matrices


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and not a whole model."""
    return (folder / ADAPTER).is_file()


def require_base_name(folder: Path) -> tuple[str | None, str | None]:
    """The model that an adapter in a folder names as its base, and its revision; refuses what cannot be merged."""
    named = read_base_name(folder)
    if not (folder / WEIGHTS).is_file():
        pickles = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(PICKLES))
        also = f" (only {pickles[0]}, a pickle, which can run code when read)" if pickles else ""
        raise ModelError(f"{folder} has an {ADAPTER} but no {WEIGHTS}{also}; save the adapter again, as safetensors")
    require_safetensors(folder / WEIGHTS)
    return named


def read_base_name(folder: Path) -> tuple[str | None, str | None]:
    """The same from the adapter's config alone, which is small: its matrices need not be there."""
    stated = _stated(folder)
    base, revision = stated.get("base_model_name_or_path"), stated.get("revision")
    return (
        base if isinstance(base, str) and base.strip() else None,
        revision if isinstance(revision, str) and revision.strip() else None,
    )


def _stated(folder: Path) -> dict[str, Any]:
    """An adapter's config, if it is a LoRA of which all is understood."""
    path = folder / ADAPTER
    try:
        stated = parse_json(read_bytes(path, MAX_CONFIG, follow=True))
    except Unreadable as error:
        raise ModelError(f"{path} {error}") from None
    if stated.get("peft_type") != "LORA":
        raise ModelError(
            f"{folder} holds an adapter of type {str(stated.get('peft_type'))[:40]!r}; only LoRA adapters are merged "
            "here: merge it into its model, save the result, and point `model:` at that"
        )
    unknown = sorted(key for key, value in stated.items() if value and key not in (*SHAPING, *INDIFFERENT))
    begun = stated.get("init_lora_weights")
    if isinstance(begun, str) and begun != "gaussian":
        unknown = [f"init_lora_weights: {begun[:40]}", *unknown]  # it changed the base model before training
    if unknown:
        raise ModelError(
            f"{folder}: the adapter uses {unknown[0][:80]!r}, which is not merged here; merge it with the code that "
            "trained it, save the result, and point `model:` at that"
        )
    return stated


def require_peft() -> Any:
    """The library that merges adapters, or what to install."""
    try:
        import peft
    except ImportError:
        raise ModelError("a LoRA adapter needs peft: pip install 'qkscope[lora]'") from None
    return peft


def adapter_files(folder: str) -> list[Path]:
    """The files that decide what an adapter is."""
    return [Path(folder) / ADAPTER, Path(folder) / WEIGHTS]


def require_adapter_fits(folder: Path, model: Any) -> None:
    """Refuse an adapter whose tensors do not fit a model (with its head) on torch's meta device; reads no weights."""
    try:
        wrapped = _wrapped(model, folder)
    except Exception as error:
        raise ModelError(f"{folder}: the adapter does not fit its base model ({first_line(error)})") from error
    _require_all_used(folder, wrapped)


def merge_adapter(model: Any, folder: Path) -> Any:
    """The model (with its head) that an adapter was trained on, with the adapter's changes added to its weights."""
    peft = require_peft()
    try:
        inner, config = _part_and_config(model, folder)
        wrapped = peft.PeftModel.from_pretrained(inner, str(folder), config=config)
        _require_all_used(folder, wrapped)
        wrapped.merge_and_unload(safe_merge=True)
    except ModelError:
        raise
    except Exception as error:  # of peft: other shapes, other layers, NaN
        raise ModelError(f"{folder}: the adapter does not fit its base model ({first_line(error)})") from error
    return model


def _wrapped(model: Any, folder: Path) -> Any:
    """A model on the meta device with the adapter's empty matrices."""
    inner, config = _part_and_config(model, folder)
    return require_peft().get_peft_model(inner, config, low_cpu_mem_usage=True)


def _part_and_config(model: Any, folder: Path) -> tuple[Any, Any]:
    """What the adapter was trained on, the whole model or its backbone alone, as its names show; and its config."""
    stated = _stated(folder)
    config = require_peft().LoraConfig(inference_mode=True, **{key: stated[key] for key in SHAPING if key in stated})
    whole = f"base_model.model.{model.base_model_prefix}."
    is_whole = any(name.startswith(whole) for name in read_header(folder / WEIGHTS))
    return (model if is_whole else model.base_model), config


def _require_all_used(folder: Path, wrapped: Any) -> None:
    """Refuse an adapter of which a tensor has no place in the model, is missing, or has another shape."""
    state = require_peft().get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    used = {name: tuple(tensor.shape) for name, tensor in state.items()}
    stored = read_shapes(folder / WEIGHTS)
    whole = {_without_layer(name) for name in wrapped.state_dict()}
    kept = {name for name in stored if any(part in name for part in KEPT) and _without_layer(name) in whole}
    for odd, why in (
        (stored.keys() - used.keys() - kept, "the base model has no place for"),
        (used.keys() - stored.keys(), "the adapter has no"),
        ({name for name in stored.keys() & used.keys() if stored[name] != used[name]}, "the base model needs another"),
    ):
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise ModelError(f"{folder}: {why} {min(odd)[:120]!r}{more}; is it of another base model? `base:` names it")


def _without_layer(name: str) -> str:
    """A tensor's name without the part that peft adds where it wraps a layer."""
    return name.replace(".base_layer.", ".")
