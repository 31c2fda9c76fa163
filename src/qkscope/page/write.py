"""`report.html`: everything the page knows, put together and written."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qkscope._version import __version__
from qkscope.analysis.depth import EDGES
from qkscope.analysis.results import Checkpoint, Results
from qkscope.analysis.taxonomy import CATEGORIES, HIGH, LOW
from qkscope.analysis.trajectory import CONCORDANCE
from qkscope.figures import palette
from qkscope.files import write_text
from qkscope.lenses.base import Lens
from qkscope.page.arrays import add_tables, page_grid
from qkscope.page.assemble import assemble
from qkscope.page.facts import facts
from qkscope.page.lens_data import LensTables, add_lenses
from qkscope.page.markdown import blocks, inline
from qkscope.page.pack import Pack

PAGE = "report.html"
FORMAT = 1


@dataclass(frozen=True)
class CardText:
    """A card in Markdown, and the figure that it belongs to."""

    figure: str
    matched: bool
    markdown: str


def page_html(
    results: Results,
    lead: Sequence[str],
    cards: Sequence[CardText],
    lenses: Sequence[Lens] = (),
    tables: LensTables = MappingProxyType({}),
) -> str:
    """The page as text; `lead` are the sentences of the first screen, in Markdown.

    `lenses` get a section each over the head tables that `tables` has, by file and reading.
    """
    pack = Pack()
    data = add_tables(pack, results)
    shown = {card.figure: True for card in cards}
    lens_data = add_lenses(pack, page_grid(results.study, data), lenses, tables, shown)
    pack.add_text("provenance", json.dumps(results.provenance, indent=1, ensure_ascii=False))
    about = {
        "format": FORMAT,
        "version": __version__,
        "title": results.study.title,
        "span": results.study.span,
        "differentModels": results.study.different_models,
        "checkpoints": [_checkpoint(c) for c in results.study.checkpoints],
        "unmeasured": list(results.unmeasured),
        "categories": [{"name": name, "colour": palette.CATEGORY_COLOURS[name]} for name in CATEGORIES],
        "thresholds": {"high": HIGH, "low": LOW, "concordance": CONCORDANCE},
        "depthEdges": [float(edge) for edge in EDGES],
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
        "commands": _commands(results),
        "lenses": lens_data,
        "data": data,
    }
    return assemble(about, pack.text())


def write_page(
    results: Results,
    lead: Sequence[str],
    cards: Sequence[CardText],
    lenses: Sequence[Lens] = (),
    tables: LensTables = MappingProxyType({}),
) -> Path:
    """Write `report.html` into the results folder."""
    path = results.folder / PAGE
    write_text(path, page_html(results, lead, cards, lenses, tables))
    return path


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the page shows about a checkpoint; anything that is not a plain value stays in the provenance."""
    record = checkpoint.record
    shown = {key: record.get(key) for key in ("tokens", "documents", "n_layers", "rope_theta", "model", "model_type")}
    plain = {key: value for key, value in shown.items() if isinstance(value, str | int | float)}
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


def _commands(results: Results) -> list[list[str]]:
    """What makes the numbers, and what makes the page from them."""
    made = results.provenance.get("command")
    page = shlex.join(["qkscope", "report", str(results.folder)])
    return [*([["the tables", made]] if isinstance(made, str) and made else []), ["this page", page]]
