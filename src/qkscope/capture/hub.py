"""Models on the Hub: revisions pinned to commits, files fetched, failures explained, the cache tidied on request.

Everything goes through huggingface_hub, so HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they always mean.
"""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from qkscope.capture.source import HUB_ID, ModelSource, no_adapter
from qkscope.capture.weights import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    INDEX,
    SINGLE,
    read_base_name,
    require_peft,
    require_safe_index,
    require_safetensors,
)
from qkscope.errors import ModelError, QkscopeWarning, StorageError, first_line
from qkscope.text import byte_size

NOTE_SECONDS = 30  # between notes about a download


def pin_revision(source: ModelSource, filename: str) -> ModelSource:
    """The same source at the commit its revision stands for now, so that a branch cannot move under a run.

    `filename` is a small file that the source must have; it is fetched if it is not in the cache. Where a repository
    has no config because it holds an adapter, the source is that of its base model, with the adapter at its commit.
    """
    from huggingface_hub.errors import EntryNotFoundError
    from transformers.utils.hub import cached_file, extract_commit_hash

    if source.kind != "hub":
        return source
    try:
        _require_answer(source, filename)
        file = cached_file(source.location, filename, revision=source.revision or "main")
    except ModelError:
        raise
    except Exception as error:
        missing = any(isinstance(cause, EntryNotFoundError) for cause in _causes(error))
        adapted = _adapted(source) if missing and filename == "config.json" else None
        if adapted is None:
            raise explain_failure(source, error) from error
        return adapted
    if file is None and filename == "config.json":  # transformers' answer where a repository has none
        if adapted := _adapted(source):
            return adapted
        raise ModelError(f"{source} has no config.json: it is not a saved transformers model")
    if source.base is not None or source.base_revision is not None:
        raise no_adapter(source.location)
    commit = extract_commit_hash(file, None)
    return replace(source, revision=commit) if commit else source


def _require_answer(source: ModelSource, filename: str) -> None:
    """Ask once whether the Hub can be reached at all: any answer counts, and only silence is an error here.

    huggingface_hub itself tries for half a minute when a file is not in its cache and nobody answers.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE or _cached_file(source, filename) is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(source.location, filename, revision=source.revision or "main"))
    except HfHubHTTPError:
        return  # an answer, whatever it is
    except Exception as error:  # of the library that asks: no address, no route, nobody there, no answer in time
        raise ModelError(f"{source} could not be fetched: {_unreachable(source)} ({first_line(error)})") from error


# -- files -------------------------------------------------------------------------------------------------


def fetch_file(source: ModelSource, filename: str) -> Path:
    """A file of a repository, from the cache or from the Hub."""
    from transformers.utils.hub import cached_file

    try:
        return Path(cached_file(source.location, filename, revision=source.revision or "main"))
    except Exception as error:
        raise explain_failure(source, error) from error


def fetch_weights(source: ModelSource) -> list[Path]:
    """The files that hold a checkpoint's weights; those on the Hub are downloaded unless they are in the cache."""
    if source.kind != "hub":
        folder = Path(source.location)
        return [folder / source.gguf_file] if source.gguf_file else sorted(folder.glob("*.safetensors"))
    return [fetch_file(source, name) for name in download_weights(source)]


def download_weights(source: ModelSource) -> list[str]:
    """Download a repository's weights, unless they are in the cache; returns the names of their files.

    Size and progress are notes where huggingface_hub shows no bars. Raises StorageError where the disk lacks the room;
    what the Hub refuses, loading explains.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    index = weights_index(source)
    names = [SINGLE] if index is None else require_safe_index(index)
    missing = [name for name in names if _cached_file(source, name) is None]
    revision = source.revision or "main"
    if not missing or constants.HF_HUB_OFFLINE:
        return names
    try:
        sizes = [get_hf_file_metadata(hf_hub_url(source.location, name, revision=revision)).size for name in missing]
    except Exception:
        return names
    _require_room(source, sum(filter(None, sizes)))
    bars: Any = import_module("huggingface_hub.utils")
    in_notes = bars.are_progress_bars_disabled() and threading.current_thread() is threading.main_thread()
    bar = None
    if in_notes:  # another process, or the thread that fetches ahead, may be downloading it: then this waits
        warnings.warn(f"{source}: {byte_size(sum(filter(None, sizes)))} to download", QkscopeWarning, stacklevel=2)
        bar = _noting_bar(source)
    try:
        for name in missing:
            hf_hub_download(source.location, name, revision=revision, tqdm_class=bar)
    except Exception as error:
        raise explain_failure(source, error) from error
    return names


def _require_room(source: ModelSource, needed: int) -> None:
    """Refuse a download for which the disk of the cache has no room, beside what an earlier attempt left of it."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    blobs = cache / f"models--{source.location.replace('/', '--')}" / "blobs"
    begun = sum(path.stat().st_size for path in blobs.glob("*.incomplete"))
    free = free_bytes(cache)
    if needed - begun > free:
        raise StorageError(
            f"{source}: its weights are {byte_size(needed)}, and {cache} has {byte_size(free)} free"
        ).advised(
            python="free some space, set HF_HOME to a folder on a larger disk, or run with evict=True",
            command="free some space, set HF_HOME to a folder on a larger disk, or give --evict, which deletes each "
            "checkpoint's download once it is measured",
        )


def free_bytes(folder: Path) -> int:
    """Free space where a folder is, or will be."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.is_dir())).free


def _noting_bar(source: ModelSource) -> Any:
    """A progress bar that notes the bytes of a download at its start, every half minute, and at its end."""
    bars: Any = import_module("tqdm.std")

    class NotingBar(bars.tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread of its own

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)
            quiet = {"disable": False, "file": StringIO(), "mininterval": NOTE_SECONDS, "miniters": 1}
            super().__init__(*arguments, **{**options, **quiet})

        def display(self, *_: Any, **__: Any) -> None:
            done = f"{byte_size(self.n)} of {byte_size(self.total)}" if self.total else byte_size(self.n)
            warnings.warn(f"downloading {source}: {self.desc.strip()} {done}", QkscopeWarning, stacklevel=2)

    return NotingBar


def weights_index(source: ModelSource) -> Path | None:
    """The (small) index of a repository's sharded weights, from the cache or the Hub; None where it has none."""
    from transformers.utils.hub import cached_file

    silent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        index = cached_file(source.location, INDEX, revision=source.revision or "main", **silent)
    except Exception as error:
        raise explain_failure(source, error) from error
    if index is not None:
        require_safe_index(Path(index))
    return None if index is None else Path(index)


def cached_weights(source: ModelSource) -> list[Path] | None:
    """The weight files of a repository that would be loaded, if all are in the cache."""
    single, index = _cached_file(source, SINGLE), _cached_file(source, INDEX)
    if single is not None or index is None:
        return None if single is None else [single]
    shards = [index.parent / name for name in require_safe_index(index)]
    return shards if all(shard.is_file() for shard in shards) else None


def _cached_file(source: ModelSource, filename: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source.location, filename, revision=source.revision or "main")
    return Path(path) if isinstance(path, str) else None


def _has_file(source: ModelSource, filename: str) -> bool:
    """Whether a source has a file; nothing is fetched."""
    from huggingface_hub import HfApi, constants

    if source.kind == "local":
        return (Path(source.location) / filename).is_file()
    if constants.HF_HUB_OFFLINE or _cached_file(source, filename) is not None:
        return _cached_file(source, filename) is not None
    try:
        return bool(HfApi().file_exists(source.location, filename, revision=source.revision))
    except Exception as error:
        raise explain_failure(source, error) from error


def evict(source: ModelSource) -> int:
    """Delete the cached files that only this commit of a repository needs; returns the bytes freed."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    commit = source.revision
    if source.kind != "hub" or commit is None:
        return 0
    try:
        cache: Any = scan_cache_dir()
    except CacheNotFound:
        return 0
    repos = [repo for repo in cache.repos if repo.repo_type == "model" and repo.repo_id == source.location]
    if not any(revision.commit_hash == commit for repo in repos for revision in repo.revisions):
        return 0
    # Blobs that other revisions share stay; huggingface_hub knows which.
    strategy = cache.delete_revisions(commit)
    strategy.execute()
    return int(strategy.expected_freed_size)


# -- adapters ----------------------------------------------------------------------------------------------


def _adapted(source: ModelSource) -> ModelSource | None:
    """The base model of what a repository without a config holds, at its commit, with it; None if it is no adapter."""
    from transformers.utils.hub import extract_commit_hash

    if not _has_file(source, ADAPTER):
        return None
    config = fetch_file(source, ADAPTER)
    exact = replace(source, revision=extract_commit_hash(str(config), None))
    if source.adapter:
        raise ModelError(f"{source.adapter}: its base model holds an adapter itself; name a whole model with `base:`")
    require_peft()
    if (base := source.base) is None:  # the one it names; a path on its author's machine is not looked up on this one
        name, revision = read_base_name(config.parent)
        if name is None or not HUB_ID.fullmatch(name):
            named = "no base model" if name is None else f"{name[:200]!r} as its base model, which is not on the Hub"
            raise ModelError(f"{exact} holds an adapter that names {named}; name it with `base:`")
        revision = exact.base_revision or revision
        base = ModelSource("hub", name, revision, trust_remote_code=exact.trust_remote_code)
    if not _has_file(exact, ADAPTER_WEIGHTS):
        raise ModelError(f"{exact} has an {ADAPTER} but no {ADAPTER_WEIGHTS}; adapters are read from safetensors only")
    whole = pin_revision(base, "config.json")
    if whole.adapter or whole.kind == "gguf":
        raise ModelError(f"{exact}: its base model, {whole}, is not a folder or repository of whole weights")
    return replace(whole, adapter=exact.location, adapter_revision=exact.revision)


def adapter_folder(source: ModelSource, *, fetch: bool = True) -> Path | None:
    """Where the files of a source's adapter are; None where there is none, or where it would have to be fetched first.

    Adapters on the Hub are fetched unless they are in the cache.
    """
    adapter = source.adapter_source
    if adapter is None or adapter.kind == "local":
        return None if adapter is None else Path(adapter.location)
    if not fetch:
        weights = _cached_file(adapter, ADAPTER_WEIGHTS)
        return None if weights is None else weights.parent
    require_safetensors(fetch_file(adapter, ADAPTER_WEIGHTS))
    return fetch_file(adapter, ADAPTER).parent


def adapter_tokenizer(source: ModelSource) -> ModelSource | None:
    """The tokenizer that was saved with an adapter, if one was; else that of its base model serves."""
    adapter = source.adapter_source
    return adapter if adapter is not None and _has_file(adapter, "tokenizer.json") else None


# -- failures ----------------------------------------------------------------------------------------------


def explain_failure(source: ModelSource, error: BaseException) -> ModelError:
    """What a failed load means for the user, and the way out."""
    import huggingface_hub.errors as hub
    from huggingface_hub import constants

    if isinstance(error, ModelError):
        return error  # it was explained where it happened
    text, first = str(error).strip(), first_line(error)
    if not source.trust_remote_code and ("trust_remote_code" in text or "custom code" in text):
        return needs_remote_code(source)
    if "safetensors" in text and ("pytorch_model" in text or "use_safetensors" in text or "pickle" in text):
        return ModelError(f"{source} has no safetensors weights; qkscope does not read pickles")
    if "backend tokenizer" in text:  # transformers lists the formats it tried, and not what is missing
        return ModelError(f"{source} has no tokenizer files (tokenizer.json, or the files of a slow tokenizer)")
    if is_unconverted(error):
        return ModelError(
            f"{source} does not fit its config: transformers cannot combine its tensors into those of the model, "
            "because some are missing or have another shape; save the checkpoint again, or correct its config"
        )
    if source.kind != "hub":
        return ModelError(f"{source} cannot be loaded: {first}")
    nor_folder = f" (nor a directory {source.looked_at})" if source.looked_at else ""
    offline = (
        f"HF_HUB_OFFLINE is set and it is not in the cache{nor_folder}; check the name, unset it, or fetch the model "
        "once with a connection"
    )
    reasons: tuple[tuple[type[BaseException], str], ...] = (
        (hub.GatedRepoError, "it is gated: accept its terms on its page, then set HF_TOKEN to a token of that account"),
        (hub.RevisionNotFoundError, f"it has no revision {source.revision!r}; check the branch, tag or commit"),
        (
            hub.RepositoryNotFoundError,
            f"there is no such repository{nor_folder}, or it is private: check the id, and set HF_TOKEN if it is "
            "private",
        ),
        (hub.OfflineModeIsEnabled, offline),
        (hub.LocalEntryNotFoundError, offline if constants.HF_HUB_OFFLINE else _unreachable(source)),
    )
    causes = list(_causes(error))
    reason = next((why for kind, why in reasons if any(isinstance(each, kind) for each in causes)), first)
    return ModelError(f"{source} could not be fetched: {reason}")


def _unreachable(source: ModelSource) -> str:
    no_folder = f"there is no directory {source.looked_at}, so it was taken for a Hub id; " if source.looked_at else ""
    return (
        f"{no_folder}the Hub could not be reached, and it is not in the cache (HF_HOME); check the name and the "
        "connection"
    )


def is_unconverted(error: BaseException) -> bool:
    """Whether transformers could not fuse or split tensors of a checkpoint, such as those of experts."""
    return "automatic conversion of the weights" in str(error)


def needs_remote_code(source: ModelSource) -> ModelError:
    """Why a checkpoint that transformers alone cannot load is refused, and what lifting that means."""
    return ModelError(
        f"{source} needs remote code: Python that comes with the checkpoint and is not part of transformers. It is not "
        "run unless you allow it; that code could then do anything you can do on this machine"
    ).advised(
        python="read it and pass trust_remote_code=True, or use a model that transformers has",
        command="read it and give --trust-remote-code, or use a model that transformers has",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
