"""How much position is in queries and keys, and how much of them is position: measures that need no component."""

from qkscope.lenses.base import Figure, Lens, View, later
from qkscope.lenses.measures.card import measures_card
from qkscope.lenses.measures.table import FILE, TABLE

LENS = Lens(
    name="measures",
    title="Position without components",
    question="How much position can be read from a head, and how much of the head is position?",
    tables=(TABLE,),
    figures=(
        Figure(
            "measures",
            later("qkscope.lenses.measures.figure:draw_measures"),
            measures_card,
            needs=(FILE,),
            at_common_window=True,
            number=10,
        ),
    ),
    views=(
        View(
            "curve",
            "Position in queries, by {noun}",
            ("decode_q", "shape_q", "share_q"),
            "Means over heads.",
            figure="measures",
        ),
        View("curve", "Position in keys, by {noun}", ("decode_k", "shape_k", "share_k"), "Means over heads."),
        View("heatmap", "What a read-out recovers of position, from every head's queries", ("decode_q",)),
        View("heatmap", "Share of every head's queries that follows position", ("shape_q",)),
        View("scatter", "Queries against keys, share that follows position", ("shape_q", "shape_k")),
    ),
)
