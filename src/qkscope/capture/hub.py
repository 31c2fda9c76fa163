"""Good manners on the Hub: revisions pinned to commits, failures explained, the cache tidied on request.

Everything goes through huggingface_hub, so HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they always mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qkscope.capture.source import ModelSource
from qkscope.errors import ModelError


def pinned(source: ModelSource, filename: str) -> ModelSource:
    """The same source at the commit its revision stands for now, so that a branch cannot move under a run.

    `filename` is a small file that the source must have; it is fetched if it is not in the cache.
    """
    from transformers.utils.hub import cached_file, extract_commit_hash

    if source.kind != "hub":
        return source
    try:
        found = cached_file(source.location, filename, revision=source.revision or "main")
    except Exception as error:
        raise explain(source, error) from error
    commit = extract_commit_hash(found, None)
    return replace(source, revision=commit) if commit else source


def explain(source: ModelSource, error: BaseException) -> ModelError:
    """What a failed load means for the user, and the way out."""
    import huggingface_hub.errors as hub

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
    reasons: tuple[tuple[type[BaseException], str], ...] = (
        (
            hub.GatedRepoError,
            "it is gated: accept its terms on its page, then set HF_TOKEN to a token of that account",
        ),
        (hub.RevisionNotFoundError, f"it has no revision {source.revision!r}; check the branch, tag or commit"),
        (
            hub.RepositoryNotFoundError,
            "there is no such repository (nor a local folder of that name), or it is private: check the id, and set "
            "HF_TOKEN if it is private",
        ),
        (
            hub.OfflineModeIsEnabled,
            "HF_HUB_OFFLINE is set and it is not in the cache; unset it, or fetch the model once with a connection",
        ),
        (
            hub.LocalEntryNotFoundError,
            "the Hub could not be reached, and it is not in the cache (HF_HOME); check the connection",
        ),
    )
    for kind, reason in reasons:
        if any(isinstance(cause, kind) for cause in causes):
            return ModelError(f"{source} could not be had: {reason}")
    return ModelError(f"{source} could not be had: {first}")


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
