"""What a checkpoint's `model:` means: a Hub id with a revision, a local directory, or a GGUF file.

Weights are read from safetensors or GGUF only, never from pickles, and no code that a checkpoint brings is run.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qkscope.errors import ModelError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SAMPLE_BYTES, SAMPLES = 64 * 1024, 64  # of each weight file: telling checkpoints apart need not read 140 GB


@dataclass(frozen=True)
class ModelSource:
    """Where a model or tokenizer is loaded from."""

    kind: Literal["hub", "local", "gguf"]
    location: str  # Hub id, or the absolute path of a directory
    revision: str | None = None
    gguf_file: str | None = None  # the file's name inside `location`

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for every `from_pretrained`: which revision, which file, and no remote code."""
        arguments: dict[str, Any] = {"trust_remote_code": False}
        if self.kind == "hub":
            arguments["revision"] = self.revision or "main"
        if self.gguf_file:
            arguments["gguf_file"] = self.gguf_file
        return arguments

    def __str__(self) -> str:
        name = str(Path(self.location) / self.gguf_file) if self.gguf_file else self.location
        return f"{name}@{self.revision}" if self.revision and self.kind == "hub" else name


def find_source(model: str, revision: str | None, folder: Path) -> ModelSource:
    """Tell what `model` is; paths are relative to `folder`, and anything that is not there is taken for a Hub id."""
    path = folder / Path(model).expanduser()
    if model.lower().endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"there is no GGUF file {path}")
        return ModelSource("gguf", str(path.parent.resolve()), gguf_file=path.name)
    if path.is_dir():
        _require_safe_weights(path)
        return ModelSource("local", str(path.resolve()))
    if path.is_file():
        raise ModelError(f"{path} is a file; give a directory with config.json and safetensors, or a .gguf file")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no model directory {path}")
    return ModelSource("hub", model, revision)


def _require_safe_weights(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: it is not a saved transformers model")
    names = [entry.name for entry in path.iterdir()]
    if any(name.endswith(".safetensors") for name in names):
        return
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if pickles:
        raise ModelError(
            f"{path} has its weights only as pickles ({pickles[0]}), which can run code when read; convert them with "
            "model.save_pretrained(folder), which writes safetensors"
        )
    raise ModelError(f"{path} has no .safetensors weights")


def weights_fingerprint(source: ModelSource) -> str | None:
    """A hash that tells a local checkpoint's weights from others: sizes and evenly spaced samples of each file."""
    if source.kind == "hub":
        return None  # the commit hash says it
    folder = Path(source.location)
    files = [folder / source.gguf_file] if source.gguf_file else sorted(folder.glob("*.safetensors"))
    files += [path for path in [folder / "config.json"] if path.is_file() and not source.gguf_file]
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(i * max(0, size - SAMPLE_BYTES) // max(1, SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()}"
