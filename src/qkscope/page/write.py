"""`report.html`: everything the page knows, put together and written."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope._version import __version__
from qkscope.draw import palette
from qkscope.files import write_text
from qkscope.foreign import is_finite
from qkscope.lenses.at_window import StudyTables
from qkscope.lenses.concordance.table import CONCORDANCE
from qkscope.lenses.depth.table import depth_axis
from qkscope.lenses.layer_kinds.table import kinds_in_order
from qkscope.lenses.registry import registered
from qkscope.lenses.taxonomy.palette import CATEGORY_COLOURS
from qkscope.lenses.taxonomy.table import CATEGORIES, HIGH, LOW
from qkscope.page.arrays import add_tables, page_grid
from qkscope.page.assemble import assemble
from qkscope.page.errors import add_errors, add_windows
from qkscope.page.facts import facts
from qkscope.page.lens_data import add_lenses, add_mean_errors, lens_tables
from qkscope.page.pack import Pack
from qkscope.results.folder import REPORT_HTML, results_file
from qkscope.results.read import Entry, Results
from qkscope.words.blocks import Block, page_runs, to_page

FORMAT = 1
# Of a checkpoint's record; `tokens` are those that were measured, `trained_tokens` those before it in training.
SHOWN = ("tokens", "documents", "n_layers", "rope_theta", "model", "model_type", "step", "trained_tokens", "run")


@dataclass(frozen=True)
class PageCard:
    """A card, and the figure that it belongs to."""

    figure: str
    common: bool
    blocks: Sequence[Block]


def page_html(tables: StudyTables, lead: Sequence[str], cards: Sequence[PageCard], out: Path | None = None) -> str:
    """The page as text; `lead` are the sentences of the first screen."""
    results = tables.results
    pack = Pack()
    axis = depth_axis(tables.own)
    data = add_tables(pack, results)
    shown = {card.figure: True for card in cards}
    grid = page_grid(results.study, data)
    add_errors(pack, grid, tables)
    enough = add_windows(pack, grid, tables.own, data["windows"])
    lens_data = add_lenses(pack, grid, registered(), lens_tables(tables), shown, large=data["precision"] == "float32")
    add_mean_errors(pack, grid, registered(), tables)
    pack.add_text("provenance", json.dumps(results.provenance.to_json(), indent=1, ensure_ascii=False))
    about = {
        "format": FORMAT,
        "version": __version__,
        "title": results.study.title,
        "span": results.study.span,
        "kind": results.study.kind,
        "oneRun": results.study.one_run,
        "noun": results.study.noun,
        "axis": _axis(results),
        "layerKinds": kinds_in_order(tables.own.heads["layer_kind"]),
        "checkpoints": [_checkpoint(c) for c in results.study.checkpoints],
        "unmeasured": list(results.unmeasured),
        "categories": [{"name": name, "colour": CATEGORY_COLOURS[name]} for name in CATEGORIES],
        "thresholds": {"high": HIGH, "low": LOW, "concordance": CONCORDANCE},
        "enough": enough,
        "depth": {"byLayer": axis.layers is not None, "columns": list(axis.columns)},
        "colours": {
            "blue": palette.BLUE,
            "red": palette.RED,
            "purple": palette.PURPLE,
            "amber": palette.AMBER,
            "blues": list(palette.BLUES),
            "reds": list(palette.REDS),
        },
        "facts": facts(results),
        "lead": [page_runs(text) for text in lead],
        "cards": [{"figure": c.figure, "common": c.common, "blocks": to_page(c.blocks)} for c in cards],
        "commands": _commands(results, out),
        "lenses": lens_data,
        "data": data,
    }
    return assemble(about, pack.text())


def write_page(tables: StudyTables, lead: Sequence[str], cards: Sequence[PageCard], out: Path | None = None) -> Path:
    """Write `report.html` into the results folder, or into another."""
    path = results_file(out or tables.results.folder, REPORT_HTML)
    write_text(path, page_html(tables, lead, cards, out))
    return path


def _axis(results: Results) -> dict[str, Any]:
    """By which number of the checkpoints (`step`, `trained_tokens`) an axis may be, and how."""
    study = results.study
    by = {"entries": None, "step": "step", "tokens": "trained_tokens"}[study.axis]
    return {"by": by if study.amounts else None, "scale": study.axis_scale}


def _checkpoint(checkpoint: Entry) -> dict[str, Any]:
    """What the page shows about a checkpoint; anything that is not a plain value stays in the provenance."""
    record = checkpoint.record
    shown = {key: getattr(record, key) for key in SHOWN}
    plain = {key: value for key, value in shown.items() if isinstance(value, str) or is_finite(value)}
    layers = [number for number in record.layers_without_attention or [] if number is not None]
    return {
        "name": checkpoint.name,
        "label": checkpoint.label,
        "phase": checkpoint.phase,
        "context": checkpoint.context,
        "withoutAttention": layers,
        **plain,
    }


def _commands(results: Results, out: Path | None) -> list[list[str]]:
    """What made the numbers, and what makes the page from them wherever the folder is now."""
    made = results.provenance.command
    page = ["this page, in its folder", "qkscope report ."]
    if out is not None:
        page = ["this page", shlex.join(["qkscope", "report", str(results.folder), "--out", str(out)])]
    return [*([["the tables", made]] if made else []), page]
