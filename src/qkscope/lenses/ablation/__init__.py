"""Does it matter? What the model loses when position is taken away from a head."""

from qkscope.lenses.ablation.card import ablation_card, course_card, groups_card
from qkscope.lenses.ablation.strength import NAME, strengths_at
from qkscope.lenses.ablation.summary import BEGINS, begins_at
from qkscope.lenses.ablation.table import COURSE_FILE, FILE, GROUPS_FILE, SPREAD, TABLE, WRITTEN
from qkscope.lenses.base import Figure, IntervalView, Lens, Summary, View, later

PLACE = "qkscope.lenses.ablation.figure"

LENS = Lens(
    name="ablation",
    title="Ablation",
    question="Does a head's position matter to the model?",
    tables=(TABLE,),
    of_study=(WRITTEN,),
    summaries=(
        Summary(NAME, strengths_at, at_common_window=False),
        Summary(BEGINS, begins_at, at_common_window=False),
    ),
    figures=(
        Figure("ablation", later(f"{PLACE}:draw_ablation"), ablation_card, needs=(FILE, NAME)),
        Figure("ablation_groups", later(f"{PLACE}:draw_groups"), groups_card, needs=(GROUPS_FILE,)),
        Figure("ablation_course", later(f"{PLACE}:draw_course"), course_card, needs=(COURSE_FILE, BEGINS)),
    ),
    views=(
        View(
            "heatmap",
            "Loss without each head's positional kernel",
            ("loss_kernel",),
            "Rise of the mean loss when the head's mean score at each distance is taken away.",
            figure="ablation",
        ),
        View("heatmap", "Loss without each head", ("loss_zero",), "Rise of the mean loss if the head puts out zeros."),
        View(
            "scatter",
            "Loss against the spread of the kernel",
            (SPREAD, "loss_kernel"),
            "A dot per head: what the edit takes away, and what that costs.",
            figure="ablation",
        ),
        View(
            "curve",
            "Mean loss of edits over training",
            ("loss_kernel", "loss_zero"),
            "Means over heads that were edited alone, at the entries where that was done.",
            figure="ablation_course",
        ),
    ),
    intervals=(
        IntervalView(
            "Chosen heads against random heads",
            GROUPS_FILE,
            ("group", "edit"),
            "excess",
            "low",
            "high",
            only=(("outcome", "all"),),
            about="Above 0: editing the chosen heads costs more than editing as many other heads of the same layers.",
            figure="ablation_groups",
        ),
    ),
)
