"""Good manners on the Hub: revisions pinned to commits, failures explained, the cache tidied on request.

Everything goes through huggingface_hub, so HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they always mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkscope.capture.source import ModelSource
from qkscope.capture.weights import ADAPTER, adapter_message
from qkscope.errors import ModelError


def pinned(source: ModelSource, filename: str) -> ModelSource:
    """The same source at the commit its revision stands for now, so that a branch cannot move under a run.

    `filename` is a small file that the source must have; it is fetched if it is not in the cache.
    """
    from huggingface_hub.errors import EntryNotFoundError
    from transformers.utils.hub import cached_file, extract_commit_hash

    if source.kind != "hub":
        return source
    try:
        _require_answer(source, filename)
        found = cached_file(source.location, filename, revision=source.revision or "main")
    except ModelError:
        raise
    except Exception as error:
        missing = any(isinstance(cause, EntryNotFoundError) for cause in _causes(error))
        raise (_adapter(source) if missing else None) or explain(source, error) from error
    if found is None and filename == "config.json":
        raise _adapter(source) or ModelError(f"{source} has no config.json: it is not a saved transformers model")
    commit = extract_commit_hash(found, None)
    return replace(source, revision=commit) if commit else source


def _require_answer(source: ModelSource, filename: str) -> None:
    """Ask once whether the Hub can be reached at all: what it would say is told later, but silence is told now.

    huggingface_hub itself tries for half a minute when a file is not in its cache and nobody answers.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    revision = source.revision or "main"
    if constants.HF_HUB_OFFLINE or isinstance(
        try_to_load_from_cache(source.location, filename, revision=revision), str
    ):
        return
    try:
        get_hf_file_metadata(hf_hub_url(source.location, filename, revision=revision))
    except HfHubHTTPError:
        return  # an answer, whatever it is
    except Exception as error:  # of the library that asks: no address, no route, nobody there, no answer in time
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{source} could not be fetched: {_unreachable(source)} ({reason[0][:200]})") from error


def _unreachable(source: ModelSource) -> str:
    beside = f"there is no directory {source.looked_at}, so it was taken for a Hub id; " if source.looked_at else ""
    return (
        f"{beside}the Hub could not be reached, and it is not in the cache (HF_HOME); check the name and the connection"
    )


def _adapter(source: ModelSource) -> ModelError | None:
    """The reason, if a repository has no config because it holds an adapter."""
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(source.location, ADAPTER, revision=source.revision or "main")
    except Exception:  # then it is something else, and the first error says what
        return None
    return ModelError(adapter_message(source, Path(found))) if found else None


def explain(source: ModelSource, error: BaseException) -> ModelError:
    """What a failed load means for the user, and the way out."""
    import huggingface_hub.errors as hub
    from huggingface_hub import constants

    if isinstance(error, ModelError):
        return error  # it was explained where it happened
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if not source.trust_remote_code and ("trust_remote_code" in text or "custom code" in text):
        return needs_code(source)
    if "safetensors" in text and ("pytorch_model" in text or "use_safetensors" in text or "pickle" in text):
        return ModelError(f"{source} has no safetensors weights; qkscope does not read pickles")
    if source.kind != "hub":
        return ModelError(f"{source} cannot be loaded: {first}")
    causes = list(_causes(error))
    offline = (
        f"HF_HUB_OFFLINE is set and it is not in the cache{_nor_folder(source)}; check the name, unset it, or fetch "
        "the model once with a connection"
    )
    reasons: tuple[tuple[type[BaseException], str], ...] = (
        (
            hub.GatedRepoError,
            "it is gated: accept its terms on its page, then set HF_TOKEN to a token of that account",
        ),
        (hub.RevisionNotFoundError, f"it has no revision {source.revision!r}; check the branch, tag or commit"),
        (
            hub.RepositoryNotFoundError,
            f"there is no such repository{_nor_folder(source)}, or it is private: check the id, and set HF_TOKEN if it "
            "is private",
        ),
        (hub.OfflineModeIsEnabled, offline),
        (hub.LocalEntryNotFoundError, offline if constants.HF_HUB_OFFLINE else _unreachable(source)),
    )
    for kind, reason in reasons:
        if any(isinstance(cause, kind) for cause in causes):
            return ModelError(f"{source} could not be fetched: {reason}")
    return ModelError(f"{source} could not be fetched: {first}")


def _nor_folder(source: ModelSource) -> str:
    return f" (nor a directory {source.looked_at})" if source.looked_at else ""


def needs_code(source: ModelSource) -> ModelError:
    """Why a checkpoint that transformers alone cannot load is refused, and what lifting that means."""
    return ModelError(
        f"{source} needs remote code: Python that lies with the checkpoint and that transformers does not have. It is "
        "not run unless you say so, which lets that code do anything you can do on this machine"
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


def evict(source: ModelSource, commit: str | None) -> int:
    """Delete the cached files that only this commit of the model needs; returns the bytes freed."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    if source.kind != "hub" or commit is None:
        return 0
    try:
        cache: Any = scan_cache_dir()
    except CacheNotFound:
        return 0
    held = [
        revision
        for repo in cache.repos
        if repo.repo_type == "model" and repo.repo_id == source.location
        for revision in repo.revisions
        if revision.commit_hash == commit
    ]
    if not held:
        return 0
    # Blobs that other revisions share stay; huggingface_hub knows which.
    strategy = cache.delete_revisions(commit)
    strategy.execute()
    return int(strategy.expected_freed_size)
