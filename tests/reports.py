"""Figures and cards of a study by their names, as tests ask for them."""

import functools

from qkscope.lenses.registry import registered
from qkscope.lenses.views import build_tables
from qkscope.report.cards import catalogue, draw_chart, figure_card
from qkscope.report.published import PUBLISHED
from qkscope.results.read import load_results
from qkscope.stats.means import HeadPanel
from qkscope.words.blocks import to_markdown

EVERY_FIGURE = {figure.name: figure for figure in catalogue()}
# Those that `qk.csv` and its kin are enough for; others need measures or tables of another lens.
FIGURES = {
    name: EVERY_FIGURE[name]
    for name in ("position_signal", "taxonomy", "depth", "phase_portraits", "context_length", "explained_variance")
}
PUBLISHED_FIGURES = {figure.name: figure for figure in PUBLISHED.values()}


def drawing(tables, name):
    """The figure, or None where the study does not carry it."""
    figure = EVERY_FIGURE[name]
    return draw_chart(figure, tables) if figure.exists(tables.own) else None


def published_drawing(tables, name):
    """One of the published figures."""
    return draw_chart(PUBLISHED_FIGURES[name], tables)


def write_card_and_figure(folder, name):
    """Write one figure of a results folder with its card; returns where they are."""
    from qkscope.report.figures import write_figure

    figure = next(figure for figure in catalogue() if figure.name == name)
    return write_figure(figure, build_tables(load_results(folder)), folder)[0].parent


def card_text(tables, name):
    """The card as Markdown."""
    figure = EVERY_FIGURE[name] if name in EVERY_FIGURE else PUBLISHED_FIGURES[name]
    return to_markdown(figure_card(figure, tables))


class Cards:
    """The cards of one study."""

    def __init__(self, tables):
        self.tables = tables

    def text(self, name):
        return card_text(self.tables, name)


@functools.cache
def derivations():
    """What lenses derive from the columns of `qk.csv`, in order."""
    return [lens.derive for lens in registered() if lens.derive is not None]


def derived_panel(heads, same_heads):
    """A panel of heads with what the lenses derive from their columns."""
    for derive in derivations():
        heads = derive(heads)
    return HeadPanel(heads, same_heads)
