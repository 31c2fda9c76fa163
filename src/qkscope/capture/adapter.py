"""LoRA adapters as checkpoints: what a folder holds, which model it belongs to, and the two made one.

An adapter's config can ask for much more than a product of two small matrices. What is understood here is listed; an
adapter that uses anything else is refused, because merging it without that would give another model than was trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qkscope.capture.weights import ADAPTER, PICKLES, require_safetensors
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
KEPT = ("embed_tokens", "lm_head")  # what peft may save whole beside the matrices


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and not a whole model."""
    return (folder / ADAPTER).is_file()


def base_named_by(folder: Path) -> tuple[str | None, str | None]:
    """The model that an adapter in a folder names as its base, and its revision; refuses what cannot be merged."""
    named = named_base(folder)
    if not (folder / WEIGHTS).is_file():
        pickles = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(PICKLES))
        also = f" (only {pickles[0]}, a pickle, which can run code when read)" if pickles else ""
        raise ModelError(f"{folder} has an {ADAPTER} but no {WEIGHTS}{also}; save the adapter again, as safetensors")
    require_safetensors(folder / WEIGHTS)
    return named


def named_base(folder: Path) -> tuple[str | None, str | None]:
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


def merged(model: Any, folder: Path) -> Any:
    """The model (with its head) that an adapter was trained on, with the adapter's changes added to its weights."""
    peft = require_peft()
    stated, names = _stated(folder), _names(folder / WEIGHTS)
    config = peft.LoraConfig(inference_mode=True, **{key: stated[key] for key in SHAPING if key in stated})
    # Trained on the whole model, or on its backbone alone: the names of its matrices tell.
    whole = any(name.startswith(f"base_model.model.{model.base_model_prefix}.") for name in names)
    try:
        wrapped = peft.PeftModel.from_pretrained(model if whole else model.base_model, str(folder), config=config)
        _require_all_used(folder, names, set(peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)))
        wrapped.merge_and_unload(safe_merge=True)
    except ModelError:
        raise
    except Exception as error:  # of peft: other shapes, other layers, NaN
        raise ModelError(f"{folder}: the adapter does not fit its base model ({first_line(error)})") from error
    return model


def _require_all_used(folder: Path, stored: set[str], used: set[str]) -> None:
    """Refuse an adapter of which a part would silently be left out, or stay as it was made up."""
    stored = {name for name in stored if not any(part in name for part in KEPT)}
    used = {name for name in used if not any(part in name for part in KEPT)}
    for odd, why in ((stored - used, "the base model has no place for"), (used - stored, "the adapter has no")):
        if odd:
            raise ModelError(f"{folder}: {why} {min(odd)[:120]!r}; is it of another base model? `base:` names it")


def _names(path: Path) -> set[str]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return set(json.loads(file.read(length))) - {"__metadata__"}
