"""Results on the Hub: the bundle as a dataset, the page as a static Space. Through huggingface_hub alone."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from qkscope.errors import InputError, StorageError, first_line
from qkscope.files import write_bytes, write_text
from qkscope.results.folder import CARD, REPORT_HTML
from qkscope.share.bundle import Bundle, collect, write_bundle
from qkscope.share.card import paths_in, space_card

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class PushSettings:
    """What goes where."""

    repo: str
    space: bool = True  # whether the page becomes a Space of the same name
    private: bool = False
    message: str = "Results of qkscope"


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
    bundle = collect(folder)
    if settings.space and REPORT_HTML not in bundle.files:
        raise InputError(f"{folder} has no {REPORT_HTML}, which the Space needs").advised(
            python="make it with qkscope.report, or give space=False",
            command=f"make it with `qkscope report {folder}`, or give --no-space",
        )
    for path in paths_in(bundle.results)[:5]:
        report(f"note: the provenance contains a path on this machine, which will be uploaded with it: {path}")
    with tempfile.TemporaryDirectory(prefix="qkscope-push-") as temporary:
        place = Path(temporary)
        write_bundle(bundle, place / "dataset")
        _tell_files(place / "dataset", f"dataset {settings.repo}", report)
        if settings.space:
            _write_space(bundle, place / "space")
            _tell_files(place / "space", f"space {settings.repo}", report)
        if dry_run:
            report("nothing was uploaded: this was a dry run")
            return []
        addresses = [_upload(place / "dataset", settings, "dataset")]
        if settings.space:
            addresses.append(_upload(place / "space", settings, "space"))
    return addresses


def _write_space(bundle: Bundle, place: Path) -> None:
    write_text(place / CARD, space_card(bundle.results))
    write_bytes(place / "index.html", bundle.files[REPORT_HTML].read_bytes())


def _tell_files(place: Path, name: str, report: Callable[[str], None]) -> None:
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    report(f"{name}: {len(files)} files, {total / 1e6:.1f} MB")
    for path in files:
        report(f"  {path.relative_to(place).as_posix()} ({path.stat().st_size:,} bytes)")


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
