"""Folders that look like saved checkpoints to whoever reads names, sizes and headers, in a few hundred bytes."""

import json
import struct
from pathlib import Path


def safetensors_bytes(count: int = 4) -> bytes:
    """A real safetensors file of so many zeros, made by hand."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * count)


def save_stub(folder: Path, cut: int = 0) -> Path:
    """A checkpoint whose weights lack the last `cut` bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    whole = safetensors_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) - cut])
    return folder
