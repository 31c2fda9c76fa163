"""Outputs that no longer match the tables: removed before other tables take the place of those they were made from.

A report shows the tables. An ablation, a prediction, a comparison depends on what was measured, and over which
positions, heads and layers. So when tables change, the report goes; when a checkpoint was measured otherwise or the
analysis changed, the others go too. Adding checkpoints leaves them alone.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
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
    was, will_be = (json.loads(json.dumps(each.to_json(), default=str)) for each in (before, provenance))
    removed: list[str] = []
    outcomes: list[str] = []
    if not same_tables or _shown(was) != _shown(will_be):
        removed += remove_report(folder, sorted({*summary_files(), *LONG_TABLES}), page=page)
    if not _same_measurements(before, provenance) or _analysis(was) != _analysis(will_be):
        commands = [ABLATION_CSV, *(name for name in _tables_of_commands() if name != ABLATION_CSV)]
        outcomes += remove_outcomes(folder, [*commands, PLASTICITY_SAMPLED_CSV])
    if not removed and not outcomes:
        return None
    # `report.html, 43 in tables/`: single files by name, folders by how much was in them.
    inside = Counter(name.split("/")[0] for name in (*removed, *outcomes) if "/" in name)
    alone = [name for name in (*removed, *outcomes) if "/" not in name]
    counted = ", ".join([*alone, *(f"{count} in {place}/" for place, count in inside.items())])
    again = f"`qkscope report {shlex.quote(str(folder))}` writes the report again"
    others = "; repeat the commands that made the others" if outcomes else ""
    return f"removed outputs of earlier tables: {counted}. {again}{others}"


def _tables_of_commands() -> list[str]:
    """Tables that other commands write."""
    files = [f"{table.name}.csv" for lens in registered() for table in lens.tables if table.rows is None]
    return files + [t.file for lens in registered() for of in lens.of_study if of.build is None for t in of.tables]


def _shown(stored: dict[str, Any]) -> list[Any]:
    """What figures and page state of the study, whatever the tables hold."""
    checkpoints = [{key: each.get(key) for key in SHOWN} for each in stored.get("checkpoints") or [] if each]
    study = {key: (stored.get("study") or {}).get(key) for key in StudyRecord.model_fields}
    return [study, checkpoints, *(stored.get(key) for key in ("kind", "analysis", "checkpoints_left_out"))]


def _same_measurements(before: Provenance, after: Provenance) -> bool:
    """Whether the checkpoints that both have were measured in the same way."""
    one, two = before.by_name(), after.by_name()
    shared = [(one[name], two[name]) for name in one if name in two]
    return all((a.fingerprint, a.context) == (b.fingerprint, b.context) for a, b in shared)


def _analysis(stored: dict[str, Any]) -> dict[str, Any]:
    """The analysis but for how many components tables keep, on which nothing else depends."""
    return {key: value for key, value in (stored.get("analysis") or {}).items() if key != "components"}
