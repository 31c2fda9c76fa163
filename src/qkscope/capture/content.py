"""What a checkpoint's weights are, whatever their files are called: to notice the same weights under two names.

Local safetensors are compared tensor by tensor, so that other file names, another cut into shards and another
config.json make no difference; GGUF files as wholes; repositories on the Hub by the hashes that it states of their
safetensors files, without downloading any. Kinds are not compared with each other: a model on the Hub and a local copy
of it, or a model and its GGUF version, are not seen to be the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qkscope.capture.source import ModelSource
from qkscope.capture.weights import INDEX, MAX_HEADER, SAFE, require_safe_index
from qkscope.errors import ModelError

SAMPLE, SAMPLES = 4096, 8  # bytes and places: a first look, which is confirmed by reading everything
BLOCK = 16 * 1024 * 1024


@dataclass(frozen=True)
class _Stretch:
    """Some bytes of a file that belong together, and what they are."""

    about: str
    path: Path
    start: int
    length: int


def sampled_weights(source: ModelSource) -> str | None:
    """A hash that equal weights share; others may, rarely, share it too. None where nothing can be known."""
    if source.kind == "hub":
        return _stated_by_hub(source)
    return _digest(source, whole=False)


def same_weights(one: ModelSource, other: ModelSource) -> bool:
    """Whether two sources whose samples agree hold the same weights: local files are read from end to end."""
    if one.kind != other.kind or one.kind == "hub":
        return one.kind == other.kind
    if (one.location, one.gguf_file) == (other.location, other.gguf_file):
        return True
    return _digest(one, whole=True) == _digest(other, whole=True)


def _digest(source: ModelSource, *, whole: bool) -> str:
    digest = hashlib.sha256()
    for stretch in sorted(_stretches(source), key=lambda each: each.about):
        digest.update(f"{stretch.about} {stretch.length}\n".encode())
        with stretch.path.open("rb") as file:
            for block in _all(file, stretch) if whole else _samples(file, stretch):
                digest.update(block)
    return f"{source.kind} sha256:{digest.hexdigest()}"


def _all(file: BinaryIO, stretch: _Stretch) -> Iterator[bytes]:
    file.seek(stretch.start)
    left = stretch.length
    while left and (block := file.read(min(BLOCK, left))):
        left -= len(block)
        yield block


def _samples(file: BinaryIO, stretch: _Stretch) -> Iterator[bytes]:
    """Evenly spaced, the first and the last bytes among them; small tensors are read whole."""
    for number in range(SAMPLES):
        offset = number * max(0, stretch.length - SAMPLE) // (SAMPLES - 1)
        file.seek(stretch.start + offset)
        yield file.read(min(SAMPLE, stretch.length - offset))


def _stretches(source: ModelSource) -> Iterator[_Stretch]:
    folder = Path(source.location)
    if source.gguf_file:
        path = folder / source.gguf_file
        yield _Stretch("gguf", path, 0, path.stat().st_size)
        return
    for path in _weight_files(folder):
        yield from _tensors(path)


def _weight_files(folder: Path) -> list[Path]:
    """The files that would be loaded; others may lie beside them."""
    if (folder / INDEX).is_file():
        return [folder / name for name in require_safe_index(folder / INDEX)]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob(f"*{SAFE}"))


def _tensors(path: Path) -> Iterator[_Stretch]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            listed = json.loads(file.read(min(length, MAX_HEADER)))
        for name, entry in listed.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                yield _Stretch(f"{name} {entry['dtype']} {entry['shape']}", path, 8 + length + start, stop - start)
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} is not a safetensors file ({type(error).__name__}); fetch or save it again") from None


def _stated_by_hub(source: ModelSource) -> str | None:
    """The hashes of a commit's safetensors files: the Hub states them; the cache names its files by them."""
    stated = _hashes_on_hub(source) or _hashes_in_cache(source)
    if not stated:
        return None
    return f"hub sha256:{hashlib.sha256(' '.join(sorted(stated)).encode()).hexdigest()}"


def _hashes_on_hub(source: ModelSource) -> list[str]:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return []
    try:
        files = HfApi().model_info(source.location, revision=source.revision, files_metadata=True).siblings
    except Exception:  # no answer, or one without hashes: then the cache is looked at
        return []
    weights = [file for file in files or () if _is_weights(file.rfilename)]
    hashes = [file.lfs.sha256 if file.lfs else file.blob_id for file in weights]
    return [each for each in hashes if each] if all(hashes) else []


def _hashes_in_cache(source: ModelSource) -> list[str]:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source.location, "config.json", revision=source.revision)
    if not isinstance(config, str):
        return []
    links = [path for path in Path(config).parent.iterdir() if _is_weights(path.name)]
    return [path.readlink().name for path in links if path.is_symlink()]


def _is_weights(name: str) -> bool:
    return name.endswith(SAFE) and "/" not in name
