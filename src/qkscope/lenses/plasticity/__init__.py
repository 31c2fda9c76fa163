"""How plastic attention is: whether queries still decide which key wins, and what takes that from them."""

from qkscope.lenses.base import Detail, Figure, Lens, View
from qkscope.lenses.charts import Drawing
from qkscope.lenses.plasticity.table import FILE, MAP, PROFILE, TABLE

LENS = Lens(
    name="plasticity",
    title="Plasticity",
    question="Does the query still decide which key wins, or is that settled beforehand?",
    tables=(TABLE, PROFILE, MAP),
    figures=(
        Figure(
            "plasticity",
            title="Attention Plasticity",
            chart=Drawing(
                "qkscope.report.drawings.curves:draw_plasticity",
                ("ap_same_position", "ap_content", "ap", "ap_drop"),
            ),
            caption="Attention plasticity: how often two queries disagree on which of two keys scores higher (1: "
            "always, 0: "
            "never). At one position (ap_same_position), for content alone (ap_content), and over position buckets "
            "(ap).",
            needs=(FILE,),
        ),
    ),
    views=(
        View(
            "curve",
            "Plasticity",
            ("ap_same_position", "ap_content", "ap"),
            "Means over heads. From ap_same_position to ap_content is lost to position, from there to 1 to a fixed "
            "preference.",
            figure="plasticity",
        ),
        View(
            "curve",
            "Drop of plasticity along the window",
            ("ap_drop", "ap_drop_matched"),
            "First minus last fifth; matched: at equal distances between the two keys.",
            figure="plasticity",
        ),
        View("heatmap", "Plasticity of every head", ("ap",)),
        View("heatmap", "Share of every head's loss that is not position", ("loss_not_position",)),
        View("scatter", "Drop against drop at equal distances", ("ap_drop", "ap_drop_matched")),
    ),
    details=(
        Detail("plasticity", PROFILE, ("position",), ("ap", "ap_se", "ap_same_position")),
        Detail("pairs", MAP, ("key_distance", "query_distance"), ("ap", "ap_se")),
    ),
)
