"""The sentences for the first screen of the page: the first takeaways of the main figures."""

from qkscope.lenses.views import Results
from qkscope.report.cards import takeaways
from qkscope.report.catalogue import drawable

SENTENCES = 4


def lead(tables: Results) -> list[str]:
    """At most four statements, each computed from this study."""
    main = (figure for figure in drawable(tables) if figure.number is not None)
    sentences = (next(iter(takeaways(figure, tables)), "") for figure in main)
    return [text for text in sentences if text][:SENTENCES]
