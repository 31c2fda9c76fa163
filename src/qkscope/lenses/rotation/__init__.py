"""How queries and keys drift with position, along which axis, and what that adds to a score."""

from qkscope.lenses.base import Figure, Lens, View
from qkscope.lenses.charts import Drawing, Panel, Trajectories
from qkscope.lenses.rotation.planes import FILE as PLANES_CSV
from qkscope.lenses.rotation.planes import TABLE as PLANES
from qkscope.lenses.rotation.planes import chosen_heads
from qkscope.lenses.rotation.table import FILE, TABLE

LENS = Lens(
    name="rotation",
    title="Drift and separation",
    question="Along which axis do queries and keys drift, and how much does the drift add "
             "to scores?",
    tables=(TABLE, PLANES),
    figures=(
        Figure(
            "drift_plane",
            title="Queries and Keys in the Drift Plane",
            models=lambda at: list(chosen_heads(at)["model"].unique()),
            chart=Drawing(
                "qkscope.report.drawings.heads:draw_drift_plane",
                ("r_q_a_abs", "r_k_a_abs", "separation_strength", "bias_effect"),
            ),
            caption="Queries (blue) and keys (red) of a few heads along the axis of their drift with position (a) and "
            "the axis that separates them (b). One ellipse per position bucket (1 SD), darker with position.",
            needs=(FILE, PLANES_CSV),
            number=9,
        ),
        Figure(
            "drift",
            title="Drift With Position",
            chart=Trajectories(
                (
                    Panel(("r_q_a_abs", "r_k_a_abs"), "Correlation with position along the drift axis"),
                    Panel(("bias_effect",), "Positional bias of scores"),
                    Panel(("separation_strength",), "Separation of queries and keys"),
                )
            ),
            caption="Correlation of queries and keys with position along the common drift axis, what their drift "
            "adds to scores over the window, and how far queries and keys are separated.",
        ),
    ),
    views=(
        View("curve", "Correlation with position along a, and along the drift of queries or "
             "keys alone",
             ("r_q_a", "r_k_a", "r_q_own", "r_k_own"), "Means over heads.", figure="drift"),
        View("curve", "Positional part of scores over the window", ("bias_window", "bias_strength_window"),
             "Raw scores, means over heads: in all directions, and along a only.", figure="drift"),
        View("curve", "Positional part in standard deviations of scores", ("bias_effect",), figure="drift"),
        View("bars", "Share of variance along a and b, and of differences along b",
             ("var_frac_a", "var_frac_b", "separation_strength")),
        View("scatter", "Separation against bias, a dot per head", ("separation_strength", "bias_strength"),
             figure="drift"),
        View("heatmap", "Bias over the window of every head, in standard deviations", ("bias_effect",)),
        View("heatmap", "Correlation of every head's keys with position along a", ("r_k_a",)),
    ),
)  # fmt: skip
