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

FileStates = tuple[tuple[Path, int, tuple[int, ...]], ...]  # files with their sizes, times and inodes


def weights_fingerprint(source: ModelSource, *, fresh: bool = False) -> str | None:
    """A hash that tells a local checkpoint's weights from others: sizes and evenly spaced samples of each file.

    Of a model on the Hub its commit says it, and None is returned, unless an adapter is added to it. `fresh` reads the
    files again even if their sizes and times are those of an earlier call.
    """
    if source.adapter_revision is not None:
        base = source.without_adapter
        of_base = weights_fingerprint(base, fresh=fresh) or base.revision
        return f"{of_base} {source.adapter}@{source.adapter_revision}"
    if source.kind == "hub":
        return f"{source.revision} {_sampled(_state(_adapter(source)), fresh)}" if source.adapter else None
    return _sampled(_state(_weight_files(source)), fresh)


def weights_file_state(source: ModelSource) -> str | None:
    """A hash of names, sizes, times and inodes of a checkpoint's local weight files; None where there are none.

    Equal hashes mean unchanged files, without reading any weights. A copy of the same weights has another hash.
    """
    files = _adapter(source) if source.kind == "hub" else _weight_files(source)
    if not files:
        return None
    text = "\n".join(f"{path.name} {size} {of}" for path, size, of in _state(files))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _adapter(source: ModelSource) -> list[Path]:
    return [] if source.adapter is None or source.adapter_revision else adapter_files(source.adapter)


def _weight_files(source: ModelSource) -> list[Path]:
    """The local files that decide about the numbers: weights, config, trusted code, adapter."""
    folder = Path(source.location)
    files = [folder / source.gguf_file] if source.gguf_file else sorted(folder.glob("*.safetensors"))
    files += [path for path in [folder / "config.json"] if path.is_file() and not source.gguf_file]
    if source.trust_remote_code:  # then the code decides about the numbers as the weights do
        files += sorted(path for path in folder.rglob("*.py") if path.is_file())
    return files + _adapter(source)


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
    return tuple((path, of.st_size, (of.st_mtime_ns, of.st_ctime_ns, of.st_ino)) for path, of in states)


def _sampled(state: FileStates, fresh: bool) -> str:
    return _read_samples(state) if fresh else _remembered_samples(state)


@lru_cache(maxsize=4096)
def _remembered_samples(state: FileStates) -> str:
    return _read_samples(state)


def _read_samples(state: FileStates) -> str:
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
