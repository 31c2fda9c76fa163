"""Outcomes of finished shards on disk, by what they depend on: an ablation that was stopped goes on with the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qkscope.ablate.work import AblationShard, CheckpointAblation
from qkscope.files import write_text
from qkscope.foreign import Missing, Unreadable, is_finite, parse_json, read_bytes
from qkscope.results.folder import ablation_path

MAX_PART = 64 * 2**20  # bytes of one shard's outcomes


def keep(folder: Path, work: CheckpointAblation, shard: AblationShard, rows: list[list[Any]]) -> None:
    """Write a shard's outcomes."""
    path = ablation_path(folder, work.name, work.fingerprint(shard))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"document": shard.documents[0], "edit": shard.edit, "rows": rows}) + "\n")


def read_part(folder: Path, work: CheckpointAblation, shard: AblationShard) -> list[list[Any]] | None:
    """A shard's outcomes from an earlier run of the same work; None where there are none that can be read."""
    try:
        part = parse_json(read_bytes(ablation_path(folder, work.name, work.fingerprint(shard)), MAX_PART))
    except (Missing, Unreadable):
        return None
    rows = part.get("rows")
    names = {unit.name for unit in shard.units}
    return rows if isinstance(rows, list) and all(_is_row(row, names) for row in rows) and rows else None


def _is_row(row: Any, units: set[str]) -> bool:
    if not isinstance(row, list) or len(row) != 4 or row[0] not in units or not isinstance(row[1], str):
        return False
    return is_finite(row[2]) and is_finite(row[3])


def left(folder: Path, work: CheckpointAblation) -> list[AblationShard]:
    """The shards that are not on disk yet."""
    return [shard for shard in work.shards if read_part(folder, work, shard) is None]
