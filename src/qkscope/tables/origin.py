"""What produced a checkpoint's rows: its moments' provenance, by the names that the study has for it now."""

from __future__ import annotations

from qkscope.errors import InputError
from qkscope.moments.moments import Moments
from qkscope.results.provenance import CheckpointRecord
from qkscope.study.schema import Checkpoint


def longest_window(name: str, moments: Moments, checkpoint: Checkpoint | None) -> int | None:
    """The window that stands for a checkpoint's context where its sums reach further; None where they do not."""
    wanted, layout = checkpoint.context if checkpoint else None, moments.layout
    if wanted is None or wanted == layout.context:
        return None
    if wanted not in layout.edges:
        raise InputError(
            f"checkpoint {name!r} has context {wanted} in the study, but its moments are of context {layout.context} "
            "and do not answer for that; run the study again"
        )
    return wanted


def origin_of(name: str, moments: Moments, checkpoint: Checkpoint | None, longest: int | None) -> CheckpointRecord:
    """What produced a checkpoint's rows, by the names the study has for it now.

    What its capture did not record, the sums themselves tell.
    """
    from_sums = {
        "context": moments.layout.context,
        "skip_positions": moments.layout.skip_positions,
        "documents": int(moments.documents.max(axis=1).sum()) or None,  # those of old files were not counted
        "layers": [facts.outline() for facts in moments.layers.values()],
    }
    recorded = {key: value for key, value in moments.provenance.items() if value is not None}
    origin = {**moments.provenance, **from_sums, **recorded, "name": name}
    if checkpoint is not None:
        origin.update(name=checkpoint.name, label=checkpoint.label, phase=checkpoint.phase)
        stated = {name: getattr(checkpoint, name) for name in ("family", "parameters", "tags")}
        origin.update({name: value for name, value in stated.items() if value is not None})
        origin.update(step=checkpoint.step, trained_tokens=checkpoint.tokens, run=checkpoint.run)
    if longest is not None:
        documents = CheckpointRecord.read(origin).documents or 0
        origin.update(context=longest, captured_context=moments.layout.context, tokens=documents * longest)
    return CheckpointRecord.read(origin)
