"""The files of a checkpoint's weights, and of LoRA adapters, which are checkpoints, too.

Weights are read from safetensors or GGUF files of the checkpoint itself, and from nothing else. transformers is asked
to use safetensors, but a checkpoint can still lead it elsewhere: an index may list pickles or files of other folders as
its shards, a config may name the file to load. These are checked before weights are loaded.

An adapter's config can ask for much more than a product of two small matrices. What is understood here is listed; an
adapter that uses anything else is refused, because merging it without that would give another model than was trained.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from qkscope.errors import ModelError, first_line
from qkscope.foreign import Unreadable, parse_json, read_bytes

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
SAFE = ".safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
TOKENIZERS = ("tokenizer", "vocab", "spiece", "sentencepiece")  # how the names of tokenizers' files start
MAX_INDEX = 256 * 1024 * 1024  # bytes; a model of 100 000 tensors has 10 MB
MAX_HEADER = 100_000_000  # bytes; what the safetensors format itself allows
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_ADAPTER = 1024 * 1024  # bytes
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
CONVERT = "convert them with model.save_pretrained(folder), which writes safetensors"


def require_safe_weights(path: Path) -> None:
    """Refuse a model directory whose weights are not safetensors files inside it."""
    names = sorted(entry.name for entry in path.iterdir())
    if not (path / "config.json").is_file():
        inside = ", ".join(sorted(entry.parent.name for entry in path.glob("*/config.json")))[
            :200
        ]  # a trainer's output
        found = f"; the folders in it are: {inside}" if inside else ""
        raise ModelError(f"{path} has no config.json: it is not a saved transformers model{found}")
    weights = [name for name in names if name.endswith(SAFE)]
    if not weights:
        pickles = [name for name in names if name.endswith(PICKLES)]
        if pickles:
            raise ModelError(
                f"{path} has its weights only as pickles ({pickles[0]}), which can run code when read; {CONVERT}"
            )
        raise ModelError(f"{path} has no .safetensors weights")
    for name in weights:
        require_safetensors(path / name)
    if INDEX in names:
        for name in require_safe_index(path / INDEX):
            if name not in weights:
                raise ModelError(f"{path / INDEX} lists {name!r}, which is not there")


def require_tokenizer(path: Path) -> None:
    """Refuse a directory without a tokenizer; weights need not be there."""
    if not any(entry.name.startswith(TOKENIZERS) for entry in path.iterdir()):
        raise ModelError(f"{path} has no tokenizer.json, tokenizer_config.json or vocabulary: it holds no tokenizer")


def require_safe_index(path: Path) -> list[str]:
    """The shards that an index lists, if all are safetensors files next to it."""
    shards = list(weight_map(path).values())
    for name in shards:
        if not is_plain_name(name) or not name.endswith(SAFE):
            raise ModelError(
                f"{path} lists {repr(name)[:80]}; weights are read from {SAFE} files next to the index only, never "
                "from pickles or other folders"
            )
    return sorted(set(shards))


def weight_map(path: Path) -> dict[str, Any]:
    """The tensors that an index lists, and the file that each is in."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_INDEX:
            raise ModelError(f"{path} is not a readable index of weights")
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"].items())
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} is not an index of weights ({type(error).__name__}: {str(error)[:80]})") from None


def weight_files(folder: Path) -> list[Path]:
    """The files that would be loaded, as transformers chooses them; there may be others."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return [folder / name for name in require_safe_index(folder / INDEX)]
    return sorted(folder.glob(f"*{SAFE}"))


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """What a safetensors file says of each of its tensors: dtype, shape, offsets."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = dict(json.loads(file.read(min(length, MAX_HEADER))))
        header.pop("__metadata__", None)
        for entry in header.values():
            parts = entry["shape"], entry["data_offsets"]
            whole = all(isinstance(part, list) and all(isinstance(n, int) and n >= 0 for n in part) for part in parts)
            if not whole or len(parts[1]) != 2 or "dtype" not in entry:
                raise KeyError
        return header
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        reason = "a tensor without shape or offsets" if isinstance(error, KeyError) else type(error).__name__
    raise ModelError(f"{path} is not a safetensors file ({reason}); fetch or save it again")


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a safetensors file's tensors."""
    return {name: tuple(entry["shape"]) for name, entry in read_header(path).items()}


def is_plain_name(name: Any) -> bool:
    """Whether this is the name of a file in the same folder, on any system."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and name.isprintable()
        and PurePosixPath(name).name == name == PureWindowsPath(name).name
    )


def require_safetensors(path: Path) -> None:
    """A regular file that starts as a safetensors file does; its contents are checked when they are loaded."""
    if not path.is_file():  # a broken link, a folder, or a pipe that would never end
        raise ModelError(f"{path} is not a file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror})") from None
    length = int.from_bytes(start[:8], "little")
    if len(start) < 9 or start[8:] != b"{" or length > min(size - 8, MAX_HEADER):
        raise ModelError(f"{path} is not a safetensors file, or truncated; fetch or save it again")


# -- adapters ----------------------------------------------------------------------------------------------


def require_base_name(folder: Path) -> tuple[str | None, str | None]:
    """The model that an adapter in a folder names as its base, and its revision; refuses what cannot be merged."""
    named = read_base_name(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickles = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(PICKLES))
        also = f" (only {pickles[0]}, a pickle, which can run code when read)" if pickles else ""
        raise ModelError(
            f"{folder} has an {ADAPTER} but no {ADAPTER_WEIGHTS}{also}; save the adapter again, as safetensors"
        )
    require_safetensors(folder / ADAPTER_WEIGHTS)
    return named


def read_base_name(folder: Path) -> tuple[str | None, str | None]:
    """The same from the adapter's config alone, which is small: its matrices need not be there."""
    stated = _adapter_config(folder)
    base, revision = stated.get("base_model_name_or_path"), stated.get("revision")
    return (
        base if isinstance(base, str) and base.strip() else None,
        revision if isinstance(revision, str) and revision.strip() else None,
    )


def _adapter_config(folder: Path) -> dict[str, Any]:
    """An adapter's config, if it is a LoRA of which all is understood."""
    path = folder / ADAPTER
    try:
        stated = parse_json(read_bytes(path, MAX_ADAPTER, follow=True))
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


def require_adapter_fits(folder: Path, model: Any) -> None:
    """Refuse an adapter whose tensors do not fit a model (with its head) on torch's meta device; reads no weights."""
    try:
        inner, config = _part_and_config(model, folder)
        wrapped = require_peft().get_peft_model(inner, config, low_cpu_mem_usage=True)
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


def _part_and_config(model: Any, folder: Path) -> tuple[Any, Any]:
    """What the adapter was trained on, the whole model or its backbone alone, as its names show; and its config."""
    stated = _adapter_config(folder)
    config = require_peft().LoraConfig(inference_mode=True, **{key: stated[key] for key in SHAPING if key in stated})
    whole = f"base_model.model.{model.base_model_prefix}."
    is_whole = any(name.startswith(whole) for name in read_header(folder / ADAPTER_WEIGHTS))
    return (model if is_whole else model.base_model), config


def _require_all_used(folder: Path, wrapped: Any) -> None:
    """Refuse an adapter of which a tensor has no place in the model, is missing, or has another shape."""
    state = require_peft().get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    used = {name: tuple(tensor.shape) for name, tensor in state.items()}
    stored = read_shapes(folder / ADAPTER_WEIGHTS)
    plain = {name: name.replace(".base_layer.", ".") for name in (*stored, *wrapped.state_dict())}  # what peft wraps
    whole = {plain[name] for name in wrapped.state_dict()}
    kept = {name for name in stored if any(part in name for part in KEPT) and plain[name] in whole}
    for odd, why in (
        (stored.keys() - used.keys() - kept, "the base model has no place for"),
        (used.keys() - stored.keys(), "the adapter has no"),
        ({name for name in stored.keys() & used.keys() if stored[name] != used[name]}, "the base model needs another"),
    ):
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise ModelError(f"{folder}: {why} {min(odd)[:120]!r}{more}; is it of another base model? `base:` names it")
