"""A checkpoint's weights brought near before it is loaded: fetched from the Hub and read into the system's file cache.

That is all of a load that can be done beside a model at work. Building the next model there as well would change
settings that hold for the whole process (torch's default dtype), under the feet of the one that computes. What lies in
the file cache is the system's to give up when memory is short, so nothing is kept from anybody.
"""

from __future__ import annotations

import threading
from pathlib import Path

from qkscope.capture.source import ModelSource
from qkscope.capture.weights import INDEX, require_safe_index

CHUNK = 8 * 2**20  # bytes read at a time


def fetch_weights(source: ModelSource) -> list[Path]:
    """The files that hold a checkpoint's weights; those on the Hub are downloaded unless they are in the cache."""
    from transformers.utils.hub import cached_file

    if source.kind != "hub":
        folder = Path(source.location)
        return [folder / source.gguf_file] if source.gguf_file else sorted(folder.glob("*.safetensors"))
    revision = source.revision or "main"
    index = cached_file(
        source.location,
        INDEX,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    names = ["model.safetensors"] if index is None else require_safe_index(Path(index))
    files = (cached_file(source.location, name, revision=revision) for name in names)
    return [Path(path) for path in files if path is not None]


def read_through(paths: list[Path], enough: threading.Event) -> int:
    """Read files from end to end, which leaves them in the system's cache, until it is `enough`; returns bytes read."""
    buffer, done = memoryview(bytearray(CHUNK)), 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while not enough.is_set() and (count := file.readinto(buffer)):
                done += count
    return done
