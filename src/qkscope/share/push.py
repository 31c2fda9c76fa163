"""Results on the Hub: the export as a dataset, the page as a static Space. Through huggingface_hub alone."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from qkscope.errors import InputError, StorageError, first_line
from qkscope.files import write_text
from qkscope.results.folder import CARD, REPORT_HTML
from qkscope.share.card import space_card
from qkscope.share.export import files_in, fill_export

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
MESSAGE = "Results of qkscope"


def push_results(
    folder: Path | str,
    repo: str,
    *,
    space: bool = True,
    private: bool = False,
    message: str = MESSAGE,
    with_text: bool = False,
    dry_run: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Upload a results folder as a dataset, and its page as a Space of the same name; returns the addresses.

    With `dry_run`, only report what would be uploaded.
    """
    if not REPOSITORY.fullmatch(repo) or "--" in repo or ".." in repo:
        raise InputError(f"{repo[:100]!r} is not a repository id; write owner/name")
    with tempfile.TemporaryDirectory(prefix="qkscope-push-") as temporary:
        places = {"dataset": Path(temporary) / "dataset"}
        results = fill_export(Path(folder), places["dataset"], report, with_text=with_text, parquet=True)
        if space:
            places["space"] = Path(temporary) / "space"
            write_text(places["space"] / CARD, space_card(results))
            shutil.copyfile(results.folder / REPORT_HTML, places["space"] / "index.html")
        for kind, place in places.items():
            sizes = {file: (place / file).stat().st_size for file in files_in(place)}
            report(f"{kind} {repo}: {len(sizes)} files, {sum(sizes.values()) / 1e6:.1f} MB")
            for file, size in sizes.items():
                report(f"  {file} ({size:,} bytes)")
        if dry_run:
            report("nothing was uploaded: this was a dry run")
            return []
        return [_upload(place, kind, repo, private, message) for kind, place in places.items()]


def _upload(place: Path, kind: str, repo: str, private: bool, message: str) -> str:
    """Upload a folder as a `dataset` or a `space`; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    bars: Any = import_module("huggingface_hub.utils")
    bars.disable_progress_bars()  # every file has been reported already
    api: Any = HfApi()
    sdk = {"space_sdk": "static"} if kind == "space" else {}
    where = f"{kind} {repo}"
    try:
        made = api.create_repo(repo, repo_type=kind, private=private or None, exist_ok=True, **sdk)
        api.upload_folder(repo_id=repo, repo_type=kind, folder_path=str(place), commit_message=message)
    except LocalTokenNotFoundError:
        raise InputError(f"{where}: the Hub needs you to authenticate; set HF_TOKEN") from None
    except HfHubHTTPError as error:
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            raise InputError(f"{where}: you have no write access there; set HF_TOKEN to a token that has") from error
        raise StorageError(f"{where}: the Hub refused ({first_line(error)})") from error
    except Exception as error:  # no route, no server
        raise StorageError(
            f"{where} could not be uploaded ({first_line(error)}); run the same command again"
        ) from error
    return str(made)
