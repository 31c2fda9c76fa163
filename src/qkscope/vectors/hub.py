"""Datasets of vectors from the Hub: one repository, one revision per model."""

from __future__ import annotations

from pathlib import Path

from qkscope.errors import first_line
from qkscope.vectors.errors import VectorsError


def download_vectors(repo_id: str, revision: str | None = None) -> Path:
    """The local folder of a Hub dataset's parquet files; its name is the commit hash of the revision.

    The cache (HF_HOME), tokens and HF_HUB_OFFLINE are huggingface_hub's own business and work as everywhere.
    """
    from huggingface_hub import errors, snapshot_download

    where = f"dataset {repo_id}" + (f", revision {revision}" if revision else "")
    try:
        folder = Path(snapshot_download(repo_id, repo_type="dataset", revision=revision, allow_patterns=["*.parquet"]))
    except errors.GatedRepoError:
        reason = "its owner asks for consent first: accept on its page, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "there is no such dataset, or it is private: check the name, or log in with a token that may read it"
    except errors.RevisionNotFoundError:
        reason = "there is no such revision: a dataset of vectors has one branch per model, see its page"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = "it is not in the cache and the Hub cannot be reached: go online once, or unset HF_HUB_OFFLINE"
    except (errors.HFValidationError, OSError) as error:
        reason = first_line(error)
    else:
        if not any(folder.rglob("*.parquet")):
            raise VectorsError(f"{where}: has no parquet files at that revision; give the revision of a model")
        return folder
    raise VectorsError(f"{where} cannot be downloaded: {reason}")
