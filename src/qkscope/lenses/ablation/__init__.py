"""Does it matter? What the model loses when position is taken away from a head."""

from qkscope.lenses.ablation.card import ablation_card
from qkscope.lenses.ablation.table import FILE, NAME, TABLE, strengths_at
from qkscope.lenses.base import Figure, Lens, Summary, View, later

LENS = Lens(
    name="ablation",
    title="Ablation",
    question="Does a head's position matter to the model?",
    tables=(TABLE,),
    summaries=(Summary(NAME, strengths_at, at_common_window=False),),
    figures=(
        Figure("ablation", later("qkscope.lenses.ablation.figure:draw_ablation"), ablation_card, needs=(FILE, NAME)),
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
    ),
)
