"""Outputs that no longer match the tables: removed before other tables take the place of those they were made from.

A report shows the tables. An ablation, a prediction, a comparison depends on what was measured, and over which
positions, heads and layers. So when tables change, the report goes; when a checkpoint was measured otherwise or the
analysis changed, the others go too. Adding checkpoints leaves them alone.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkscope.errors import TableError
from qkscope.lenses.registry import registered
from qkscope.lenses.views import summary_files
from qkscope.results.folder import ABLATION_CSV, LONG_TABLES, PLASTICITY_SAMPLED_CSV, PROVENANCE_JSON, results_file
from qkscope.results.provenance import Provenance, StudyRecord
from qkscope.results.read import read_provenance
from qkscope.results.remove import remove_outcomes, remove_report

SHOWN = ("name", "label", "phase", "step", "trained_tokens", "run", "context", "family", "parameters")


def remove_outdated(folder: Path, provenance: Provenance, *, same_tables: bool, page: bool = True) -> str | None:
    """Remove outputs that will not match the tables which `provenance` describes; returns what to tell the user.

    `page` is False where the caller replaces the page itself.
    """
    try:
        before = read_provenance(results_file(folder, PROVENANCE_JSON))
    except TableError:
        before = Provenance()
    removed: list[str] = []
    if not same_tables or _shown(before) != _shown(provenance):
        removed += remove_report(folder, sorted({*summary_files(), *LONG_TABLES}), page=page)
    outcomes = [] if _same_measurements(before, provenance) else remove_outcomes(folder, _written_by_commands())
    if not removed and not outcomes:
        return None
    again = f"`qkscope report {shlex.quote(str(folder))}` writes the report again"
    others = "; repeat the commands that made the others" if outcomes else ""
    return f"removed outputs of earlier tables: {_counted([*removed, *outcomes])}. {again}{others}"


def _written_by_commands() -> list[str]:
    files = [f"{table.name}.csv" for lens in registered() for table in lens.tables if table.rows is None]
    files += [table.file for lens in registered() for of in lens.of_study if of.build is None for table in of.tables]
    return [ABLATION_CSV, *(name for name in files if name != ABLATION_CSV), PLASTICITY_SAMPLED_CSV]


def _shown(provenance: Provenance) -> str:
    """What figures and page state of the study, whatever the tables hold."""
    stored = _plain(provenance)
    checkpoints = [{key: each.get(key) for key in SHOWN} for each in stored.get("checkpoints") or [] if each]
    study = {key: (stored.get("study") or {}).get(key) for key in StudyRecord.model_fields}
    rest = {key: stored.get(key) for key in ("kind", "analysis", "checkpoints_left_out")}
    return json.dumps([study, rest, checkpoints], sort_keys=True)


def _same_measurements(before: Provenance, after: Provenance) -> bool:
    """Whether the checkpoints that both have were measured, and analyzed, in the same way."""
    one, two = before.by_name(), after.by_name()
    same = all(
        (one[name].fingerprint, one[name].context) == (two[name].fingerprint, two[name].context)
        for name in one
        if name in two
    )
    return same and _analysis(before) == _analysis(after)


def _analysis(provenance: Provenance) -> dict[str, Any]:
    """The analysis but for how many components tables keep, on which nothing else depends."""
    stored: dict[str, Any] = _plain(provenance).get("analysis") or {}
    return {key: value for key, value in stored.items() if key != "components"}


def _plain(provenance: Provenance) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(provenance.to_json(), default=str))
    return plain


def _counted(names: Sequence[str]) -> str:
    """`report.html, 43 in tables/`: single files by name, folders by how much was in them."""
    inside = Counter(name.split("/")[0] for name in names if "/" in name)
    alone = [name for name in names if "/" not in name]
    return ", ".join([*alone, *(f"{count} in {place}/" for place, count in inside.items())])
