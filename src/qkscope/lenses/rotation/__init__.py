"""How queries and keys drift with position, along which axis, and what that adds to a score."""

from qkscope.lenses.base import Figure, Lens, Summary, View, later
from qkscope.lenses.rotation.card import bias_card, drift_card
from qkscope.lenses.rotation.families import of_models
from qkscope.lenses.rotation.families_card import families_card
from qkscope.lenses.rotation.heads_card import depth_card, heads_card, planes_card
from qkscope.lenses.rotation.planes import FILE as PLANES_CSV
from qkscope.lenses.rotation.planes import TABLE as PLANES
from qkscope.lenses.rotation.summaries import depth_at, relation_at, rotation_at
from qkscope.lenses.rotation.table import FILE, TABLE

DRAW = "qkscope.lenses.rotation"

LENS = Lens(
    name="rotation",
    title="Drift and separation",
    question="Along which axis do queries and keys drift, and what does that add to a score?",
    tables=(TABLE, PLANES),
    summaries=(
        Summary("rotation", rotation_at),
        Summary("rotation_depth", depth_at),
        Summary("rotation_relation", relation_at),
    ),
    figures=(
        Figure(
            "rotation_drift",
            later(f"{DRAW}.bars:draw_drift"),
            drift_card,
            needs=(FILE, "rotation"),
            at_common_window=True,
        ),
        Figure(
            "rotation_bias", later(f"{DRAW}.bars:draw_bias"), bias_card, needs=(FILE, "rotation"), at_common_window=True
        ),
        Figure(
            "rotation_heads",
            later(f"{DRAW}.heads_figure:draw_heads"),
            heads_card,
            needs=(FILE, "rotation_relation"),
            at_common_window=True,
        ),
        Figure(
            "rotation_depth_map",
            later(f"{DRAW}.maps:draw_depth"),
            depth_card,
            needs=(FILE, "rotation_depth"),
            at_common_window=True,
        ),
        Figure(
            "rotation_planes",
            later(f"{DRAW}.ellipses:draw_planes"),
            planes_card,
            needs=(FILE, PLANES_CSV),
            at_common_window=True,
        ),
        Figure(
            "rotation_families",
            later(f"{DRAW}.families_figure:draw_families"),
            families_card,
            needs=(FILE,),
            at_common_window=True,
            number=51,
            worthwhile=of_models,
        ),
    ),
    views=(
        View(
            "curve",
            "Correlation with position along a, and along each kind's own drift",
            ("r_q_a", "r_k_a", "r_q_own", "r_k_own"),
            "Means over heads.",
            figure="rotation_drift",
        ),
        View(
            "curve",
            "What position adds to a score over the window",
            ("bias_window", "bias_strength_window"),
            "Raw score, means over heads: in all directions, and along a alone.",
            figure="rotation_bias",
        ),
        View("curve", "The same in standard deviations of a score", ("bias_effect",), figure="rotation_bias"),
        View(
            "bars",
            "Share of variance along a and b, and of differences along b",
            ("var_frac_a", "var_frac_b", "separation_strength"),
        ),
        View(
            "scatter",
            "Separation against bias, a dot per head",
            ("separation_strength", "bias_strength"),
            figure="rotation_heads",
        ),
        View("heatmap", "Bias over the window of every head, in standard deviations", ("bias_effect",)),
        View(
            "heatmap", "Correlation of every head's keys with position along a", ("r_k_a",), figure="rotation_depth_map"
        ),
    ),
)
