"""The branches and tags of a repository on the Hub; offline, those that the cache knows."""

from __future__ import annotations

from pathlib import Path

from qkscope.errors import StudyError, first_line


def revisions_of(model: str) -> list[str]:
    """Names of all branches and tags of a model's repository."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return _cached(model)
    try:
        refs = HfApi().list_repo_refs(model)
    except GatedRepoError:
        raise StudyError(
            f"{model} is gated: accept its terms on its page, then set HF_TOKEN to a token of that account"
        ) from None
    except RepositoryNotFoundError:
        raise StudyError(
            f"there is no repository {model}, or it is private: check the id, and set HF_TOKEN if it is private"
        ) from None
    except Exception as error:  # of the library that asks: no route, nobody there, an answer that is none
        raise StudyError(
            f"the branches of {model} could not be listed ({first_line(error)}); with HF_HUB_OFFLINE=1 those in the "
            "cache are used"
        ) from error
    return list(dict.fromkeys(ref.name for ref in [*refs.branches, *refs.tags]))


def _cached(model: str) -> list[str]:
    from huggingface_hub import constants

    refs = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "refs"
    revisions = [path.relative_to(refs).as_posix() for path in sorted(refs.rglob("*")) if path.is_file()]
    if not revisions:
        raise StudyError(f"HF_HUB_OFFLINE is set, and the cache holds no revision of {model}")
    return revisions
