"""What scores are made of: position, a fixed preference among keys, and what depends on the query."""

from qkscope.lenses.base import Detail, Figure, Lens, Summary, View, error_name, later
from qkscope.lenses.score import card, heads_card
from qkscope.lenses.score.map_choice import several_rows
from qkscope.lenses.score.map_table import FILE as MAP_FILE
from qkscope.lenses.score.map_table import TABLE as MAP
from qkscope.lenses.score.map_table import TO_CELLS
from qkscope.lenses.score.summaries import BY_DEPTH, BY_KIND, score_depth, score_shares
from qkscope.lenses.score.table import ADVANTAGE, FILE, POSITION, SHARES, TABLE

LENS = Lens(
    name="score",
    title="What scores are made of",
    question="What decides a score: where a key is, what it is, or who asks?",
    tables=(TABLE, MAP),
    summaries=(Summary(BY_KIND, score_shares), Summary(BY_DEPTH, score_depth)),
    figures=(
        Figure(
            "score_split",
            later("qkscope.lenses.score.figure:draw_score_split"),
            card.score_split,
            needs=(FILE, BY_KIND),
            at_common_window=True,
            leads=1,
        ),
        Figure(
            "score_depth",
            later("qkscope.lenses.score.figure:draw_score_depth"),
            card.score_depth,
            needs=(FILE, BY_KIND, BY_DEPTH),
            at_common_window=True,
        ),
        Figure(
            "score_heads",
            later("qkscope.lenses.score.heads_figure:draw_score_heads"),
            heads_card.score_heads,
            needs=(FILE, BY_KIND),
            at_common_window=True,
        ),
        Figure(
            "score_map",
            later("qkscope.lenses.score.map_figure:draw_score_map"),
            heads_card.score_map,
            needs=(FILE, BY_KIND, MAP_FILE),
            at_common_window=True,
            worthwhile=several_rows,
        ),
    ),
    views=(
        View("bars", "What scores are made of", SHARES, "Means over heads.", figure="score_split"),
        View(
            "curve",
            "By how many standard deviations late keys win",
            (ADVANTAGE,),
            "Means over heads; below 0 early keys win.",
            figure="score_split",
        ),
        View("heatmap", "Share of every head's scores that is position", (POSITION,), figure="score_heads"),
        View("heatmap", "By how many standard deviations late keys win, in every head", (ADVANTAGE,)),
        View("scatter", "Position against which keys win", (POSITION, ADVANTAGE)),
    ),
    details=(Detail("map", MAP, ("start", "end"), (*TO_CELLS, *map(error_name, TO_CELLS))),),
)
