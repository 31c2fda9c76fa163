"""What a checkpoint's `model:` means: a Hub id with a revision, a local directory, or a GGUF file.

Weights are read from safetensors or GGUF only, never from pickles, and no code that a checkpoint brings is run
unless whoever runs qkscope says so on the command line.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from qkscope.capture.gguf import require_gguf_reader
from qkscope.capture.weights import ADAPTER, require_base_name, require_peft, require_safe_weights, require_tokenizer
from qkscope.errors import ModelError, located

SourceRole = Literal["model", "tokenizer"]

HUB_ID = re.compile(r"([\w.-]{1,96}/)?[\w.-]{1,96}", re.ASCII)


@dataclass(frozen=True)
class ModelSource:
    """Where a model or tokenizer is loaded from."""

    kind: Literal["hub", "local", "gguf"]
    location: str  # Hub id, or the absolute path of a directory
    revision: str | None = None
    gguf_file: str | None = None  # the file's name inside `location`
    trust_remote_code: bool = False  # whether Python code that comes with the checkpoint may run
    adapter: str | None = None  # a LoRA adapter that is merged into the model: its absolute path, or its Hub id
    adapter_revision: str | None = None  # the commit of an adapter on the Hub; None for a folder
    base: ModelSource | None = None  # the model that the study names, should this repository hold an adapter
    base_revision: str | None = None  # or only the revision of the model that the adapter names
    looked_at: str = field(default="", compare=False)  # where a directory of this name was looked for

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
        named = f"{name}@{self.revision}" if self.revision and self.kind == "hub" else name
        at = f"@{self.adapter_revision}" if self.adapter_revision else ""
        return f"{self.adapter}{at} on {named}" if self.adapter else named

    @property
    def without_adapter(self) -> ModelSource:
        """The base model alone."""
        return replace(self, adapter=None, adapter_revision=None)

    @property
    def adapter_source(self) -> ModelSource | None:
        """Where the adapter itself is from; None where there is none."""
        if self.adapter is None:
            return None
        kind: Literal["hub", "local"] = "hub" if self.adapter_revision else "local"
        return ModelSource(kind, self.adapter, self.adapter_revision, trust_remote_code=self.trust_remote_code)


def find_source(
    model: str,
    revision: str | None,
    folder: Path,
    *,
    role: SourceRole = "model",
    trust_remote_code: bool = False,
    base: tuple[str | None, str | None] = (None, None),
) -> ModelSource:
    """What `model` (or a tokenizer) means, from paths alone: no weights are read and no request is made.

    Paths are relative to `folder`. What is not there and can be the id of a repository is taken for one. `base` is the
    model, and its revision, that an adapter belongs to, where it is not the one that the adapter names.
    """
    try:
        path = folder / Path(model).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, no such user's home, a NUL
        raise ModelError(f"{role} {model[:200]!r} cannot be looked up ({error})") from None
    gguf = model.lower().endswith(".gguf")
    if revision is not None and (gguf or is_dir or is_file):
        raise ModelError(_revision_of_files(model, revision, path, role))
    if gguf:
        if not is_file:
            raise ModelError(f"there is no GGUF file {path}{_closest(model, path)}")
        require_gguf_reader()
        return ModelSource("gguf", str(path.parent.resolve()), gguf_file=path.name, trust_remote_code=trust_remote_code)
    if is_dir and role == "model" and (path / ADAPTER).is_file():
        return _adapted(path, base, folder, trust_remote_code)
    if any(base) and (is_dir or is_file):
        raise no_adapter(model)
    if is_dir:
        require_safe_weights(path) if role == "model" else require_tokenizer(path)
        return ModelSource("local", str(path.resolve()), trust_remote_code=trust_remote_code)
    if is_file:
        raise ModelError(f"{path} is a file; give a directory with config.json and safetensors, or a .gguf file")
    _require_hub_id(model, path, role)
    source = ModelSource("hub", model, revision, trust_remote_code=trust_remote_code, looked_at=str(path))
    return _with_base(source, base, folder) if any(base) else source


def _with_base(source: ModelSource, base: tuple[str | None, str | None], folder: Path) -> ModelSource:
    """A repository and what the study says of its base, in case it holds an adapter."""
    if base[0] is None:
        return replace(source, base_revision=base[1])
    with located("base"):
        base_source = find_source(base[0], base[1], folder, trust_remote_code=source.trust_remote_code)
    return replace(source, base=base_source)


def no_adapter(model: str) -> ModelError:
    """Why a base is refused for a model that is not an adapter."""
    return ModelError(f"`base` belongs to an adapter, and {model[:200]!r} is not one; leave it out")


def _adapted(path: Path, base: tuple[str | None, str | None], folder: Path, trust_remote_code: bool) -> ModelSource:
    """The source of an adapter's base model, with the adapter."""
    require_peft()
    named = require_base_name(path)
    model, revision = base[0] or named[0], base[1] or (named[1] if base[0] is None else None)
    if model is None:
        raise ModelError(f"{path} holds an adapter that names no base model; name it with `base:`")
    stated = base[0] is not None
    with located(f"base model of the adapter {path}{'' if stated else ' (`base:` in the study names another)'}"):
        source = find_source(model, revision, folder, trust_remote_code=trust_remote_code)
    if source.adapter or source.kind == "gguf":
        raise ModelError(f"{path}: its base model, {source}, is not a folder or repository of whole weights")
    return replace(source, adapter=str(path.resolve()))


def _revision_of_files(model: str, revision: str, path: Path, role: SourceRole) -> str:
    """Why files have no revision, and which folder was probably meant."""
    meant = [Path(model).parent / revision, Path(model) / revision]
    there = [each for each, at in zip(meant, (path.parent / revision, path / revision), strict=True) if at.is_dir()]
    folder = there[0] if there else meant[0]
    key = "revision" if role == "model" else "tokenizer_revision"
    return (
        f"{key} {revision!r} cannot apply to {path}: only a repository on the Hub has revisions, and these files would "
        f"be read as they are. Remove it, and point `{role}:` at the folder of the checkpoint you mean, for instance "
        f"`{role}: {folder.as_posix()}`"
    )


def _require_hub_id(model: str, path: Path, role: SourceRole) -> None:
    """Refuse what is a mistyped path rather than the id of a repository: asking the Hub for it would only mislead."""
    missing = f"there is no {role} directory {path}{_closest(model, path)}"
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(missing)
    if not HUB_ID.fullmatch(model) or "--" in model or ".." in model:
        raise ModelError(f"{missing}, and {model[:200]!r} cannot be the id of a repository on the Hub")
    if "/" in model and path.parent.is_dir() and not _in_cache(model):
        raise ModelError(
            f"{missing}. It is taken for a path and not for a Hub id, because {path.parent} is a folder here; if it is "
            f"on the Hub, fetch it once with `hf download {model}`, and it will be found in the cache"
        )


def _in_cache(model: str) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}").is_dir()


def _closest(model: str, path: Path) -> str:
    """A hint at a file or folder with nearly the same name as a path that does not exist."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f" (did you mean {Path(model).parent.joinpath(close[0]).as_posix()}?)" if close else ""
