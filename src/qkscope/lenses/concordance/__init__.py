"""What the mean of r_k cancels: keys that run with their queries, and keys that run against them."""

from qkscope.lenses.base import Figure, Lens, Summary, later
from qkscope.lenses.concordance import card
from qkscope.lenses.concordance.table import concordance_at, with_concordance

LENS = Lens(
    name="concordance",
    title="Concordance",
    question="Do keys run with their queries or against them?",
    derive=with_concordance,
    summaries=(Summary("concordance", concordance_at, means=("concordant", "discordant")),),
    figures=(
        Figure(
            "concordance",
            later("qkscope.lenses.concordance.figure:draw_concordance"),
            card.concordance,
            needs=("trajectory", "concordance"),
            number=7,
        ),
    ),
)
