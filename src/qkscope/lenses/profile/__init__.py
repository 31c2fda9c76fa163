"""Where queries and keys lie, position by position: what r is a summary of."""

from qkscope.lenses.base import Detail, Figure, Lens, View
from qkscope.lenses.charts import Drawing
from qkscope.lenses.profile.choice import shape_shows
from qkscope.lenses.profile.examples import examples
from qkscope.lenses.profile.table import BEND, BEND_FILE, PROFILE, PROFILE_FILE

LENS = Lens(
    name="profile",
    title="Profiles along position",
    question="How do queries and keys move with position, and is that a line?",
    tables=(PROFILE, BEND),
    figures=(
        Figure(
            "profile",
            title="Projection on PC0 by Position",
            chart=Drawing("qkscope.report.drawings.heads:draw_profile", ("bend_q", "bend_k")),
            caption="Mean projection of queries (blue) and keys (red) on PC0 by position, for the clearest head of "
            "each "
            "category and the most bent one. Bands: ± 1 SD over tokens.",
            needs=(PROFILE_FILE, BEND_FILE),
            worthwhile=shape_shows,
        ),
    ),
    views=(
        View(
            "curve",
            "What no line explains of the variance between buckets",
            ("bend_q", "bend_k"),
            "Along PC0; means over heads.",
            figure="profile",
        ),
        View("heatmap", "What no line explains of every head's queries along PC0", ("bend_q",)),
        View("scatter", "How much position, and how bent", ("between_q", "bend_q")),
    ),
    details=(Detail("profile", PROFILE, ("start", "end"), ("q_pc0", "q_pc0_sd", "k_pc0", "k_pc0_sd")),),
    examples=examples,
)
