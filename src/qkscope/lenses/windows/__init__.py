"""What the window alone does to the same weights."""

from qkscope.lenses.base import Figure, Lens, Summary, later
from qkscope.lenses.windows import card
from qkscope.lenses.windows.table import SURE, window_dependence_at

LENS = Lens(
    name="windows",
    title="Windows",
    question="How much of it is the window?",
    summaries=(Summary("window_dependence", window_dependence_at, at_common_window=False, over_windows=SURE),),
    figures=(
        Figure(
            "window_dependence",
            later("qkscope.lenses.windows.figure:draw_window_dependence"),
            card.window_dependence,
            needs=("window_dependence",),
            number=9,
            leads=1,
        ),
    ),
)
