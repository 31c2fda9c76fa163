"""Does it matter? What the model loses when position is taken away from a head."""

from qkscope.lenses.ablation.strength import NAME, strengths_at
from qkscope.lenses.ablation.table import BEGINS, FILE, GROUPS_FILE, SPREAD, TABLE, WRITTEN, begins_at
from qkscope.lenses.base import Figure, IntervalView, Lens, Summary, View
from qkscope.lenses.charts import Drawing

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
        Figure(
            "loss",
            title="Loss Without Positional Information",
            chart=Drawing("qkscope.report.drawings.causes:draw_loss", ("loss_kernel", "loss_zero")),
            caption="Loss increase after removing a head's average distance preference, one head at a time, against "
            "|r_q|. "
            "The three costliest heads are named.",
            needs=(FILE, NAME),
            number=10,
        ),
    ),
    views=(
        View(
            "heatmap",
            "Loss without each head's positional kernel",
            ("loss_kernel",),
            "Rise of the mean loss when the head's mean score at each distance is taken away.",
            figure="loss",
        ),
        View("heatmap", "Loss without each head", ("loss_zero",), "Rise of the mean loss if the head puts out zeros."),
        View(
            "scatter",
            "Loss against the spread of the kernel",
            (SPREAD, "loss_kernel"),
            "A dot per head: what the edit takes away, and what that costs.",
            figure="loss",
        ),
        View(
            "curve",
            "Mean loss of edits over training",
            ("loss_kernel", "loss_zero"),
            "Means over heads that were edited alone, at the entries where that was done.",
            figure="loss",
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
            figure="loss",
        ),
    ),
)
