"""The sentences that matter, for the first screen of the page: the openings of four cards' takeaways."""

from qkscope.lenses.cards import WRITERS, CardWriter
from qkscope.words.card import CardInput

SENTENCES = 4
# In the order in which a reader asks: how strong, which heads, which layers, and is it the window.
SOURCES = ("position_signal", "taxonomy_evolution", "layer_kinds", "window_dependence")


def lead(cards: CardWriter) -> list[str]:
    """At most four statements in Markdown, each computed from this study."""
    given = cards.given()
    said = [text for name in SOURCES if _has(given, name) for text in _opening(given, name)]
    return said[:SENTENCES]


def _has(given: CardInput, name: str) -> bool:
    table = {"layer_kinds": given.tables.layer_kinds, "window_dependence": given.tables.window_dependence}
    return table.get(name, given.reading.trajectory) is not None


def _opening(given: CardInput, name: str) -> list[str]:
    takeaway = [text for text in WRITERS[name](given).takeaway if text]
    # Queries and keys are two sentences of one statement.
    count = 2 if name == "position_signal" else 1
    return [" ".join(takeaway[:count])] if takeaway else []
