"""How plastic attention is: whether queries still decide which key wins, and what takes that from them."""

from qkscope.lenses.base import Detail, Figure, Lens, Summary, View, later
from qkscope.lenses.plasticity.sampled_table import SAMPLED
from qkscope.lenses.plasticity.summaries import DROPS, MEANS, drops_at, means_at
from qkscope.lenses.plasticity.table import FILE, MAP, MAP_FILE, PROFILE, PROFILE_FILE, TABLE

ROOM = "qkscope.lenses.plasticity"

LENS = Lens(
    name="plasticity",
    title="Plasticity",
    question="Does the query still decide which key wins, or is that settled beforehand?",
    tables=(TABLE, PROFILE, MAP),
    sampled=(SAMPLED,),
    summaries=(Summary(MEANS, means_at), Summary(DROPS, drops_at)),
    figures=tuple(
        Figure(
            name,
            later(f"{ROOM}.{figure}"),
            later(f"{ROOM}.{card}"),
            needs=needs,
            at_common_window=True,
        )
        for name, figure, card, needs in (
            ("plasticity", "figure:draw_plasticity", "card:plasticity_card", (FILE, MEANS)),
            ("plasticity_drop", "figure:draw_drops", "card:drops_card", (FILE, DROPS)),
            ("plasticity_profile", "profile_figure:draw_profile", "profile_card:profile_card", (PROFILE_FILE, MEANS)),
            ("plasticity_map", "profile_figure:draw_map", "profile_card:map_card", (MAP_FILE, MEANS)),
        )
    ),
    views=(
        View(
            "curve",
            "Plasticity, by {noun}",
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
            figure="plasticity_drop",
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
