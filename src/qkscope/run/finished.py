"""Moments and shards in a results folder: whether they are what the study asks for, and how shards become moments.

Nothing finished is replaced silently. Moments that differ only by rounding (other batches, other versions) are used; so
are those of a longer context, if the shorter one ends on an edge of their buckets. For all others a run refuses, names
what differs, and replaces them only when it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qkscope.errors import InputError, MomentsFileError, located
from qkscope.moments.file import Header, read_header, read_provenance
from qkscope.moments.moments import Moments
from qkscope.results import folder as layout
from qkscope.results.lock import try_lock
from qkscope.results.provenance import CheckpointRecord, numeric_versions
from qkscope.results.remove import remove_empty_shards, remove_shards
from qkscope.run.checkpoint_plan import CheckpointPlan, Shard
from qkscope.validation.layout import VectorSample

Standing = Literal["same", "suffices", "other"]

# Settings that sums depend on, in the order in which messages name them, and what they are called there.
WORDS = {key: key for key in (
    "schema", "model", "config", "tokenizer", "special_tokens", "documents", "context", "buckets", "groups",
    "common_window", "unrotated_every", "sample", "stage", "last_layer", "dtype", "trust_remote_code", "edges",
    "tokens", "batch_tokens", "shard_tokens",
)} | {
    "model": "weights", "config": "config overrides", "common_window": "common window", "sample": "sample of tokens",
    "unrotated_every": "share of tokens before rotation", "last_layer": "last layer", "edges": "bucket edges",
}  # fmt: skip
HASHES = ("model", "tokenizer", "documents", "tokens", "edges")  # whose values mean nothing to a reader
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
    own, versions = made.fingerprint or "", _version_remarks(made)
    if own == plan.fingerprint():
        return MomentsJudgement("same", own, versions)
    stored, planned = _stored_settings(made), plan.settings()
    changes = changed_settings(stored, planned)
    if set(planned) <= set(stored) and set(changes) <= {*ROUNDING, *REACH}:
        shorter = _shorter(plan, stored)
        if shorter is not None:
            rounding = [changes[key] for key in ROUNDING if key in changes]
            return MomentsJudgement("suffices", own, [*shorter, *rounding, *versions])
    return MomentsJudgement("other", own, _named(changes))


def _shorter(plan: CheckpointPlan, stored: Mapping[str, Any]) -> list[str] | None:
    """Remarks if moments include the plan's context and common window; None if they do not."""
    edges, context = stored["edges"], stored["context"]
    common = plan.layout.common or plan.context
    reached, last = stored["last_layer"], plan.last_layer
    deep_enough = reached is None or (last is not None and reached >= last)
    wanted = {plan.context, common, plan.study.skip_positions}
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
    return {
        key: f"other {word}" if key in HASHES else f"{word} {stored[key]} (now {planned[key]})"
        for key, word in WORDS.items()
        if key in stored and key in planned and stored[key] != planned[key]
    }


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
    other = [f"{name} {then.get(name)} (now {at})" for name, at in now.items() if then.get(name) != at] if then else []
    return [f"made by {', '.join(other)}"] if other else []


# -- a results folder --------------------------------------------------------------------------------------


def read_judgement(plan: CheckpointPlan, folder: Path) -> MomentsJudgement | None:
    """The judgement on a checkpoint's moments, by their header alone; None if there are no whole ones."""
    try:
        return judge_moments(
            plan, CheckpointRecord.read(read_provenance(layout.moments_path(folder, plan.checkpoint.name)))
        )
    except MomentsFileError:  # missing, or damaged: this is reported when the sums are read
        return None


def _refusals(plans: Iterable[CheckpointPlan], folder: Path) -> list[str]:
    """Finished moments that the plan would have to replace, one line each."""
    lines = []
    for name, judged in ((plan.checkpoint.name, read_judgement(plan, folder)) for plan in plans):
        if judged is not None and judged.standing == "other":
            path = layout.moments_path(folder, name)
            lines.append(f"checkpoint {name!r}: {path} was made with {', '.join(judged.remarks)}")
    return lines


def require_nothing_lost(plans: Iterable[CheckpointPlan], folder: Path) -> None:
    """Refuse to replace finished moments that were made from something else."""
    lines = _refusals(plans, folder)
    if lines:
        raise InputError("\n  ".join([*lines, f"finished moments are replaced only on request: {WAY_OUT}"]))


def orphan_notes(names: Iterable[str], folder: Path) -> list[str]:
    """What to do about sums, finished or not, of checkpoints that the study does not name; empty without any."""
    known, moments, parts = set(names), layout.moments_folder(folder), layout.shards_folder(folder)
    files = [
        moments / entry.name
        for entry in layout.entries(moments)
        if entry.name.endswith(layout.MOMENTS_SUFFIX) and entry.name[0] != "." and Path(entry.name).stem not in known
    ]
    files += [parts / entry.name for entry in layout.entries(parts) if entry.name not in known]
    if not files:
        return []
    shown = ", ".join(repr(path.relative_to(folder).as_posix()) for path in files[:5])
    shown += f" and {len(files) - 5} more" if len(files) > 5 else ""
    return [
        f"{folder} also holds sums of checkpoints that the study does not name: {shown}. They are neither used nor "
        "deleted: delete them yourself, or, if you renamed a checkpoint, rename its file likewise to use it"
    ]


def folder_notes(plans: Sequence[CheckpointPlan], folder: Path) -> list[str]:
    """What a run into this folder would find: what it would refuse to replace, and what no checkpoint owns."""
    refused = [f"{line}; a run will not replace it unasked: {WAY_OUT}" for line in _refusals(plans, folder)]
    return refused + orphan_notes((plan.checkpoint.name for plan in plans), folder)


def other_vectors(sample: Path, plan: CheckpointPlan, wanted: VectorSample | None, whole: bool) -> str | None:
    """What existing vectors are, unless they are of `whole` moments of these settings, and of the wanted sample."""
    from qkscope.validation.scan import sample_mismatch

    if not whole:
        return "vectors of another run or rate"
    return None if wanted is None else sample_mismatch(sample, wanted, plan.layout.context)


# -- a checkpoint's files ----------------------------------------------------------------------------------


@contextmanager
def running_shard(folder: Path, checkpoint: str, shard: Shard) -> Iterator[bool]:
    """Lock a shard while it runs, which `qkscope status` sees; yields whether the lock was free."""
    path = layout.running_path(folder, checkpoint, shard.number)
    with try_lock(path) as ours:
        try:
            yield ours
        finally:
            if ours:
                path.unlink(missing_ok=True)
                remove_empty_shards(folder, checkpoint)


@dataclass(frozen=True)
class CheckpointState:
    """What a results folder holds of one checkpoint, after reading every file of it."""

    plan: CheckpointPlan
    whole: bool  # its finished moments can be used
    done: list[Shard] = field(default_factory=list)
    left: list[Shard] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)  # files that must be made again, with reasons
    skipped: int = 0  # documents that an earlier run left out
    remarks: list[str] = field(default_factory=list)  # how what is used differs from what would be made now


def examine(
    plan: CheckpointPlan, folder: Path, *, overwrite: bool = False, headers_only: bool = False
) -> CheckpointState:
    """Read all files of a checkpoint: their checksums, and the settings that they were made with.

    With `overwrite`, finished moments that differ in any way from what would be made now are to be made again.
    `headers_only`: sums are not read, so damage in them is not noticed.
    """
    unusable: list[str] = []
    whole = examine_finished(plan, folder, unusable, overwrite=overwrite, headers_only=headers_only)
    if whole is not None:
        return whole
    done: list[Shard] = []
    left: list[Shard] = []
    for shard in plan.shards():
        made = usable_shard(plan, shard, folder, unusable, headers_only=headers_only)
        (left if made is None else done).append(shard)
    return CheckpointState(plan, False, done, left, unusable)


def examine_finished(
    plan: CheckpointPlan, folder: Path, reasons: list[str], *, overwrite: bool = False, headers_only: bool = False
) -> CheckpointState | None:
    """The state of a checkpoint whose finished moments can be used; otherwise None, and why is added to `reasons`."""
    path = layout.moments_path(folder, plan.checkpoint.name)
    moments = _loaded(path, reasons, headers_only)
    if moments is None:
        return None
    made = CheckpointRecord.read(moments.provenance)
    judged = judge_moments(plan, made)
    if judged.standing == "other" or (overwrite and (judged.standing != "same" or judged.remarks)):
        reasons.append(f"{path}: {', '.join(judged.remarks)}")
        return None
    return CheckpointState(plan, whole=True, skipped=len(made.documents_skipped or []), remarks=judged.remarks)


def usable_shard(
    plan: CheckpointPlan, shard: Shard, folder: Path, reasons: list[str] | None = None, *, headers_only: bool = False
) -> Any:
    """A shard's moments (or header), if they are there and what the plan would make; otherwise None, and a reason."""
    path, reasons = layout.shard_path(folder, plan.checkpoint.name, shard.number), [] if reasons is None else reasons
    moments = _loaded(path, reasons, headers_only)
    if moments is None:
        return None
    made = CheckpointRecord.read(moments.provenance)
    if made.fingerprint == plan.fingerprint(shard):
        return moments
    versions, changes = _version_remarks(made), changed_settings(_stored_settings(made), plan.settings())
    if versions and not changes:
        reasons.append(f"{path}: {versions[0]}, and shards of different versions are not added up")
    else:
        reasons.append(f"{path}: made from {', '.join([*_named(changes), *versions])}")
    return None


def _loaded(path: Path, reasons: list[str], headers_only: bool) -> Moments | Header | None:
    """A file's moments, or only its header; None where it is not there or damaged, which is added to `reasons`."""
    if path.exists():
        try:
            with located(str(path)) if headers_only else nullcontext():
                return read_header(path) if headers_only else Moments.load(path)
        except MomentsFileError as error:
            reasons.append(str(error))
    return None


def delivery_path(plan: CheckpointPlan, number: int, folder: Path) -> Path:
    """Where a finished shard is written: next to the others, or as the checkpoint's moments if it is the only one."""
    name = plan.checkpoint.name
    return layout.moments_path(folder, name) if plan.is_single_shard else layout.shard_path(folder, name, number)


def deliver(plan: CheckpointPlan, moments: Moments, path: Path) -> None:
    """Write a shard's sums; those of a single shard with the provenance of the whole checkpoint."""
    if plan.is_single_shard:
        _finish(plan, moments, moments.provenance["seconds"], moments.provenance["documents_skipped"])
    moments.save(path)


def accept_whole(plan: CheckpointPlan, folder: Path) -> list[str]:
    """Check the header of the file that the worker of a single shard wrote; returns how it differs from ours."""
    name = plan.checkpoint.name
    judged = read_judgement(plan, folder)
    if judged is None or judged.standing != "same":
        why = "is gone or damaged" if judged is None else ", ".join(judged.remarks)
        raise InputError(f"{layout.moments_path(folder, name)}: {why}; run again, with the same files on all machines")
    remove_shards(folder, name)
    return [f"{name}: {remark}" for remark in judged.remarks]


def merge_shards(plan: CheckpointPlan, folder: Path) -> None:
    """Add up all shards in plan order, from their files, so that the bytes are always the same, and delete them.

    A shard that another machine made with other versions or settings is refused.
    """
    name, seconds = plan.checkpoint.name, 0.0
    merged: Moments | None = None
    skipped: list[dict[str, Any]] = []
    for shard in plan.shards():
        reasons: list[str] = []
        part: Moments | None = usable_shard(plan, shard, folder, reasons)
        if part is None:
            why = reasons[0] if reasons else f"{layout.shard_path(folder, name, shard.number)}: is gone"
            again = "Run again, with the same versions on all machines"
            raise InputError(f"{why}; it cannot be added to the others. {again}")
        made = CheckpointRecord.read(part.provenance)
        seconds += made.seconds or 0.0
        skipped += made.documents_skipped or []
        merged = part if merged is None else merged.merge(part)
    assert merged is not None  # a plan has at least one document
    _finish(plan, merged, seconds, skipped)
    merged.save(layout.moments_path(folder, name))
    remove_shards(folder, name)


def _finish(plan: CheckpointPlan, moments: Moments, seconds: float, skipped: list[dict[str, Any]]) -> None:
    """Give sums the provenance of a whole checkpoint."""
    moments.provenance.pop("shard", None)
    moments.provenance.update(
        fingerprint=plan.fingerprint(),
        settings=plan.settings(),
        seconds=round(seconds, 3),
        shards=len(plan.shards()),
        documents=len(plan.documents) - len(skipped),
        tokens=(len(plan.documents) - len(skipped)) * plan.context,
        documents_skipped=skipped,
    )
