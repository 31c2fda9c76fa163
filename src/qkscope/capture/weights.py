"""Weights are read from safetensors or GGUF files of the checkpoint itself, and from nothing else.

transformers is asked to use safetensors, but a checkpoint can still lead it elsewhere: an index may list pickles or
files of other folders as its shards, a config may name the file to load. These are looked at before weights are loaded.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from qkscope.errors import ModelError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
SAFE = ".safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
TOKENIZERS = ("tokenizer", "vocab", "spiece", "sentencepiece")  # how the names of tokenizers' files start
MAX_INDEX = 256 * 1024 * 1024  # bytes; a model of 100 000 tensors has 10 MB
MAX_HEADER = 100_000_000  # bytes; what the safetensors format itself allows
CONVERT = "convert them with model.save_pretrained(folder), which writes safetensors"


def require_safe_weights(path: Path) -> None:
    """Refuse a model directory whose weights are not safetensors files inside it."""
    names = sorted(entry.name for entry in path.iterdir())
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: it is not a saved transformers model{_saved_inside(path)}")
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


def _saved_inside(path: Path) -> str:
    """The checkpoints inside a folder that is not one itself, such as a trainer's output."""
    inside = sorted(entry.parent.name for entry in path.glob("*/config.json"))
    return f"; the folders in it are: {', '.join(inside)[:200]}" if inside else ""


def require_safe_index(path: Path) -> list[str]:
    """The shards that an index lists, if all are safetensors files next to it."""
    shards = list(_weight_map(path).values())
    for name in shards:
        if not is_plain_name(name) or not name.endswith(SAFE):
            shown = repr(name)[:80]
            raise ModelError(
                f"{path} lists {shown}; weights are read from {SAFE} files next to the index only, never from pickles "
                "or other folders"
            )
    return sorted(set(shards))


def listed_tensors(path: Path) -> list[str]:
    """The names of the tensors that an index lists."""
    return list(_weight_map(path))


def _weight_map(path: Path) -> dict[str, Any]:
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
            header = json.loads(file.read(min(length, MAX_HEADER)))
        header.pop("__metadata__", None)
        if all(_is_tensor(entry) for entry in header.values()):
            return dict(header)
        reason = "a tensor without shape or offsets"
    except (OSError, ValueError, RecursionError, TypeError, AttributeError) as error:
        reason = type(error).__name__
    raise ModelError(f"{path} is not a safetensors file ({reason}); fetch or save it again")


def _is_tensor(entry: Any) -> bool:
    parts = (entry["shape"], entry["data_offsets"]) if {"dtype", "shape", "data_offsets"} <= set(entry) else ()
    whole = all(isinstance(part, list) and all(isinstance(n, int) and n >= 0 for n in part) for part in parts)
    return whole and len(parts) == 2 and len(parts[1]) == 2


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a safetensors file's tensors."""
    return {name: tuple(entry["shape"]) for name, entry in read_header(path).items()}


def require_safe_config(config: Any, source: object) -> None:
    """Refuse a config that names its weight file: which file is read is not the checkpoint's to decide."""
    named = getattr(config, "transformers_weights", None)
    if named is not None:
        raise ModelError(
            f"{source}: its config names a weight file of its own ({str(named)[:80]!r}), which is not read"
        )


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
