"""The files of a checkpoint's weights, and of LoRA adapters, which are checkpoints, too.

Weights are read from safetensors or GGUF files of the checkpoint itself, and from nothing else. transformers is asked
to use safetensors, but a checkpoint can still lead it elsewhere: an index may list pickles or files of other folders as
its shards, a config may name the file to load. These are checked before weights are loaded.

transformers parses a whole GGUF file each time it wants something of it, and each parse takes seconds. While
`shared_gguf_reader` is open, what it asks for the same file again is the reader that it got the first time.

An adapter's config can ask for much more than a product of two small matrices. What is understood here is listed; an
adapter that uses anything else is refused, because merging it without that would give another model than was trained.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
KEPT_READERS = 4  # readers at a time; each holds some hundred megabytes of a vocabulary as Python objects
# Tensors that a backbone does not need: the output matrix, and RoPE factors, which transformers takes from the config.
UNUSED = ("output.weight", "output.bias", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_readers: OrderedDict[tuple[str, int, int], Any] = OrderedDict()
_swapping = threading.RLock()


def require_safe_weights(path: Path) -> None:
    """Refuse a model directory whose weights are not safetensors files inside it."""
    names = sorted(entry.name for entry in path.iterdir())
    if not (path / "config.json").is_file():
        inside = ", ".join(sorted(entry.parent.name for entry in path.glob("*/config.json")))[
            :200
        ]  # a trainer's output
        folders = f"; the folders in it are: {inside}" if inside else ""
        raise ModelError(f"{path} has no config.json: it is not a saved transformers model{folders}")
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


def merge_adapter(model: Any, folder: Path, *, weights: bool = True) -> None:
    """Add an adapter's changes to the weights of the model (with its head) that it was trained on.

    Without `weights`, only refuse an adapter that does not fit; the model may be on torch's meta device.
    """
    peft, stated = require_peft(), _adapter_config(folder)
    # What it was trained on, the whole model or its backbone alone, as its names show.
    whole = f"base_model.model.{model.base_model_prefix}."
    inner = model if any(name.startswith(whole) for name in read_header(folder / ADAPTER_WEIGHTS)) else model.base_model
    try:
        config = peft.LoraConfig(inference_mode=True, **{key: stated[key] for key in SHAPING if key in stated})
        if weights:
            wrapped = peft.PeftModel.from_pretrained(inner, str(folder), config=config)
            _require_all_used(folder, wrapped)
            wrapped.merge_and_unload(safe_merge=True)
        else:
            _require_all_used(folder, peft.get_peft_model(inner, config, low_cpu_mem_usage=True))
    except ModelError:
        raise
    except Exception as error:  # of peft: other shapes, other layers, NaN
        raise ModelError(f"{folder}: the adapter does not fit its base model ({first_line(error)})") from error


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


# -- GGUF --------------------------------------------------------------------------------------------------


def require_gguf_reader() -> None:
    """Refuse a GGUF file where the library that reads it is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ModelError("a GGUF file needs the gguf library: pip install 'qkscope[gguf]'") from None


@contextmanager
def shared_gguf_reader(gguf_file: str | None) -> Iterator[None]:
    """Let transformers parse each GGUF file once in this process; does nothing where there is no such file."""
    if gguf_file is None:
        yield
        return
    import gguf

    with _swapping:
        parse = gguf.GGUFReader

        def reader(path: Any, mode: str = "r") -> Any:
            if mode != "r":
                return parse(path, mode)
            state = os.stat(path)  # a file that was replaced is parsed again
            key = (os.path.realpath(path), state.st_mtime_ns, state.st_size)
            if key not in _readers:
                _readers[key] = (_on_plain_array(parse) if isinstance(parse, type) else parse)(key[0])
                while len(_readers) > KEPT_READERS:
                    _readers.popitem(last=False)
            _readers.move_to_end(key)
            return _readers[key]

        gguf.GGUFReader = reader
        try:
            yield
        finally:
            gguf.GGUFReader = parse


def _on_plain_array(parse: Any) -> Any:
    """A reader that slices a plain array: slicing a memory map runs Python code, a million times for a vocabulary."""
    import numpy as np

    class Reader(parse):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)  # the same memory, still mapped

    return Reader


def apply_bos_setting(tokenizer: Any, path: str) -> None:
    """Let a tokenizer put the BOS token before a text, or not, as the file's header says: transformers does not ask it.

    A model that was trained with the token and reads without it predicts far worse, and nothing shows it.
    """
    import gguf

    field = gguf.GGUFReader(path).fields.get("tokenizer.ggml.add_bos_token")
    if field is None or tokenizer.bos_token_id is None:
        return
    stated = bool(field.parts[field.data[0]][0])
    if (tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]) != stated:
        tokenizer.add_bos_token = stated


def gguf_shapes(folder: str, file: str) -> dict[str, tuple[int, ...] | None]:
    """The names and shapes of a file's tensors, in the order of torch's dimensions."""
    return {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in _read(folder, file).tensors}


def gguf_names(folder: str, file: str, model: Any) -> dict[str, str] | None:
    """The file's name for each tensor of a transformers backbone; None if one has no name that the library knows.

    Fused and split tensors (experts) have none: transformers converts them as it loads the file.
    """
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    kind = kinds.get(_read(folder, file).fields["general.architecture"].contents())
    layers = getattr(model.config, "num_hidden_layers", None)
    if kind is None or not isinstance(layers, int):
        return None
    known, prefix = gguf.get_tensor_name_map(kind, layers), f"{model.base_model_prefix}."
    names = {name: known.get_name(prefix + name, try_suffixes=(".weight", ".bias")) for name in model.state_dict()}
    return None if None in names.values() else names


def rename_tensors(
    stored: Mapping[str, tuple[int, ...] | None], names: Mapping[str, str], model: Any
) -> dict[str, tuple[int, ...] | None]:
    """A file's tensors under the names of transformers; others keep their names, and unused ones are left out.

    Tensors of the expected size count as of the expected shape: some are stored transposed.
    """
    tensors: dict[str, tuple[int, ...] | None] = {}
    keys = {name: key for key, name in names.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in stored.items():
        expected = shapes.get(keys.get(name, ""))
        same = expected is not None and math.prod(expected) == math.prod(shape or ())
        if name not in UNUSED:
            tensors[keys.get(name, name)] = expected if same else shape
    return tensors


def gguf_fields(folder: str, file: str) -> dict[str, Any]:
    """What a file's header says of the architecture and its RoPE."""
    fields = _read(folder, file).fields
    return {
        name: each.contents() for name, each in fields.items() if name == "general.architecture" or ".rope." in name
    }


def _read(folder: str, file: str) -> Any:
    import gguf

    with shared_gguf_reader(file):
        return gguf.GGUFReader(os.path.join(folder, file))
