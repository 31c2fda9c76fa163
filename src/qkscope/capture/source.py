"""What a checkpoint's `model:` means: a Hub id with a revision, a local directory, or a GGUF file.

Weights are read from safetensors or GGUF only, never from pickles, and no code that a checkpoint brings is run
unless whoever runs qkscope says so on the command line.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qkscope.capture.weights import require_safe_weights
from qkscope.errors import ModelError

SAMPLE_BYTES, SAMPLES = 64 * 1024, 64  # of each weight file: telling checkpoints apart need not read 140 GB


@dataclass(frozen=True)
class ModelSource:
    """Where a model or tokenizer is loaded from."""

    kind: Literal["hub", "local", "gguf"]
    location: str  # Hub id, or the absolute path of a directory
    revision: str | None = None
    gguf_file: str | None = None  # the file's name inside `location`
    trust_remote_code: bool = False  # whether Python code that lies with the checkpoint may run

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for every `from_pretrained`: which revision, which file, and whether code may run."""
        arguments: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.kind == "hub":
            arguments["revision"] = self.revision or "main"
        if self.gguf_file:
            arguments["gguf_file"] = self.gguf_file
        return arguments

    def __str__(self) -> str:
        name = str(Path(self.location) / self.gguf_file) if self.gguf_file else self.location
        return f"{name}@{self.revision}" if self.revision and self.kind == "hub" else name


def find_source(model: str, revision: str | None, folder: Path, *, trust_remote_code: bool = False) -> ModelSource:
    """Tell what `model` is; paths are relative to `folder`, and anything that is not there is taken for a Hub id."""
    try:
        path = folder / Path(model).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, no such user's home, a NUL
        raise ModelError(f"model {model[:200]!r} cannot be looked for ({error})") from None
    if model.lower().endswith(".gguf"):
        if not is_file:
            raise ModelError(f"there is no GGUF file {path}")
        return ModelSource("gguf", str(path.parent.resolve()), gguf_file=path.name, trust_remote_code=trust_remote_code)
    if is_dir:
        require_safe_weights(path)
        return ModelSource("local", str(path.resolve()), trust_remote_code=trust_remote_code)
    if is_file:
        raise ModelError(f"{path} is a file; give a directory with config.json and safetensors, or a .gguf file")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no model directory {path}")
    return ModelSource("hub", model, revision, trust_remote_code=trust_remote_code)


def weights_fingerprint(source: ModelSource) -> str | None:
    """A hash that tells a local checkpoint's weights from others: sizes and evenly spaced samples of each file."""
    if source.kind == "hub":
        return None  # the commit hash says it
    folder = Path(source.location)
    files = [folder / source.gguf_file] if source.gguf_file else sorted(folder.glob("*.safetensors"))
    files += [path for path in [folder / "config.json"] if path.is_file() and not source.gguf_file]
    if source.trust_remote_code:  # then the code decides about the numbers as the weights do
        files += sorted(path for path in folder.rglob("*.py") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(i * max(0, size - SAMPLE_BYTES) // max(1, SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()}"
