"""The sentences for the first screen of the page: the openings of the takeaways that lenses put forward."""

from qkscope.lenses.card import Subject
from qkscope.lenses.views import Results
from qkscope.report.cards import takeaways
from qkscope.report.catalogue import drawable

SENTENCES = 4


def lead(tables: Results) -> list[str]:
    """At most four statements, each computed from this study."""
    said = []
    for entry, at in drawable(tables):
        if entry.figure.leads and not at.common:
            if entry.figure.card is None:
                takeaway = takeaways(entry.figure, tables)
            else:
                takeaway = [text for text in entry.figure.card(Subject(tables, at)).takeaway if text]
            said += [" ".join(takeaway[: entry.figure.leads])] if takeaway else []
    return said[:SENTENCES]
