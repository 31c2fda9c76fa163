"""What RoPE alone predicts of every head, what is left, and what window, base and weights did to it."""

from qkscope.lenses.base import Detail, Figure, Lens, OwnView, Summary, View, later
from qkscope.lenses.rope import kernel, planes, table
from qkscope.lenses.rope.card import rope_alone_card, rope_excess_card
from qkscope.lenses.rope.card_kernel import rope_kernel_card
from qkscope.lenses.rope.card_split import rope_split_card
from qkscope.lenses.rope.cause import cause_of_change
from qkscope.lenses.rope.split_table import FILE as SPLIT_FILE
from qkscope.lenses.rope.split_table import SPLITS
from qkscope.lenses.rope.steps import attribution
from qkscope.lenses.rope.summaries import rope_alone_at
from qkscope.lenses.rope.waterfall import waterfall

ROOM = "qkscope.lenses.rope"

LENS = Lens(
    name="rope",
    title="Rotated-mean prediction",
    question="How much of a head's position signal follows from its rotated mean query and key?",
    tables=(table.TABLE, planes.TABLE, kernel.TABLE),
    of_study=(SPLITS,),
    summaries=(Summary("rope_alone", rope_alone_at),),
    figures=(
        Figure(
            "rope_alone",
            later(f"{ROOM}.figure:draw_rope_alone"),
            rope_alone_card,
            needs=(table.FILE, "rope_alone"),
            at_common_window=True,
        ),
        Figure(
            "rope_excess",
            later(f"{ROOM}.figure:draw_rope_excess"),
            rope_excess_card,
            needs=(table.FILE, "rope_alone"),
            at_common_window=True,
        ),
        Figure(
            "rope_split",
            later(f"{ROOM}.figure_split:draw_rope_split"),
            rope_split_card,
            needs=(SPLIT_FILE,),
            at_common_window=True,
            leads=1,
        ),
        Figure(
            "rope_kernel",
            later(f"{ROOM}.figure_kernel:draw_rope_kernel"),
            rope_kernel_card,
            needs=(kernel.FILE, planes.FILE, "rope_alone"),
        ),
    ),
    views=(
        View("curve", "Rotated-mean prediction, by {noun}", ("r_q_rope", "r_k_rope"), "Means over heads.",
             figure="rope_excess"),
        View("curve", "What is measured beyond that", ("r_q_excess", "r_k_excess"), "Means over heads."),
        View("scatter", "Excess of r_q against its prediction", ("r_q_rope", "r_q_excess"), "At 0: as predicted.",
             figure="rope_alone"),
        View("scatter", "Excess of r_k against its prediction", ("r_k_rope", "r_k_excess"), "At 0: as predicted."),
        View("heatmap", "Excess of r_q, every head", ("r_q_excess",)),
        View("heatmap", "Excess of r_k, every head", ("r_k_excess",)),
    ),
    details=(Detail("kernel", kernel.TABLE, ("distance",), ("kernel", "kernel_se", "measured", "measured_se")),),
    own_views=(OwnView("split", waterfall),),
    cause=cause_of_change,
    attribution=attribution,
)  # fmt: skip
