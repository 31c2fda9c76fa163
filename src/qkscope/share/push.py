"""Results on the Hub: the export as a dataset, the page as a static Space. Through huggingface_hub alone."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from qkscope.errors import InputError, StorageError, first_line
from qkscope.files import write_text
from qkscope.results.folder import CARD, REPORT_HTML
from qkscope.results.read import ResultsFolder
from qkscope.share.bundle import ExportSettings, files_in, fill_export
from qkscope.share.card import space_card

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class PushSettings:
    """What goes where."""

    repo: str
    space: bool = True  # whether the page becomes a Space of the same name
    private: bool = False
    message: str = "Results of qkscope"
    with_text: bool = False  # tables with document text


def push_results(
    folder: Path | str,
    settings: PushSettings,
    *,
    dry_run: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Upload a results folder; returns the addresses. With `dry_run`, only tell what would be uploaded."""
    if not REPOSITORY.fullmatch(settings.repo) or "--" in settings.repo or ".." in settings.repo:
        raise InputError(f"{settings.repo[:100]!r} is not a repository id; write owner/name")
    exported = ExportSettings(with_text=settings.with_text, parquet=True)
    with tempfile.TemporaryDirectory(prefix="qkscope-push-") as temporary:
        place = Path(temporary)
        results = fill_export(Path(folder), place / "dataset", exported, report)
        _tell_files(place / "dataset", f"dataset {settings.repo}", report)
        if settings.space:
            _write_space(results, place / "space")
            _tell_files(place / "space", f"space {settings.repo}", report)
        if dry_run:
            report("nothing was uploaded: this was a dry run")
            return []
        addresses = [_upload(place / "dataset", settings, "dataset")]
        if settings.space:
            addresses.append(_upload(place / "space", settings, "space"))
    return addresses


def _write_space(results: ResultsFolder, place: Path) -> None:
    write_text(place / CARD, space_card(results))
    shutil.copyfile(results.folder / REPORT_HTML, place / "index.html")


def _tell_files(place: Path, name: str, report: Callable[[str], None]) -> None:
    sizes = {file: (place / file).stat().st_size for file in files_in(place)}
    report(f"{name}: {len(sizes)} files, {sum(sizes.values()) / 1e6:.1f} MB")
    for file, size in sizes.items():
        report(f"  {file} ({size:,} bytes)")


def _upload(place: Path, settings: PushSettings, kind: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    bars: Any = import_module("huggingface_hub.utils")
    bars.disable_progress_bars()  # every file has been told already
    api: Any = HfApi()
    more = {"space_sdk": "static"} if kind == "space" else {}
    try:
        made = api.create_repo(settings.repo, repo_type=kind, private=settings.private or None, exist_ok=True, **more)
        api.upload_folder(
            repo_id=settings.repo, repo_type=kind, folder_path=str(place), commit_message=settings.message
        )
    except LocalTokenNotFoundError:
        raise InputError(f"{kind} {settings.repo}: the Hub needs you to authenticate; set HF_TOKEN") from None
    except HfHubHTTPError as error:
        raise _refused(error, kind, settings.repo) from error
    except Exception as error:  # no route, nobody there
        raise StorageError(
            f"{kind} {settings.repo} could not be uploaded ({first_line(error)}); run the same command again"
        ) from error
    return str(made)


def _refused(error: Any, kind: str, repo: str) -> InputError | StorageError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return InputError(f"{kind} {repo}: you have no write access there; set HF_TOKEN to a token that has")
    return StorageError(f"{kind} {repo}: the Hub refused ({first_line(error)})")
