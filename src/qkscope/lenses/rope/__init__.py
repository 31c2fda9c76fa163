"""The rotated-mean prediction of every head, what it leaves, and which causes changed it."""

from qkscope.lenses.base import Detail, Figure, Lens, OwnView, View
from qkscope.lenses.charts import Drawing, HeadScatter
from qkscope.lenses.rope import kernel, table
from qkscope.lenses.rope.split import FILE as SPLIT_FILE
from qkscope.lenses.rope.split import SPLITS
from qkscope.lenses.rope.steps import attribution, cause_takeaways, waterfall

LENS = Lens(
    name="rope",
    title="Rotated-mean prediction",
    question="How much of a head's position signal follows from its rotated mean query and key?",
    tables=(table.TABLE, kernel.PLANES, kernel.TABLE),
    of_study=(SPLITS,),
    figures=(
        Figure(
            "rotated_mean",
            title="Measured r and the Rotated-Mean Prediction",
            chart=HeadScatter("r_q_rope", "r_q", diagonal=True, second=("r_k_rope", "r_k")),
            caption="Measured r_q (top) and r_k (bottom) of every head against the "
             "rotated-mean prediction: the r that follows from the head's average query and key (and "
             "their covariance) before rotation. Those averages are learned.",
            measures=("r_q", "r_q_rope", "r_q_excess", "r_k", "r_k_rope", "r_k_excess"),
            needs=(table.FILE,),
            number=6,
        ),
        Figure(
            "causes",
            title="Causes of Change",
            chart=Drawing("qkscope.report.drawings.causes:draw_causes", ("r_q", "r_k")),
            caption="Changes of mean r_q and r_k at equal context length, attributed to context length, RoPE base, and "
            "weights. Unexplained: what the rotated-mean prediction leaves.",
            needs=(SPLIT_FILE,),
            number=7,
            takeaways=cause_takeaways,
        ),
        Figure(
            "kernel",
            title="Which Distances Do Heads Prefer?",
            models=lambda at: [head.model for head in kernel.chosen_heads(at)],
            chart=Drawing("qkscope.report.drawings.heads:draw_kernel", ("r_q_rope", "r_k_rope")),
            caption="Mean score by distance between query and key that the rotated mean query and key give (curve), as "
            "measured (dots), and the rotation planes that carry it.",
            needs=(kernel.FILE, kernel.PLANES_FILE),
        ),
    ),
    views=(
        View("curve", "Rotated-mean prediction, by {noun}", ("r_q_rope", "r_k_rope"), "Means over heads.",
             figure="rotated_mean"),
        View("curve", "Excess: measured minus predicted", ("r_q_excess", "r_k_excess"), "Means over heads."),
        View("scatter", "Excess of r_q by predicted r_q", ("r_q_rope", "r_q_excess"), "0: as predicted.",
             figure="rotated_mean"),
        View("scatter", "Excess of r_k by predicted r_k", ("r_k_rope", "r_k_excess"), "0: as predicted."),
        View("heatmap", "Excess of r_q, every head", ("r_q_excess",)),
        View("heatmap", "Excess of r_k, every head", ("r_k_excess",)),
    ),
    details=(
        Detail("kernel", kernel.TABLE, ("distance",), ("kernel", "kernel_se", "measured", "measured_se")),
        Detail("planes", kernel.PLANES, ("plane",), ("amplitude", "phase"), of_layer=("wavelength",)),
    ),
    own_views=(OwnView("split", waterfall),),
    attribution=attribution,
)  # fmt: skip
