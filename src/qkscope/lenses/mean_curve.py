"""A ready-made figure with its card: the mean of one column over heads, entry by entry.

A lens whose column is a plain number per head needs no drawing and no sentences of its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from qkscope.lenses.base import Figure, HeadTable, Measure
from qkscope.lenses.card import Card, Subject, bands, error_span, rows, window_sentence
from qkscope.lenses.errors import column_means, has_errors
from qkscope.stats.findings import describe_curve, largest_contrast
from qkscope.words.phrases import curve_course, jumps, ranking, sentence, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from qkscope.lenses.views import WindowView


def mean_curve(table: HeadTable, column: str, *, name: str, title: str, leads: int = 0) -> Figure:
    """The figure `name` of a column, at each entry's own context and at the common window."""
    shown = next(each for each in table.columns if each.name == column)
    return Figure(
        name,
        partial(draw_mean_curve, table.name, shown, title),
        partial(mean_card, table.name, shown, title),
        needs=(table.name,),
        at_common_window=table.windows == "own and common",
        leads=leads,
    )


def draw_mean_curve(file: str, column: Measure, title: str, at: WindowView) -> Drawing:
    """Means over heads with their spread and errors."""
    from qkscope.draw import style
    from qkscope.draw.curves import draw_band_line, spread_keys
    from qkscope.lenses.canvas import canvas

    study, table = at.study, column_means(at, file, [column.name])
    figure = canvas(at, 9.0, 4.0, f"{title} {style.span_title(study)}")
    axes = figure.subplots()
    draw_band_line(
        axes, table, column.name, colour=style.PURPLE, marker="o", label="mean over heads", joined=study.one_run
    )
    axes.set_ylabel(f"{column.name} ({column.unit})" if column.unit else column.name)
    style.checkpoint_axis(axes, study)
    keys = spread_keys(style.PURPLE, has_errors(table, [column.name]))
    style.header_legend(figure, [*axes.get_legend_handles_labels()[0], *keys], 1 + len(keys))
    return style.finish(figure)


def mean_card(file: str, column: Measure, title: str, subject: Subject) -> Card:
    """What the column is, and how its mean goes."""
    panel = subject.at.panel_of(file)
    name = f"The mean of {column.name}"
    if subject.study.one_run or len(subject.checkpoints) == 1:
        curve = describe_curve(panel, subject.checkpoints, column.name)
        course = curve_course(curve, name, significant)
        steps = jumps(curve, name[0].lower() + name[1:], significant, subject.windows)
    else:
        contrast = largest_contrast(panel, subject.checkpoints, column.name)
        course, steps = ranking(contrast, name, significant, subject.noun), []
    shows = [
        f"{column.name}: {sentence(column.definition)} The mean over heads for {rows(subject)}, with {bands(subject)} "
        f"of ± 1 standard deviation over heads. {window_sentence(subject)}",
        " ".join([course, *steps, *error_span(subject, column.name, significant, panel)]),
    ]
    how = [("Aggregation", f"mean and standard deviation of {column.name} over the heads of each {subject.noun}.")]
    headline = f"{title} {subject.study.span.title()}"
    return Card(headline, shows, file, how, [course])
