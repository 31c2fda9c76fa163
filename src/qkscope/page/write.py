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
from qkscope.lenses.depth.table import DepthAxis
from qkscope.lenses.layer_kinds.table import kinds_in_order, with_layer_kind
from qkscope.lenses.position.trajectory import CONCORDANCE
from qkscope.lenses.taxonomy.table import CATEGORIES, HIGH, LOW
from qkscope.page.arrays import add_tables
from qkscope.page.assemble import assemble
from qkscope.page.facts import facts
from qkscope.page.markdown import blocks, inline
from qkscope.page.pack import Pack
from qkscope.results.folder import REPORT_HTML, results_file
from qkscope.results.read import Checkpoint, Results

FORMAT = 1


@dataclass(frozen=True)
class CardText:
    """A card in Markdown, and the figure that it belongs to."""

    figure: str
    matched: bool
    markdown: str


def page_html(results: Results, lead: Sequence[str], cards: Sequence[CardText], out: Path | None = None) -> str:
    """The page as text; `lead` are the sentences of the first screen, in Markdown."""
    pack = Pack()
    axis = DepthAxis.of(results.heads)
    data = add_tables(pack, results)
    pack.add_text("provenance", json.dumps(results.provenance, indent=1, ensure_ascii=False))
    about = {
        "format": FORMAT,
        "version": __version__,
        "title": results.study.title,
        "span": results.study.span,
        "kind": results.study.kind,
        "oneRun": results.study.one_run,
        "noun": results.study.noun,
        "layerKinds": kinds_in_order(with_layer_kind(results.heads)["layer_kind"]),
        "checkpoints": [_checkpoint(c) for c in results.study.checkpoints],
        "unmeasured": list(results.unmeasured),
        "categories": [{"name": name, "colour": palette.CATEGORY_COLOURS[name]} for name in CATEGORIES],
        "thresholds": {"high": HIGH, "low": LOW, "concordance": CONCORDANCE},
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
        "lead": [inline(text) for text in lead],
        "cards": [{"figure": c.figure, "matched": c.matched, "blocks": blocks(c.markdown)} for c in cards],
        "commands": _commands(results, out),
        "data": data,
    }
    return assemble(about, pack.text())


def write_page(results: Results, lead: Sequence[str], cards: Sequence[CardText], out: Path | None = None) -> Path:
    """Write `report.html` into the results folder, or into another."""
    path = results_file(out or results.folder, REPORT_HTML)
    write_text(path, page_html(results, lead, cards, out))
    return path


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the page shows about a checkpoint; anything that is not a plain value stays in the provenance."""
    record = checkpoint.record
    shown = {key: record.get(key) for key in ("tokens", "documents", "n_layers", "rope_theta", "model", "model_type")}
    plain = {key: value for key, value in shown.items() if isinstance(value, str) or is_finite(value)}
    without = record.get("layers_without_attention")
    layers = [n for n in without if isinstance(n, int)] if isinstance(without, list) else []
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
    made = results.provenance.get("command")
    page = ["this page, in its folder", "qkscope report ."]
    if out is not None:
        page = ["this page", shlex.join(["qkscope", "report", str(results.folder), "--out", str(out)])]
    return [*([["the tables", made]] if isinstance(made, str) and made else []), page]
