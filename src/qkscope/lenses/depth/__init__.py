"""Where in depth the position signal sits: means by layer, or by tenths of depth."""

from qkscope.kinds import MODELS
from qkscope.lenses.base import Figure, Lens, Summary, later
from qkscope.lenses.depth.card import layer_heatmap_rk, layer_heatmap_rq
from qkscope.lenses.depth.table import depth_rk, depth_rq
from qkscope.lenses.views import WindowView


def over_models(at: WindowView) -> bool:
    """Whether a heatmap is drawn: at own contexts always, at the common window of models, which differ in theirs."""
    return not at.common or at.study.kind == MODELS


LENS = Lens(
    name="depth",
    title="Depth",
    question="In which layers is the position signal?",
    summaries=(Summary("depth_rq", depth_rq), Summary("depth_rk", depth_rk)),
    figures=(
        Figure(
            "layer_heatmap_rq",
            later("qkscope.lenses.depth.figure:draw_heatmap_rq"),
            layer_heatmap_rq,
            needs=("trajectory", "depth_rq"),
            at_common_window=True,
            worthwhile=over_models,
            number=4,
        ),
        Figure(
            "layer_heatmap_rk",
            later("qkscope.lenses.depth.figure:draw_heatmap_rk"),
            layer_heatmap_rk,
            needs=("trajectory", "depth_rk", "concordance"),
            at_common_window=True,
            worthwhile=over_models,
            number=5,
        ),
    ),
)
