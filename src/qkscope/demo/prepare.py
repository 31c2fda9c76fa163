"""`prepare_demo`: everything a study needs, made in one folder.

    folder/checkpoints/<name>/   weights (safetensors), config and tokenizer of each of the ten
    folder/documents/*.txt       held-out excerpts
    folder/study.yaml            what `qkscope run` is given

What is complete and made from the same settings and sources is reused. Training that was interrupted starts
over: it takes two minutes, and a half-trained series continued elsewhere would not be one series.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkscope.demo import made
from qkscope.demo.corpus import DemoCorpus, split_library, write_documents
from qkscope.demo.settings import DemoCheckpoint, DemoProgress, DemoSettings
from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.foreign import Unreadable, read_bytes
from qkscope.results.folder import STUDY_YAML, results_file
from qkscope.study.load import MAX_BYTES

STUDY_HEADER = "# Made by `qkscope demo`. Copy it before you change it: the demo writes it anew.\n"


def prepare_demo(folder: Path, settings: DemoSettings, progress: Callable[[DemoProgress], None] | None = None) -> Path:
    """Make or reuse the demo's checkpoints, documents and study file; the path of the study file."""
    study_file, documents, checkpoints = results_file(folder, STUDY_YAML), folder / "documents", folder / "checkpoints"
    plans = settings.checkpoints()
    corpus = split_library(settings)
    made_from = hashlib.sha256(f"{settings.fingerprint} {corpus.digest}".encode()).hexdigest()[:16]
    trained = all(made.is_complete(checkpoints / plan.name, made_from) for plan in plans)
    # Look before anything is written, so that a refusal leaves everything as it was. A stray text among the
    # documents would also join the study; a stray file in a checkpoint matters only if that is to be replaced.
    refuse_foreign_study(study_file)
    for place in [documents, *(checkpoints / plan.name for plan in plans if not trained)]:
        made.refuse_foreign(place)
        made.refuse_foreign(made.partial_of(place))
    if not made.is_complete(documents, made_from):
        made.publish(documents, made_from, lambda partial: write_documents(corpus.documents, partial))
    if not trained:
        made.discard_stale(checkpoints)
        train_checkpoints(checkpoints, settings, corpus, made_from, progress)
    write_study(study_file, demo_study_text(plans))
    return study_file


def refuse_foreign_study(path: Path) -> None:
    """Raise InputError where the study file cannot be written or is someone else's."""
    for parent in (path.parent, path.parent / "checkpoints"):
        if parent.exists() and not parent.is_dir():
            raise InputError(f"demo: {parent} is not a folder; {made.ADVICE}")
    if (path.parent / "checkpoints").is_symlink():
        raise InputError(f"demo: {path.parent / 'checkpoints'} is a symbolic link; {made.ADVICE}")
    if path.exists() and not study_there(path).startswith(STUDY_HEADER.encode()):
        raise InputError(f"demo: {path} was not made by the demo; {made.ADVICE}")


def study_there(path: Path) -> bytes:
    """What the study file says; nothing where it is none."""
    try:
        return read_bytes(path, MAX_BYTES)
    except Unreadable:
        return b""


def train_checkpoints(
    checkpoints: Path,
    settings: DemoSettings,
    corpus: DemoCorpus,
    made_from: str,
    progress: Callable[[DemoProgress], None] | None,
) -> None:
    """Train from the start and publish each checkpoint when training reaches it."""
    from qkscope.demo.train import save_checkpoint, train

    def save(plan: DemoCheckpoint, model: Any) -> None:
        made.publish(checkpoints / plan.name, made_from, lambda partial: save_checkpoint(model, partial))

    train(settings, corpus, save, progress)


def demo_study_text(plans: list[DemoCheckpoint]) -> str:
    """The study file's text; paths in it are relative to the file."""
    import yaml

    study = {
        "study": "demo",
        "title": "SmolLM3-demo",
        "documents": {"files": "documents/*.txt", "special_tokens": "none"},
        "checkpoints": [
            {
                "name": plan.name,
                "model": f"checkpoints/{plan.name}",
                "label": plan.label,
                "phase": plan.phase.title,
                "context": plan.phase.context,
                "expect": {"rope_theta": plan.phase.rope_theta, "max_position_embeddings": plan.phase.context},
            }
            for plan in plans
        ],
    }
    return STUDY_HEADER + yaml.safe_dump(study, sort_keys=False, allow_unicode=True)


def write_study(path: Path, text: str) -> None:
    """Write the file in one go, and only if it changes."""
    if study_there(path) == text.encode():
        return
    write_text(path, text)
