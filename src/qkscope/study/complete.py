"""Whether a folder holds a complete checkpoint, or one that is still being saved.

Only names, sizes and headers are read, no weights: the header of a safetensors file states how long the file is.
"""

from __future__ import annotations

import re
from pathlib import Path

from qkscope.foreign import Missing, Unreadable, opened, parse_json, read_bytes

CONFIG, ADAPTER = "config.json", "adapter_config.json"
INDEX, SINGLE, ADAPTER_WEIGHTS = "model.safetensors.index.json", "model.safetensors", "adapter_model.safetensors"
SAFE, SHARD = ".safetensors", re.compile(r"model-\d+-of-\d+\.safetensors")
MAX_INDEX, MAX_HEADER, MAX_WEIGHTS = 256 * 2**20, 100_000_000, 2**50
# A trainer of transformers writes its state last; what it writes before shows that there will be one.
TRAINER_STATE, BEFORE_IT = "trainer_state.json", ("optimizer.pt", "scheduler.pt", "training_args.bin")

FolderState = tuple[tuple[str, int, int], ...]  # names, sizes and times of the files in a folder


def why_incomplete(folder: Path) -> str | None:
    """What is missing of the checkpoint in a folder; None if it is whole."""
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if ADAPTER not in names and CONFIG not in names:
        return f"has no {CONFIG}"
    weights = _weights(folder, names)
    if weights is None:
        return f"{INDEX} is missing or incomplete"
    if not weights:
        return f"has no {SAFE} weights"
    for name in weights:
        if name not in names:
            return f"{name} is missing"
        if (reason := _cut_short(folder / name)) is not None:
            return f"{name} {reason}"
    if TRAINER_STATE not in names and names & set(BEFORE_IT):
        return f"{TRAINER_STATE}, which its trainer writes last, is missing"
    return None


def _weights(folder: Path, names: set[str]) -> list[str] | None:
    """The files that would be loaded, as transformers chooses them; None while the index that lists them is missing."""
    if ADAPTER in names:
        return [ADAPTER_WEIGHTS]
    if SINGLE in names:
        return [SINGLE]
    if INDEX in names or any(SHARD.fullmatch(name) for name in names):
        return _listed(folder / INDEX)
    return sorted(name for name in names if name.endswith(SAFE))


def state_of(folder: Path) -> FolderState | None:
    """Names, sizes and times of the files in a folder, to see whether they change; None where it is gone."""
    try:
        statuses = [(entry.name, entry.stat()) for entry in folder.iterdir() if not entry.is_dir()]
    except OSError:  # it, or a file in it, went away
        return None
    return tuple(sorted((name, status.st_size, status.st_mtime_ns) for name, status in statuses))


def _listed(index: Path) -> list[str] | None:
    """The files that an index names; None while it is not whole."""
    try:
        shards = parse_json(read_bytes(index, MAX_INDEX, follow=True)).get("weight_map")
    except Unreadable:
        return None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        return None
    return sorted(set(shards.values()))


def _cut_short(path: Path) -> str | None:
    """Why a safetensors file is incomplete, from where its header says the last tensor ends; None if it is complete."""
    try:
        with opened(path, MAX_WEIGHTS, follow=True) as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                return "is cut short"
            header = parse_json(file.read(length))
    except Missing:
        return "is missing"
    except (Unreadable, OSError):
        return "is not a safetensors file, or is incomplete"
    ends = [
        entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__" and _has_offsets(entry)
    ]
    return "is cut short" if 8 + length + max(ends, default=0) > size else None


def _has_offsets(entry: object) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(offsets, list) and len(offsets) == 2 and isinstance(offsets[1], int)
