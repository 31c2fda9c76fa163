"""What tells a checkpoint's files from others', without reading all of them and no more than once while they stay."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from qkscope.capture.adapter import adapter_files
from qkscope.capture.source import ModelSource

SAMPLE_BYTES, SAMPLES = 64 * 1024, 64  # of each weight file: telling checkpoints apart need not read 140 GB
MAX_TOKENIZER = 256 * 2**20  # bytes in all; the largest vocabularies have 40 MB

# What lies beside a tokenizer and is none of it. Whatever else is there counts.
NO_TOKENIZER = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".md")
NO_TOKENIZER_FILES = ("model.safetensors.index.json", "trainer_state.json", "generation_config.json")

FileStates = tuple[tuple[Path, int, int], ...]  # files with their sizes and times


def weights_fingerprint(source: ModelSource) -> str | None:
    """A hash that tells a local checkpoint's weights from others: sizes and evenly spaced samples of each file.

    Of a model on the Hub its commit says it, and None is returned, unless an adapter is added to it.
    """
    if source.adapter_revision is not None:
        base = source.without_adapter
        return f"{weights_fingerprint(base) or base.revision} {source.adapter}@{source.adapter_revision}"
    adapter = adapter_files(source.adapter) if source.adapter is not None else []
    if source.kind == "hub":
        return f"{source.revision} {_sampled(_state(adapter))}" if adapter else None
    folder = Path(source.location)
    files = [folder / source.gguf_file] if source.gguf_file else sorted(folder.glob("*.safetensors"))
    files += [path for path in [folder / "config.json"] if path.is_file() and not source.gguf_file]
    if source.trust_remote_code:  # then the code decides about the numbers as the weights do
        files += sorted(path for path in folder.rglob("*.py") if path.is_file())
    files += adapter
    return _sampled(_state(files))


def tokenizer_files_fingerprint(source: ModelSource) -> str | None:
    """Equal for local folders that hold the same tokenizer, byte for byte; None where that is not to be told so.

    The config counts too: it may name the tokenizer's class.
    """
    if source.kind != "local" or source.trust_remote_code:
        return None
    files = [
        path
        for path in sorted(Path(source.location).iterdir())
        if path.is_file() and path.name not in NO_TOKENIZER_FILES and not path.name.endswith(NO_TOKENIZER)
    ]
    state = _state(files)
    return _whole(state) if sum(size for _, size, _ in state) <= MAX_TOKENIZER else None


def _state(files: list[Path]) -> FileStates:
    states = ((path, path.stat()) for path in files)
    return tuple((path, state.st_size, state.st_mtime_ns) for path, state in states)


@lru_cache(maxsize=4096)
def _sampled(state: FileStates) -> str:
    digest = hashlib.sha256()
    for path, size, _ in state:
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(i * max(0, size - SAMPLE_BYTES) // max(1, SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()}"


@lru_cache(maxsize=4096)
def _whole(state: FileStates) -> str:
    digest = hashlib.sha256()
    for path, size, _ in state:
        digest.update(f"{path.name} {size}\n".encode())
        digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()}"
