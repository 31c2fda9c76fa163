"""Whether a finished run would do anything if it was run again, found out without loading a model or a tokenizer.

A run that ends well records a hash of all that it was made from: the study, each checkpoint's files or commit, the code
and its versions. The documents are compared as ever, by `documents.tokens`; moments and tables by size and time. Where
anything differs, or cannot be told quickly, the run is planned as usual, which names what changed.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from qkscope.capture.source import ModelSource, find_source
from qkscope.documents.tokens import load_corpus
from qkscope.errors import QkscopeError, QkscopeWarning
from qkscope.results.current import RunInputs, code_version, file_state, has_foreign_lenses, hash_of, read_current
from qkscope.results.folder import moments_path, tokens_path
from qkscope.results.lock import lock_folder
from qkscope.results.provenance import read_left_out
from qkscope.results.remove import remove_unfinished
from qkscope.run.engines import CaptureOptions
from qkscope.run.models import model_source
from qkscope.run.plan import Plan
from qkscope.run.progress import Events
from qkscope.study.load import StudyFile

COMMIT = re.compile(r"[0-9a-f]{40}")


def is_unchanged(file: StudyFile, folder: Path, events: Events, options: CaptureOptions) -> bool:
    """Whether the results in a folder are those that a run of this study would leave there; if so, it is reported."""
    current = read_current(folder)
    if current is None or current.run is None or options.overwrite or options.vectors is not None:
        return False
    try:
        kept = {name: file_state(moments_path(folder, name)) for name in current.run.moments}
        unchanged = (
            kept == current.run.moments
            and not read_left_out(folder)
            and current.run.inputs == _inputs(file, options)
            and all(_same_documents(file, folder, key) for key in current.run.tokens)
        )
    except (QkscopeError, OSError):  # explained where the run is planned
        return False
    if unchanged:
        with lock_folder(folder):  # refused while another run works there
            remove_unfinished(folder, alone=True)
            events.unchanged([each.name for each in file.study.checkpoints])
    return unchanged


def remember_run(plan: Plan, folder: Path, options: CaptureOptions) -> None:
    """Record what a finished run was made from, in the record of its tables."""
    current, inputs = read_current(folder), None
    if current is not None and not options.only and not read_left_out(folder):
        inputs = _inputs(plan.file, options)
    if current is not None and inputs is not None:
        names = [each.checkpoint.name for each in plan.checkpoints]
        tokens = sorted({each.corpus.key for each in plan.checkpoints})
        moments = {name: file_state(moments_path(folder, name)) for name in names}
        run = RunInputs(inputs=inputs, tokens=tokens, moments=moments)
        current.model_copy(update={"run": run}).save(folder)


def _same_documents(file: StudyFile, folder: Path, key: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QkscopeWarning)  # the run itself warns
        return load_corpus(tokens_path(folder, key), key, file.study.documents, file.folder) is not None


def _inputs(file: StudyFile, options: CaptureOptions) -> str | None:
    """A hash of the study and the states of all models; None where these cannot be told without more work."""
    if options.trust_remote_code or has_foreign_lenses():
        return None
    states: dict[str, Any] = {}
    for checkpoint in file.study.resolved_checkpoints():
        sources = [model_source(checkpoint, file.folder, False)]
        if checkpoint.tokenizer is not None:
            place = checkpoint.tokenizer, checkpoint.tokenizer_revision, file.folder
            sources.append(find_source(*place, role="tokenizer"))
        for source in sources:
            states[str(source)] = states.get(str(source)) or _state(source)
    known = all(state is not None for state in states.values())
    return hash_of(file.study.model_dump(mode="json"), states, code_version()) if known else None


def _state(source: ModelSource) -> Any:
    """The commit of a model on the Hub, or sizes and times of a model's files."""
    if source.adapter is not None or source.base is not None:
        return None
    if source.kind == "hub":
        if source.revision and COMMIT.fullmatch(source.revision):
            return source.revision
        try:
            from huggingface_hub import HfApi

            return HfApi().repo_info(source.location, revision=source.revision or "main").sha
        except Exception:  # not reached; the run itself may have it in its cache
            return None
    place = Path(source.location)
    files = (
        [place / source.gguf_file] if source.gguf_file else sorted(path for path in place.iterdir() if path.is_file())
    )
    return [[path.name, *file_state(path), path.stat().st_ctime_ns] for path in files]
