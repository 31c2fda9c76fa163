"""Finished moments and vectors in a results folder: whether they are what the study asks for.

Nothing finished is replaced silently. Moments that differ only by rounding (other batches, other versions) are used; so
are those of a longer context, if the shorter one ends on an edge of their buckets. For all others a run refuses, names
what differs, and replaces them only when it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qkscope.errors import InputError, MomentsFileError
from qkscope.moments.file import read_provenance
from qkscope.results.environment import numeric_versions
from qkscope.results.folder import MOMENTS_SUFFIX, entries, moments_folder, moments_path, shards_folder
from qkscope.results.provenance import CheckpointRecord
from qkscope.run.checkpoint_plan import CheckpointPlan
from qkscope.validation.layout import VectorSample

Standing = Literal["same", "suffices", "other"]

WORDS = {
    "schema": "schema",
    "model": "weights",
    "config": "config overrides",
    "tokenizer": "tokenizer",
    "special_tokens": "special_tokens",
    "documents": "documents",
    "context": "context",
    "buckets": "buckets",
    "groups": "groups",
    "common_window": "common window",
    "unrotated_every": "share of tokens before rotation",
    "sample": "sample of tokens",
    "stage": "stage",
    "last_layer": "last layer",
    "dtype": "dtype",
    "trust_remote_code": "trust_remote_code",
    "edges": "bucket edges",
    "tokens": "tokens",
    "batch_tokens": "batch_tokens",
    "shard_tokens": "shard_tokens",
}
HASHES = ("model", "tokenizer", "documents", "tokens")
# Settings that follow from others are named only if none of those changed.
DERIVED = {
    "edges": ("context", "buckets"),
    "tokens": ("context", "documents", "tokenizer", "special_tokens"),
    "common_window": ("context",),
    "unrotated_every": ("context", "stage"),
}
# Settings in which sums of a longer context may differ and still be used, if their edges fit.
REACH = {"context", "edges", "tokens", "common_window", "unrotated_every", "last_layer"}
ROUNDING = ("batch_tokens", "shard_tokens")
WAY_OUT = (
    "--overwrite replaces them (in Python: CaptureOptions(overwrite=True)); another --out, or another name for the "
    "checkpoint, keeps both"
)


@dataclass(frozen=True)
class MomentsJudgement:
    """Whether finished moments can be used for a plan."""

    standing: Standing
    fingerprint: str  # of the moments
    remarks: list[str] = field(default_factory=list)  # what differs, in words


def judge_moments(plan: CheckpointPlan, made: CheckpointRecord) -> MomentsJudgement:
    """Compare what finished moments were made from with what the plan would make them from."""
    own = made.fingerprint or ""
    versions = _version_remarks(made)
    if own == plan.fingerprint():
        return MomentsJudgement("same", own, versions)
    stored, planned = _stored_settings(made), plan.settings()
    changes = changed_settings(stored, planned)
    complete = set(planned) <= set(stored)
    if complete and set(changes) <= {*ROUNDING, *REACH}:
        shorter = _shorter(plan, stored)
        if shorter is not None:
            rounding = [changes[key] for key in ROUNDING if key in changes]
            return MomentsJudgement("suffices", own, [*shorter, *rounding, *versions])
    return MomentsJudgement("other", own, _named(changes))


def _shorter(plan: CheckpointPlan, stored: Mapping[str, Any]) -> list[str] | None:
    """Remarks if moments include the plan's context and common window; None if they do not."""
    edges, context = stored["edges"], stored["context"]
    common = plan.layout.common or plan.context
    wanted = {plan.context, common, plan.study.skip_positions}
    reached, last = stored["last_layer"], plan.last_layer
    deep_enough = reached is None or (last is not None and reached >= last)
    if not deep_enough or not isinstance(edges, list) or not wanted <= set(edges):
        return None
    if plan.study.characters_in_common is not None and stored["common_window"] != common:
        return None  # tables take the window that the sums were made for
    remarks = []
    if context != plan.context:
        remarks.append(
            f"sums over context {context} are there and include the first {plan.context} tokens, which the tables use"
        )
    if not {plan.context, common} <= {context, stored["common_window"]}:
        windows = " and ".join(map(str, sorted({context, stored["common_window"] or context})))
        remarks.append(
            f"document groups have full squares over {windows} tokens; standard errors at other windows are of first "
            "order, or keep covariances constant"
        )
    return remarks


def changed_settings(stored: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, str]:
    """What differs, by key, in words; keys that one side does not have are left out."""
    changes = {}
    for key, word in WORDS.items():
        if key in stored and key in planned and stored[key] != planned[key]:
            was, now = stored[key], planned[key]
            changes[key] = f"other {word}" if key in HASHES or key == "edges" else f"{word} {was} (now {now})"
    return changes


def _named(changes: Mapping[str, str]) -> list[str]:
    named = [words for key, words in changes.items() if not set(DERIVED.get(key, ())) & set(changes)]
    return named or ["other weights, documents or settings"]


def _stored_settings(made: CheckpointRecord) -> dict[str, Any]:
    """The settings that moments were made with; older files have only some of them."""
    if made.settings is not None:
        return made.settings
    return {
        "model": made.commit or made.weights,
        "config": made.config_overrides,
        "tokens": made.tokens_fingerprint,
        "tokenizer": made.tokenizer_fingerprint,
        "context": made.context,
        "stage": made.stage,
        **({"special_tokens": made.corpus.special_tokens} if made.corpus is not None else {}),
    }


def _version_remarks(made: CheckpointRecord) -> list[str]:
    then, now = made.environment, numeric_versions()
    if then is None:
        return []
    other = [f"{name} {then.get(name)} (now {number})" for name, number in now.items() if then.get(name) != number]
    return [f"made by {', '.join(other)}"] if other else []


def stale_shard(plan: CheckpointPlan, made: CheckpointRecord) -> str:
    """Why an existing shard is not one of the plan's, in words."""
    versions = _version_remarks(made)
    changes = changed_settings(_stored_settings(made), plan.settings())
    if versions and not changes:
        return f"{versions[0]}, and shards of different versions are not added up"
    return f"made from {', '.join([*_named(changes), *versions])}"


# -- a results folder --------------------------------------------------------------------------------------


def read_judgement(plan: CheckpointPlan, folder: Path) -> MomentsJudgement | None:
    """The judgement on a checkpoint's moments, by their header alone; None if there are no whole ones."""
    try:
        return judge_moments(plan, CheckpointRecord.read(read_provenance(moments_path(folder, plan.checkpoint.name))))
    except MomentsFileError:  # missing, or damaged: this is reported when the sums are read
        return None


def refusals(plans: Iterable[CheckpointPlan], folder: Path) -> list[str]:
    """Finished moments that the plan would have to replace, one line each."""
    lines = []
    for plan in plans:
        judged = read_judgement(plan, folder)
        if judged is not None and judged.standing == "other":
            path = moments_path(folder, plan.checkpoint.name)
            lines.append(f"checkpoint {plan.checkpoint.name!r}: {path} was made with {', '.join(judged.remarks)}")
    return lines


def require_nothing_lost(plans: Iterable[CheckpointPlan], folder: Path) -> None:
    """Refuse to replace finished moments that were made from something else."""
    lines = refusals(plans, folder)
    if lines:
        raise InputError("\n  ".join([*lines, f"finished moments are replaced only on request: {WAY_OUT}"]))


def orphans(names: Iterable[str], folder: Path) -> list[str]:
    """Moments, and unfinished shards, of checkpoints that the study does not name; relative to the results folder."""
    known, moments, parts = set(names), moments_folder(folder), shards_folder(folder)
    files = [
        moments / entry.name
        for entry in entries(moments)
        if entry.name.endswith(MOMENTS_SUFFIX) and entry.name[0] != "." and Path(entry.name).stem not in known
    ]
    unfinished = [parts / entry.name for entry in entries(parts) if entry.name not in known]
    return [path.relative_to(folder).as_posix() for path in files + unfinished]


def orphan_line(names: Sequence[str], folder: Path) -> str:
    """What to do about moments that no checkpoint of the study owns."""
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{folder} also holds sums of checkpoints that the study does not name: {shown}. They are neither used nor "
        "deleted: delete them yourself, or, if you renamed a checkpoint, rename its file likewise to use it"
    )


def folder_notes(plans: Sequence[CheckpointPlan], folder: Path) -> list[str]:
    """What a run into this folder would find: what it would refuse to replace, and what no checkpoint owns."""
    refused = refusals(plans, folder)
    notes = [f"{line}; a run will not replace it unasked: {WAY_OUT}" for line in refused]
    unowned = orphans((plan.checkpoint.name for plan in plans), folder)
    return [*notes, orphan_line(unowned, folder)] if unowned else notes


# -- kept vectors ----------------------------------------------------------------------------------------------


def other_vectors(sample: Path, plan: CheckpointPlan, wanted: VectorSample | None, whole: bool) -> str | None:
    """What existing vectors are, unless they are of `whole` moments of these settings, and of the wanted sample."""
    from qkscope.validation.scan import sample_mismatch

    if not whole:
        return "vectors of another run or rate"
    return None if wanted is None else sample_mismatch(sample, wanted, plan.layout.context)
