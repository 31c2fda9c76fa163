"""The card of a declared figure: caption, a small table of numbers, at most three takeaways.

Every card is built here, from the figure's declaration and the measures' trends. A lens adds sentences only where no
template can (`Figure.takeaways`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from qkscope.lenses.base import Figure, Measure
from qkscope.lenses.charts import Shares, Trajectories
from qkscope.lenses.kind_of_layer import EVERY_KIND, part_of
from qkscope.lenses.views import Results, WindowView
from qkscope.report.catalogue import drawing_place
from qkscope.results.entries import Entry
from qkscope.results.folder import FIGURE_PNG, FIGURE_SVG
from qkscope.results.provenance import CorpusRecord
from qkscope.stats.series import Trend
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, Code, Run, TableBlock, heading, paragraph
from qkscope.words.phrases import Format, number, shortened, shown
from qkscope.words.trends import describe_ranking, describe_trend, number_format, trend_phrase, value_with_error

MOST_TAKEAWAYS = 3
MOST_ROWS = 6  # of the number table
MOST_WORDS = 180  # of a card
FRAME_WORDS = 30  # headings, file names, sources
ROW_WORDS = 24  # a title row and one row of numbers
UNCHANGED = (Trend.LEVEL, Trend.UNDECIDED, Trend.UNDEFINED)
MOST_MODELS = 5  # columns of it, where entries are models or seeds


def figure_card(figure: Figure, tables: Results) -> list[AnyBlock]:
    """A figure's card, written once: its folder and the page show the same."""
    return tables.own.card(figure.name, lambda: _card(figure, tables))


def _card(figure: Figure, tables: Results) -> list[AnyBlock]:
    """Caption, number table, sources and takeaways under the headings of the published cards."""
    own = tables.own
    span = f" {own.study.span.title()}" if isinstance(figure.chart, Trajectories | Shares) else ""
    sentences = takeaways(figure, tables)
    caption = " ".join(part for part in (figure.caption, _reading(figure, tables)) if part)
    words = FRAME_WORDS + sum(len(text.split()) for text in (figure.title, caption, *sentences))
    while len(sentences) > 1 and words > MOST_WORDS - ROW_WORDS:
        words -= len(sentences.pop().split())
    return [
        heading(1, f"{shortened(own.study.title)}: {figure.title}{span}"),
        heading(2, "File"),
        paragraph(Code(FIGURE_PNG), ", ", Code(FIGURE_SVG)),
        heading(2, "What This Figure Shows"),
        paragraph(caption),
        *number_table(figure, tables, MOST_WORDS - words),
        heading(2, "How It Was Produced"),
        paragraph(*_production(figure, tables)),
        heading(2, "Key Takeaway"),
        paragraph(" ".join(sentences)),
    ]


def takeaways(figure: Figure, tables: Results) -> list[str]:
    """At most three sentences: the figure's own ones first, then the trends of its measures.

    Measures that do not change are named only where none does.
    """
    own = list(figure.takeaways(tables)) if figure.takeaways is not None else []
    names = list(filter(tables.own.has_measure, figure.reported))
    changing = [name for name in names if _changes(tables, name)] or names[:1]
    return [*own, *(measure_sentence(tables, tables.own.measures[name]) for name in changing)][:MOST_TAKEAWAYS]


def _changes(tables: Results, name: str) -> bool:
    """Whether a mean changes significantly over the run, over native contexts or at equal length."""
    if not tables.own.study.one_run or len(tables.own.names) == 1:
        return True
    part = part_of(main_type(tables.own, name))
    views = [at for at in tables.views() if at.has_measure(name)]
    return any(at.panel_with(name).series(name, at.names, part).trend not in UNCHANGED for at in views)


def measure_sentence(tables: Results, measure: Measure) -> str:
    """How a measure's mean changes over a run, at equal length too where that differs; or which model has most."""
    own, common = tables.own, tables.common
    kind = main_type(own, measure.name)
    share = measure.kind == "indicator"
    subject = f"{'share of' if share else 'mean'} {measure.label}{' among' if share else ' of'} {population(own, kind)}"
    if not own.study.one_run and len(own.names) > 1:
        return describe_ranking(
            own.panel_with(measure.name), own.study.checkpoints, measure.name, subject, _format(measure), own.study.noun
        )
    sentence = describe_trend(
        own.panel_with(measure.name), own.study.checkpoints, measure.name, subject, _format(measure), part_of(kind)
    )
    if common is None or not common.has_measure(measure.name):
        return sentence
    return f"{sentence[:-1]}{_at_equal_length(own, common, measure, kind)}."


def _at_equal_length(own: WindowView, common: WindowView, measure: Measure, kind: str) -> str:
    """`; at equal length, it peaks at 0.59 (C) and ends at 0.55`; nothing where the course is the same there."""
    shapes = [at.panel_with(measure.name).series(measure.name, at.names, part_of(kind)) for at in (own, common)]
    if shapes[0].points == shapes[1].points or shapes[1].trend in (Trend.UNDEFINED, Trend.UNDECIDED):
        return ""
    shape, labels = shapes[1], [shortened(own.study.labels[name]) for name in common.names]
    if shape.turn is not None:
        turn, end = shown(_format(measure), shape.points[shape.turn], shape.points[shape.last])
        verb = "peaks at" if shape.trend is Trend.PEAKS else "dips to"
        return f"; at equal length, it {verb} {turn} ({labels[shape.turn]}) and ends at {end}"
    if shape.overall:
        verb = "rises" if shape.overall > 0 else "falls"
        return f"; at equal length, it {verb} to {_format(measure)(shape.points[shape.last])}"
    return f"; at equal length, it {trend_phrase(shape, labels, _format(measure))}"


def _format(measure: Measure) -> Format:
    """Correlations have two decimals, shares of heads percent, other numbers three digits."""
    return number if measure.limits == (-1.0, 1.0) else number_format(measure.kind)


def main_type(at: WindowView, measure: str) -> str:
    """The layer type that sentences are about: the first that has the measure (rotary comes first), or all heads."""
    if at.layer_types == [EVERY_KIND] or not at.study.one_run:
        return EVERY_KIND
    means = ((kind, at.panel_with(measure).mean(measure, at.names[-1], part_of(kind))) for kind in at.layer_types)
    return next((kind for kind, mean in means if math.isfinite(mean)), EVERY_KIND)


def _reading(figure: Figure, tables: Results) -> str:
    """How to read the marks: windows, spread, errors."""
    own, common = tables.own, tables.common
    parts = []
    windows = sorted({int(w) for w in (own.window_of(name) for name in own.names) if w == w})
    if windows:
        length = f"{windows[0]:,}" if len(windows) == 1 else f"{windows[0]:,}–{windows[-1]:,}"
        parts.append(f"Context length: {length} tokens.")
    if isinstance(figure.chart, Trajectories):
        if common is not None:
            shared = sorted({int(common.window_of(name)) for name in common.names})
            parts.append(f"Solid: native length. Hollow: the first {shared[0]:,} tokens.")
        parts.append("Bands: ±1 SD over heads; bars: ±1 SE over documents.")
    return " ".join(parts)


def number_table(figure: Figure, tables: Results, words: int) -> list[AnyBlock]:
    """First and last checkpoint of a run at both windows, or each model: means ± standard errors.

    As many rows as so many words allow, at least one; nothing where no measure has a mean.
    """
    own = tables.own
    columns = _columns(tables)
    rows: list[Sequence[str]] = []
    names = list(filter(own.has_measure, figure.reported))
    for kind in own.layer_types:  # rows that do not fit are those of the later types
        for name in names:
            measure = own.measures[name]
            cells = [
                value_with_error(at.panel_with(name), name, entry.name, measure.kind, part_of(kind))
                if at.has_measure(name) else "–"
                for at, entry in columns
            ]  # fmt: skip
            if any(cell != "–" for cell in cells):
                rows.append([f"{measure.label} ({population(own, kind)})", *cells])
    titles = [f"{shortened(entry.label)}{', common' if at.common else ''}" for at, entry in columns]
    sizes = np.cumsum([sum(len(cell.split()) for cell in row) for row in rows])
    fit = max(1, int((sizes <= words - len(titles)).sum()))
    return [TableBlock(["Mean", *titles], rows[: min(fit, MOST_ROWS)])] if rows else []


def _columns(tables: Results) -> list[tuple[WindowView, Entry]]:
    entries = tables.own.study.checkpoints
    if not tables.own.study.one_run:
        return [(tables.own, entry) for entry in entries[:MOST_MODELS]]
    ends = [entries[0]] if len(entries) == 1 else [entries[0], entries[-1]]
    return [(at, entry) for at in tables.views() for entry in ends if entry.name in at.names]


def population(at: WindowView, kind: str) -> str:
    """`48 rotary heads`."""
    counts = [at.panel.count(name, part_of(kind)) for name in at.names]
    low, high = min(counts), max(counts)
    name = "" if kind == EVERY_KIND else f"{shortened(kind)} "
    return f"{low:,}–{high:,} {name}heads" if low < high else f"{high:,} {name}heads"


def _production(figure: Figure, tables: Results) -> list[Run]:
    """Where the numbers come from, in one line; the rest of the provenance is listed once per report."""
    results = tables.files
    documents = [c.record.documents for c in results.study.checkpoints if c.record.documents is not None]
    corpus = results.provenance.corpus or CorpusRecord()
    runs: list[Run] = [Code("tables/")]
    if documents:
        low, high = min(documents), max(documents)
        runs.append(f" · {counted(low, 'document') if low == high else f'{low:,}–{high:,} documents'}")
    if corpus.fingerprint and re.fullmatch(r"[\w:]+", corpus.fingerprint):
        runs += [" · ", Code(corpus.fingerprint[:19])]
    return [*runs, " · ", Code(drawing_place(figure).replace(":", "."))]
