"""Figures and cards of a study by their names, as tests ask for them."""

from qkscope.lenses.registry import registered
from qkscope.report.catalogue import catalogue
from qkscope.report.figures import draw
from qkscope.stats.means import HeadPanel
from qkscope.words.blocks import to_markdown

EVERY_FIGURE = {entry.name: entry for entry in catalogue()}
ACROSS_MODELS = "pc_roles"  # a summary that only studies across models have
# Those that the summaries of `qk.csv` and its kin are enough for; others need a head table of their own lens, or runs.
FIGURES = {
    name: entry
    for name, entry in EVERY_FIGURE.items()
    if not any(need.endswith(".csv") or need in ("runs", ACROSS_MODELS) for need in entry.figure.needs)
}


def at_window(tables, common=False):
    return tables.common if common else tables.own


def drawing(tables, name, common=False):
    """The figure, or None where the study does not carry it."""
    entry, at = EVERY_FIGURE[name], at_window(tables, common)
    return draw(entry, tables, at) if at is not None and entry.figure.exists(at) else None


def card(tables, name, common=False):
    """The card's blocks."""
    return EVERY_FIGURE[name].card(tables, at_window(tables, common))


def card_text(tables, name, common=False):
    """The card as Markdown."""
    return to_markdown(card(tables, name, common))


class Cards:
    """The cards of one study."""

    def __init__(self, tables):
        self.tables = tables

    def text(self, name, common=False):
        return card_text(self.tables, name, common)


def derived_panel(heads, same_heads):
    """A panel of heads with what the lenses derive from their columns."""
    for lens in registered():
        heads = heads if lens.derive is None else lens.derive(heads)
    return HeadPanel(heads, same_heads)
