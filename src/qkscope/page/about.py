"""What the page states about a study: who is compared, what was measured, and how colors are used."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from qkscope._version import __version__
from qkscope.draw import palette
from qkscope.foreign import is_finite
from qkscope.kinds import MODELS
from qkscope.lenses.categories import (
    CATEGORIES,
    CONTENT_FOCUSED,
    HIGH,
    K_POSITIONAL,
    LOW,
    MIXED,
    POSITION_DOMINATED,
    Q_POSITIONAL,
    UNDEFINED,
)
from qkscope.lenses.concordance import CONCORDANCE
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.views import Results
from qkscope.page.arrays import page_depth
from qkscope.results.entries import Entry
from qkscope.results.read import ResultsFolder
from qkscope.stats import significance
from qkscope.text import counted, without_local_paths
from qkscope.words.phrases import shortened

FORMAT = 2
# Of a checkpoint's record; `tokens` are those that were measured, `trained_tokens` those before the checkpoint.
SHOWN = ("tokens", "documents", "n_layers", "rope_theta", "model", "model_type", "run", "step", "trained_tokens")
NOT_RECORDED = "not recorded"
MOST_NAMES = 3  # of model types, that a fact lists

# Blue and red are queries and keys and nothing else, so categories have other colors: one for light and one for dark
# paper. Any two on one paper differ by at least `LEAST_DIFFERENCE` (CIEDE2000) for readers with typical vision and with
# protanopia, deuteranopia or tritanopia; a test computes it. Parts and causes have the colors of the figures.
LEAST_DIFFERENCE = 18.0
AGAINST = "keys in reverse"  # position-dominated with r_k below 0
CATEGORY_COLOURS = {
    POSITION_DOMINATED: "#5b2a86",
    AGAINST: "#ffb01a",
    Q_POSITIONAL: "#07b388",
    K_POSITIONAL: "#8c84a1",
    CONTENT_FOCUSED: "#2b4f00",
    MIXED: "#cdd1d7",
    UNDEFINED: "#ffffff",
}
DARK_CATEGORY_COLOURS = {
    POSITION_DOMINATED: "#a188c0",
    AGAINST: "#ffb219",
    Q_POSITIONAL: "#07d1a4",
    K_POSITIONAL: "#d4d2ef",
    CONTENT_FOCUSED: "#558428",
    MIXED: "#4b5058",
    UNDEFINED: "#161b22",
}
# Signed values: brown below 0, green-blue above, pale at 0.
DIVERGING = ("#543005", "#8c510a", "#bf812d", "#dfc27d", "#f4f1ea", "#a6d8cd", "#4ca79b", "#12766c", "#003c30")
# Values of one sign: pale to dark, the upper half of the same map.
SEQUENTIAL = DIVERGING[4:]
# Lines, bars and parts that are neither queries nor keys nor categories.
SERIES = ("#3f4a5a", "#b7791f", "#2f8f83", "#a26bb5")


def about_study(tables: Results) -> dict[str, Any]:
    """Who is compared, and how."""
    results, heads = tables.files, tables.own.heads
    study, axis = results.study, page_depth(heads)
    by = {"entries": None, "step": "step", "tokens": "trained_tokens"}[study.axis]
    return {
        "format": FORMAT,
        "version": __version__,
        "title": study.title,
        "span": study.span,
        "kind": study.kind,
        "oneRun": study.one_run,
        "noun": study.noun,
        "axis": {"by": by if study.amounts else None, "scale": study.axis_scale},
        "layerKinds": kinds_in_order(heads["layer_kind"]),
        "checkpoints": [_checkpoint(c) for c in study.checkpoints],
        "critical": [float(significance.critical_value(tables.own.freedom(name))) for name in study.names],
        "unmeasured": list(results.unmeasured),
        "depth": {"byLayer": axis.layers is not None, "columns": list(axis.columns)},
    }


def _checkpoint(checkpoint: Entry) -> dict[str, Any]:
    """What the page shows about a checkpoint; anything that is not a plain value stays in the provenance."""
    record = checkpoint.record
    shown = {key: getattr(record, key) for key in SHOWN}
    texts = {key: without_local_paths(value) for key, value in shown.items() if isinstance(value, str)}
    return {
        "name": checkpoint.name,
        "label": checkpoint.label,
        "phase": checkpoint.phase,
        "context": checkpoint.context,
        "withoutAttention": [number for number in record.layers_without_attention or [] if number is not None],
        **{key: value for key, value in shown.items() if is_finite(value)},
        **texts,
    }


def legend() -> dict[str, Any]:
    """Categories, thresholds and colors."""
    names = [*CATEGORIES, AGAINST]
    categories = [{"name": n, "colour": CATEGORY_COLOURS[n], "dark": DARK_CATEGORY_COLOURS[n]} for n in names]
    return {
        "categories": categories[:-1],
        "against": categories[-1],
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


def commands(results: ResultsFolder, out: Path | None) -> list[list[str]]:
    """What made the numbers, and what makes the page from them wherever the folder is now."""
    made = results.provenance.command
    page = ["this page, in its folder", "qkscope report ."]
    if out is not None:
        page = ["this page", shlex.join(["qkscope", "report", str(results.source), "--out", str(out)])]
    return [[what, without_local_paths(text)] for what, text in [*([["the tables", made]] if made else []), page]]


# --- facts ------------------------------------------------------------------------------------------


def facts(tables: Results) -> list[list[str]]:
    """What was measured, as pairs of a short title and a text: the first lines of the page, and of the gallery."""
    results, study = tables.files, tables.files.study
    records = [c.record for c in study.checkpoints]
    phases = {c.phase for c in study.checkpoints if c.phase is not None}
    amount = f"{len(records):,}"
    if phases and study.one_run:
        amount += f" in {counted(len(phases), 'phase')}"
    if results.unmeasured:
        amount += f", {len(results.unmeasured)} more not measured yet"
    layers, types, dtypes = (
        _span(r.n_layers for r in records),
        (r.model_type for r in records),
        (r.dtype for r in records),
    )
    known = "; ".join(filter(None, [_some(types), f"{layers} layers" if layers else "", _some(dtypes)]))
    tokens = [r.tokens for r in records if r.tokens is not None]
    total = f" per {study.noun}, {sum(tokens):,} in all" if len(tokens) > 1 else ""
    window, common = _windows(results.heads), _windows(results.common)
    shared = f"; common window {common}" if common else ""
    corpus = without_local_paths((results.provenance.corpus and results.provenance.corpus.source) or NOT_RECORDED)
    documents = _span(r.documents for r in records)
    return [
        ["Models" if study.kind == MODELS else "Model", f"{study.title} ({known})" if known else study.title],
        [f"{study.noun.title()}s{'' if study.one_run else ' compared'}", amount],
        ["Heads", _heads(tables)],
        ["Tokens", f"{_span(tokens)}{total}" if tokens else NOT_RECORDED],
        ["Window", f"{window} tokens{shared}" if window else NOT_RECORDED],
        ["Corpus", f"{corpus}, {documents} documents" if documents else corpus],
    ]


def _some(names: Iterable[str | None]) -> str:
    shown = list(dict.fromkeys(name for name in names if name is not None))
    more = [f"{len(shown) - MOST_NAMES} more"] if len(shown) > MOST_NAMES else []
    return ", ".join([*shown[:MOST_NAMES], *more])


def _span(values: Iterable[int | None]) -> str:
    """`128 to 1,024`; empty where no value is known."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _windows(heads: pd.DataFrame | None) -> str:
    return "" if heads is None else _span(int(w) for w in heads["window"].dropna().unique())


def _heads(tables: Results) -> str:
    study, heads, provenance = tables.own.study, tables.own.heads, tables.files.provenance
    text = f"{_span(heads.groupby('model').size())} query heads"
    last = heads.loc[heads["model"] == study.names[-1], "layer_kind"]
    kinds = kinds_in_order(last)
    if study.one_run and len(kinds) > 1:
        text += f": {'; '.join(f'{int((last == kind).sum()):,} in {kind} layers' for kind in kinds)}"
    choice = provenance.study.heads if provenance.study else None
    if isinstance(choice, Mapping) and "sample" in choice:
        return f"{text}, sampled with seed {shortened(str(choice.get('seed')))}"
    return text
