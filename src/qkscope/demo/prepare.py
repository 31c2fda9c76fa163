"""`prepare_demo`: everything a study needs, made in one folder.

    folder/checkpoints/<name>/   weights (safetensors), config and tokenizer of each of the ten
    folder/documents/*.txt       held-out excerpts
    folder/study.yaml            what `qkscope run` is given

What is complete and made from the same settings and sources is reused; interrupted training starts over. Each folder is
filled under another name and renamed when it is complete. It carries `demo.json`: what made it, and every file in it
with its size. Only files on that list are ever deleted; anything else stops the demo.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkscope.demo.corpus import split_library
from qkscope.demo.settings import DemoCheckpoint, DemoProgress, DemoSettings
from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.foreign import Unreadable, parse_json, read_bytes
from qkscope.results.folder import STUDY_YAML, results_file
from qkscope.study.load import MAX_BYTES

STUDY_HEADER = "# Made by `qkscope demo`. Copy it before you change it: the demo writes it again.\n"
RECORD = "demo.json"
MAKER = "qkscope demo"
LARGEST_RECORD = 16 * 1024 * 1024  # bytes; ours have a few kilobytes
ADVICE = "move what is yours elsewhere, or choose another folder for the demo"


def prepare_demo(folder: Path, settings: DemoSettings, progress: Callable[[DemoProgress], None] | None = None) -> Path:
    """Make or reuse the demo's checkpoints, documents and study file; the path of the study file."""
    study_file, documents, checkpoints = results_file(folder, STUDY_YAML), folder / "documents", folder / "checkpoints"
    plans = settings.checkpoints()
    corpus = split_library(settings)
    made_from = hashlib.sha256(f"{settings.fingerprint} {corpus.digest}".encode()).hexdigest()[:16]
    trained = all(_is_complete(checkpoints / plan.name, made_from) for plan in plans)
    # Before anything is written, so that a refusal changes nothing. A stray text among the documents would join the
    # study; a stray file in a checkpoint matters only if that is to be replaced.
    written = _own_study(study_file)
    for place in [documents, *(checkpoints / plan.name for plan in plans if not trained)]:
        _refuse_foreign(place)
        _refuse_foreign(_partial(place))
    if not _is_complete(documents, made_from):
        _publish(documents, made_from, corpus.write_documents)
    if not trained:
        from qkscope.demo.train import save_checkpoint, train

        def save(plan: DemoCheckpoint, model: Any) -> None:
            _publish(checkpoints / plan.name, made_from, lambda partial: save_checkpoint(model, partial))

        _discard_stale(checkpoints)
        train(settings, corpus, save, progress)
    text = _study_text(plans)
    if written != text.encode():
        write_text(study_file, text)
    return study_file


def _study_text(plans: list[DemoCheckpoint]) -> str:
    """The study file's text; paths in it are relative to the file."""
    import yaml

    checkpoints = [
        {
            "name": plan.name,
            "model": f"checkpoints/{plan.name}",
            "label": plan.label,
            "phase": plan.phase.title,
            "context": plan.phase.context,
            "expect": {"rope_theta": plan.phase.rope_theta, "max_position_embeddings": plan.phase.context},
        }
        for plan in plans
    ]
    documents = {"files": "documents/*.txt", "special_tokens": "none"}
    study = {"study": "demo", "title": "SmolLM3-demo", "head_types": True, "documents": documents}
    study["checkpoints"] = checkpoints
    return STUDY_HEADER + yaml.safe_dump(study, sort_keys=False, allow_unicode=True)


def _own_study(path: Path) -> bytes:
    """The study file, empty if there is none; raises InputError where it cannot be written or is someone else's."""
    checkpoints = path.parent / "checkpoints"
    for parent in (path.parent, checkpoints):
        if parent.exists() and not parent.is_dir():
            raise InputError(f"demo: {parent} is not a folder; {ADVICE}")
    if checkpoints.is_symlink():
        raise InputError(f"demo: {checkpoints} is a symbolic link; {ADVICE}")
    try:
        written = read_bytes(path, MAX_BYTES)
    except Unreadable:
        written = b""
    if path.exists() and not written.startswith(STUDY_HEADER.encode()):
        raise InputError(f"demo: {path} was not made by the demo; {ADVICE}")
    return written


# -- folders that the demo makes ------------------------------------------------------------------------------


def _is_complete(folder: Path, made_from: str) -> bool:
    """Whether `folder` was made from these settings and sources, and still has all its files."""
    record = _read_record(folder)
    if record is None or record["made_from"] != made_from or record["files"] is None:
        return False
    return set(record["files"].items()) <= set(_files_in(folder).items())


def _publish(folder: Path, made_from: str, fill: Callable[[Path], None]) -> None:
    """Make `folder` in one go: `fill` writes the files, a rename shows them."""
    partial = _partial(folder)
    _discard(partial)
    partial.mkdir(parents=True)
    _write_record(partial, made_from, files=None)  # so that a later run recognizes leftovers of the demo
    fill(partial)
    _write_record(partial, made_from, files=_files_in(partial))
    _discard(folder)
    partial.rename(folder)


def _partial(folder: Path) -> Path:
    """Where `folder` is filled before it is renamed."""
    return folder.with_name(f".{folder.name}.partial")


def _refuse_foreign(folder: Path) -> None:
    """Raise InputError if something that the demo did not make is where it would write."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"demo: {folder} was not made by the demo; {ADVICE}")
    foreign = _foreign_files(folder)
    if foreign:
        raise InputError(
            f"demo: {folder} holds files that the demo did not make ({foreign[0]}, {len(foreign)} in all); {ADVICE}"
        )


def _foreign_files(folder: Path) -> list[str]:
    """The files below `folder` that its record does not name; while it is being filled, all are the demo's."""
    record, files = _read_record(folder), _files_in(folder)
    if record is None:
        return list(files)
    return sorted(set(files) - set(files if record["files"] is None else record["files"]))


def _discard(folder: Path) -> None:
    """Remove a folder that the demo made; refuse if it holds anything else."""
    _refuse_foreign(folder)
    if folder.exists():
        shutil.rmtree(folder)


def _discard_stale(parent: Path) -> None:
    """Remove what earlier runs left in `parent`; whatever is not wholly the demo's own stays."""
    for folder in sorted(parent.iterdir()) if parent.is_dir() else []:
        if not folder.is_symlink() and _read_record(folder) is not None and not _foreign_files(folder):
            shutil.rmtree(folder)


def _files_in(folder: Path) -> dict[str, int]:
    """Every file below `folder` with its size in bytes, the record left out."""
    return {
        path.relative_to(folder).as_posix(): path.lstat().st_size
        for path in sorted(folder.rglob("*"))
        if path.name != RECORD and (path.is_symlink() or not path.is_dir())
    }


def _read_record(folder: Path) -> dict[str, Any] | None:
    """The folder's record, or None if the demo did not make it."""
    try:
        record = parse_json(read_bytes(folder / RECORD, LARGEST_RECORD))
    except Unreadable:
        return None
    if record.get("made_by") != MAKER or not {"made_from", "files"} <= set(record):
        return None
    return record if isinstance(record["files"], dict | None) else None


def _write_record(folder: Path, made_from: str, files: dict[str, int] | None) -> None:
    """State what made the folder; `files` is None until all are written."""
    record = {"made_by": MAKER, "made_from": made_from, "files": files}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
