"""The figures of a report (ten main ones by number, and an appendix), and the card of each.

A card has a caption, a small table of numbers, and at most three takeaways.
Every card follows from the figure's declaration and the measures' trends. `Figure.takeaways` adds sentences that no
template can write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qkscope.lenses.base import Figure, Measure, later
from qkscope.lenses.charts import DepthMap, Drawing, HeadScatter, Shares, Trajectories
from qkscope.lenses.kind_of_layer import EVERY_KIND, part_of
from qkscope.lenses.registry import registered
from qkscope.lenses.views import Results, WindowView
from qkscope.results.folder import FIGURE_PNG, FIGURE_SVG
from qkscope.results.provenance import CorpusRecord
from qkscope.stats.series import Shape, Trend
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, Code, TableBlock, heading, paragraph
from qkscope.words.phrases import (
    Format,
    describe_ranking,
    describe_trend,
    number,
    percent,
    shortened,
    shown,
    significant,
    trend_phrase,
    value_with_error,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

APPENDIX = "appendix"
LAST = 100  # behind every number
# By place, because cards name the function and must not import matplotlib for that.
CHARTS: Mapping[type, str] = {
    Trajectories: "qkscope.report.charts.means:draw_trajectories",
    Shares: "qkscope.report.charts.means:draw_shares",
    DepthMap: "qkscope.report.charts.maps:draw_depth_map",
    HeadScatter: "qkscope.report.charts.maps:draw_head_scatter",
}
MOST_TAKEAWAYS = 3
MOST_ROWS = 6  # of the number table
MOST_WORDS = 180  # of a card
FRAME_WORDS = 30  # headings, file names, sources
ROW_WORDS = 24  # a title row and one row of numbers
UNCHANGED = (Trend.LEVEL, Trend.UNDECIDED, Trend.UNDEFINED)
MOST_MODELS = 5  # columns of it, where entries are models or seeds


# --- figures ----------------------------------------------------------------------------------------


def catalogue() -> list[Figure]:
    """Every figure of the registered lenses: the main ones by number, then the appendix."""
    figures = [figure for lens in registered() for figure in lens.figures]
    return sorted(figures, key=lambda figure: LAST if figure.number is None else figure.number)


def drawable(tables: Results) -> list[Figure]:
    """The figures for which a study has the measures and tables."""
    return [figure for figure in catalogue() if figure.exists(tables.own)]


def folder_name(figure: Figure) -> str:
    """`01_position_signal`, or `appendix_norms`: another lens never renumbers a figure."""
    return f"{APPENDIX}_{figure.name}" if figure.number is None else f"{figure.number:02d}_{figure.name}"


def drawing_place(figure: Figure) -> str:
    """The function that draws a figure, as `package.module:name`."""
    return figure.chart.function if isinstance(figure.chart, Drawing) else CHARTS[type(figure.chart)]


def draw_chart(figure: Figure, tables: Results) -> Picture:
    """The figure as a matplotlib figure."""
    import matplotlib

    from qkscope.draw import style

    draw = later(drawing_place(figure))
    with matplotlib.rc_context(style.RC):
        own = isinstance(figure.chart, Drawing)
        picture: Picture = draw(tables) if own else draw(figure.title, figure.chart, tables)
        return picture


# --- cards ------------------------------------------------------------------------------------------


def figure_card(figure: Figure, tables: Results) -> list[AnyBlock]:
    """A figure's card, built once: its folder and the page show the same."""
    return tables.own.card(figure.name, lambda: _card(figure, tables))


def _card(figure: Figure, tables: Results) -> list[AnyBlock]:
    """Caption, number table, sources and takeaways under the headings of the published cards."""
    own = tables.own
    span = f" {own.study.span.title()}" if isinstance(figure.chart, Trajectories | Shares) else ""
    sentences = takeaways(figure, tables)
    caption = f"{figure.caption} {_reading(figure, tables)}".strip()
    words = FRAME_WORDS + sum(len(text.split()) for text in (figure.title, caption, *sentences))
    while len(sentences) > 1 and words > MOST_WORDS - ROW_WORDS:
        words -= len(sentences.pop().split())
    return [
        heading(1, f"{shortened(own.study.title)}: {figure.title}{span}"),
        heading(2, "File"),
        paragraph(Code(FIGURE_PNG), ", ", Code(FIGURE_SVG)),
        heading(2, "What This Figure Shows"),
        paragraph(caption),
        *_number_table(figure, tables, MOST_WORDS - words),
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
    return [*own, *(_measure_sentence(tables, tables.own.measures[name]) for name in changing)][:MOST_TAKEAWAYS]


def _changes(tables: Results, name: str) -> bool:
    """Whether a mean changes significantly over the run, at native length or at equal length."""
    if not tables.own.study.one_run or len(tables.own.names) == 1:
        return True
    part = part_of(_main_type(tables.own, name))
    views = [at for at in tables.views() if at.has_measure(name)]
    return any(at.panel_with(name).series(name, at.names, part).trend not in UNCHANGED for at in views)


def _measure_sentence(tables: Results, measure: Measure) -> str:
    """How a measure's mean changes over a run, at equal length too where that differs; or which model has most."""
    own, name = tables.own, measure.name
    kind, share = _main_type(own, name), measure.kind == "indicator"
    subject = f"{'share of' if share else 'mean'} {measure.label}{' among' if share else ' of'} {population(own, kind)}"
    # Correlations have two decimals, shares of heads percent, other numbers three digits.
    fmt: Format = number if measure.limits == (-1.0, 1.0) else percent if share else significant
    panel, entries = own.panel_with(name), own.study.checkpoints
    if not own.study.one_run and len(own.names) > 1:
        return describe_ranking(panel, entries, name, subject, fmt, own.study.noun)
    sentence = describe_trend(panel, entries, name, subject, fmt, part_of(kind))
    common = tables.common
    if common is None or not common.has_measure(name):
        return sentence
    native, equal = (at.panel_with(name).series(name, at.names, part_of(kind)) for at in (own, common))
    if native.points == equal.points or equal.trend in (Trend.UNDEFINED, Trend.UNDECIDED):
        return sentence
    return f"{sentence[:-1]}; at equal length, it {_short_phrase(equal, common, fmt)}."


def _short_phrase(shape: Shape, at: WindowView, fmt: Format) -> str:
    """`peaks at 0.59 (C) and ends at 0.55`."""
    labels = [shortened(at.study.labels[name]) for name in at.names]
    if shape.turn is not None:
        verb = "peaks at" if shape.trend is Trend.PEAKS else "dips to"
        turn, end = shown(fmt, shape.points[shape.turn], shape.points[shape.last])
        return f"{verb} {turn} ({labels[shape.turn]}) and ends at {end}"
    if shape.overall:
        return f"{'rises' if shape.overall > 0 else 'falls'} to {fmt(shape.points[shape.last])}"
    return trend_phrase(shape, labels, fmt)


def _main_type(at: WindowView, measure: str) -> str:
    """The layer type that sentences are about: the first that has the measure (rotary comes first), or all heads."""
    if at.layer_types == [EVERY_KIND] or not at.study.one_run:
        return EVERY_KIND
    means = ((kind, at.panel_with(measure).mean(measure, at.names[-1], part_of(kind))) for kind in at.layer_types)
    return next((kind for kind, mean in means if math.isfinite(mean)), EVERY_KIND)


def _reading(figure: Figure, tables: Results) -> str:
    """How to read the marks: windows, spread, errors."""
    own, common = tables.own, tables.common
    models = own.names if figure.models is None else figure.models(own)
    windows = sorted({int(w) for w in map(own.window_of, models) if w == w})
    parts = []
    if windows:
        length = f"{windows[0]:,}" if len(windows) == 1 else f"{windows[0]:,}–{windows[-1]:,}"
        parts.append(f"Context length: {length} tokens.")
    if isinstance(figure.chart, Trajectories):
        if common is not None:
            shortest = int(min(map(common.window_of, common.names)))
            parts.append(f"Solid: native length. Hollow: the first {shortest:,} tokens.")
        parts.append("Bands: ±1 SD over heads; bars: ±1 SE over documents.")
    return " ".join(parts)


def _number_table(figure: Figure, tables: Results, words: int) -> list[AnyBlock]:
    """First and last checkpoint of a run at both windows, or each model: means ± standard errors.

    As many rows as so many words allow, at least one; nothing where no measure has a mean.
    """
    own, entries = tables.own, tables.own.study.checkpoints
    columns = [(own, entry) for entry in entries[:MOST_MODELS]]
    if own.study.one_run:
        ends = entries if len(entries) == 1 else (entries[0], entries[-1])
        columns = [(at, entry) for at in tables.views() for entry in ends if entry.name in at.names]
    rows: list[Sequence[str]] = []
    for kind in own.layer_types:  # rows that do not fit are those of the later types
        for measure in (own.measures[name] for name in figure.reported if own.has_measure(name)):
            cells = [
                value_with_error(at.panel_with(measure.name), measure.name, entry.name, measure.kind, part_of(kind))
                if at.has_measure(measure.name) else "–"
                for at, entry in columns
            ]  # fmt: skip
            if any(cell != "–" for cell in cells):
                rows.append([f"{measure.label} ({population(own, kind)})", *cells])
    titles = [f"{shortened(entry.label)}{', common' if at.common else ''}" for at, entry in columns]
    sizes = np.cumsum([sum(len(cell.split()) for cell in row) for row in rows])
    fit = max(1, int((sizes <= words - len(titles)).sum()))
    return [TableBlock(["Mean", *titles], rows[: min(fit, MOST_ROWS)])] if rows else []


def population(at: WindowView, kind: str) -> str:
    """`48 rotary heads`."""
    counts = [at.panel.count(name, part_of(kind)) for name in at.names]
    low, high = min(counts), max(counts)
    name = "" if kind == EVERY_KIND else f"{shortened(kind)} "
    return f"{low:,}–{high:,} {name}heads" if low < high else f"{high:,} {name}heads"


def _production(figure: Figure, tables: Results) -> list[str]:
    """Where the numbers come from, in one line; the rest of the provenance is listed once per report."""
    results = tables.files
    documents = [c.record.documents for c in results.study.checkpoints if c.record.documents is not None]
    fingerprint = (results.provenance.corpus or CorpusRecord()).fingerprint
    runs: list[str] = [Code("tables/")]
    if documents:
        low, high = min(documents), max(documents)
        runs.append(f" · {counted(low, 'document') if low == high else f'{low:,}–{high:,} documents'}")
    if fingerprint and re.fullmatch(r"[\w:]+", fingerprint):
        runs += [" · ", Code(fingerprint[:19])]
    return [*runs, " · ", Code(drawing_place(figure).replace(":", "."))]
