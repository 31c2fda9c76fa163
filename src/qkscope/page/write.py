"""`report.html`: everything the page knows, put together and written."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope._version import __version__
from qkscope.draw import palette
from qkscope.files import write_text
from qkscope.foreign import is_finite
from qkscope.lenses.categories import CATEGORIES, HIGH, LOW
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.registry import registered
from qkscope.lenses.signs import CONCORDANCE
from qkscope.lenses.views import Results
from qkscope.page.arrays import add_tables, page_depth, page_grid
from qkscope.page.assemble import assemble
from qkscope.page.detail import add_details
from qkscope.page.errors import add_errors, add_kinds, add_windows
from qkscope.page.facts import facts
from qkscope.page.lens_data import add_lenses, add_mean_errors, kept_columns, lens_tables
from qkscope.page.pack import Pack, squeeze
from qkscope.page.paired import add_changes, add_draws
from qkscope.page.palette import AGAINST, CATEGORY_COLOURS, DARK_CATEGORY_COLOURS, DIVERGING, SEQUENTIAL, SERIES
from qkscope.results.entries import Entry
from qkscope.results.folder import PROVENANCE_JSON, REPORT_HTML, results_file
from qkscope.results.mapped import drop_page_cache
from qkscope.results.read import ResultsFolder
from qkscope.stats import significance
from qkscope.text import PathShortener, without_local_paths
from qkscope.words.blocks import AnyBlock, to_page

FORMAT = 2
# Of a checkpoint's record; `tokens` are those that were measured, `trained_tokens` those before the checkpoint.
SHOWN = ("tokens", "documents", "n_layers", "rope_theta", "model", "model_type", "run", "step", "trained_tokens")


@dataclass(frozen=True)
class PageCard:
    """A card, and the figure that it belongs to."""

    figure: str
    blocks: Sequence[AnyBlock]


def page_html(tables: Results, summary: Mapping[str, Any], cards: Sequence[PageCard], out: Path | None = None) -> str:
    """The page as text; `summary` is what the first screen states."""
    results = tables.files
    pack, later = Pack(), Pack()
    data = add_tables(pack, results)
    grid = page_grid(results.study, data)
    drop_page_cache()
    large = data["precision"] == "float32"
    add_errors(pack, grid, tables, large=large)
    add_kinds(pack, grid, tables)
    drop_page_cache()
    of_lenses = lens_tables(tables)
    shown = {card.figure: True for card in cards}
    kept = kept_columns(grid, registered(), of_lenses, large=large)
    about = {
        **_study(results, tables),
        **_legend(),
        "enough": add_windows(pack, grid, tables.own, data["windows"]),
        "summary": {**summary, "examples": _examples(tables)},
        "facts": facts(results),
        "cards": [{"figure": c.figure, "title": card_title(c)} for c in cards],
        "commands": _commands(results, out),
        "data": data,
    }
    kind = tables.own.study.kind
    shown_lenses = add_lenses(pack, grid, registered(), of_lenses, shown, large=large, kept=kept, kind=kind)
    long: dict[str, Any] = {"lenses": shown_lenses}
    long |= _own_views(tables, taken=(*about, *long))
    drop_page_cache()
    add_mean_errors(pack, grid, registered(), tables)
    add_draws(pack, grid, tables)
    data["changes"], data["columnsAt"] = add_changes(pack, grid, tables), kept
    data["detail"] = add_details(later, grid, of_lenses)
    shared = PathShortener().value(results.provenance.to_json(), PROVENANCE_JSON)
    later.add_text("provenance", json.dumps(shared, indent=1, ensure_ascii=False))
    later.add_text("cards", json.dumps([to_page(card.blocks) for card in cards], ensure_ascii=False))
    about["long"] = squeeze(long)
    data["arrays"], data["later"] = squeeze(pack.index), squeeze(later.index)
    return assemble(about, pack.text(), later.text())


def _examples(tables: Results) -> list[Mapping[str, Any]]:
    """Single heads that show how to read the numbers."""
    return [each for lens in registered() if lens.examples is not None for each in lens.examples(tables.own)]


def _own_views(tables: Results, taken: Sequence[str]) -> dict[str, Any]:
    """What lenses have for views of their own, by the names under which these find it."""
    views = [view for lens in registered() for view in lens.own_views]
    for view in views:
        if view.name in taken:
            raise ValueError(f"the page has something else under the name of the view {view.name!r}")
    return {view.name: view.data(tables) for view in views}


def _study(results: ResultsFolder, tables: Results) -> dict[str, Any]:
    """Who is compared, and how."""
    study, axis = results.study, page_depth(tables.own.heads)
    return {
        "format": FORMAT,
        "version": __version__,
        "title": study.title,
        "span": study.span,
        "kind": study.kind,
        "oneRun": study.one_run,
        "noun": study.noun,
        "axis": _axis(results),
        "layerKinds": kinds_in_order(tables.own.heads["layer_kind"]),
        "checkpoints": [_checkpoint(c) for c in study.checkpoints],
        "critical": [float(significance.critical_value(tables.own.freedom(name))) for name in study.names],
        "unmeasured": list(results.unmeasured),
        "depth": {"byLayer": axis.layers is not None, "columns": list(axis.columns)},
    }


def _legend() -> dict[str, Any]:
    """Categories, thresholds and colours."""
    return {
        "categories": [_category(name) for name in CATEGORIES],
        "against": _category(AGAINST),
        "thresholds": {"high": HIGH, "low": LOW, "concordance": CONCORDANCE},
        "colours": {
            "blue": palette.BLUE,
            "red": palette.RED,
            "diverging": list(DIVERGING),
            "sequential": list(SEQUENTIAL),
            "parts": list(SERIES),
            "causes": palette.CAUSE_COLOURS,
        },
    }


def _category(name: str) -> dict[str, str]:
    return {"name": name, "colour": CATEGORY_COLOURS[name], "dark": DARK_CATEGORY_COLOURS[name]}


def card_title(card: PageCard) -> str:
    """Its first heading."""
    first = next((block for block in to_page(card.blocks) if block["kind"] == "heading"), None)
    return card.figure if first is None else "".join(text for _, text in first["runs"])


def write_page(tables: Results, summary: Mapping[str, Any], cards: Sequence[PageCard], out: Path | None = None) -> Path:
    """Write `report.html` into the results folder, or into another."""
    path = results_file(out or tables.files.writable_folder, REPORT_HTML)
    write_text(path, page_html(tables, summary, cards, out))
    return path


def _axis(results: ResultsFolder) -> dict[str, Any]:
    """By which number of the checkpoints (`step`, `trained_tokens`) an axis may be, and how."""
    study = results.study
    by = {"entries": None, "step": "step", "tokens": "trained_tokens"}[study.axis]
    return {"by": by if study.amounts else None, "scale": study.axis_scale}


def _checkpoint(checkpoint: Entry) -> dict[str, Any]:
    """What the page shows about a checkpoint; anything that is not a plain value stays in the provenance."""
    record = checkpoint.record
    shown = {key: getattr(record, key) for key in SHOWN}
    texts = {key: without_local_paths(value) for key, value in shown.items() if isinstance(value, str)}
    plain = {key: value for key, value in shown.items() if is_finite(value)} | texts
    layers = [number for number in record.layers_without_attention or [] if number is not None]
    return {
        "name": checkpoint.name,
        "label": checkpoint.label,
        "phase": checkpoint.phase,
        "context": checkpoint.context,
        "withoutAttention": layers,
        **plain,
    }


def _commands(results: ResultsFolder, out: Path | None) -> list[list[str]]:
    """What made the numbers, and what makes the page from them wherever the folder is now."""
    made = results.provenance.command
    page = ["this page, in its folder", "qkscope report ."]
    if out is not None:
        page = ["this page", shlex.join(["qkscope", "report", str(results.source), "--out", str(out)])]
    commands = [*([["the tables", made]] if made else []), page]
    return [[what, without_local_paths(command)] for what, command in commands]
