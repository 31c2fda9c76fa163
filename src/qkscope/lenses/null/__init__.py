"""What r would be if position meant nothing: the same vectors with shifted positions."""

from qkscope.lenses.base import Figure, Lens, Summary, View, later
from qkscope.lenses.null.card import null_card
from qkscope.lenses.null.summary import NAME, null_means
from qkscope.lenses.null.table import FILE, TABLE, with_absolute

LENS = Lens(
    name="null",
    title="Shifted positions",
    question="Is r larger than it would be if position meant nothing?",
    tables=(TABLE,),
    derive=with_absolute,
    summaries=(Summary(NAME, null_means),),
    figures=(
        Figure(
            "null",
            later("qkscope.lenses.null.figure:draw_null"),
            null_card,
            needs=(FILE, NAME),
            at_common_window=True,
            number=11,
        ),
    ),
    views=(
        View(
            "curve",
            "r with shifted positions, by {noun}",
            ("null_r_q", "null_r_k"),
            "Root mean square over all shifts, mean over heads; compare with the position signal.",
            figure="null",
        ),
        View(
            "bars",
            "Heads whose r exceeds that of every shift",
            ("beyond_null_q", "beyond_null_k"),
            "Share of heads. Of heads without position, 1 in 16 would exceed all 15 shifts of 16 buckets by chance.",
        ),
        View("heatmap", "Null of every head's queries", ("null_r_q",)),
    ),
)
