"""What scores are made of: position, a fixed preference among keys, and what depends on the query."""

from qkscope.lenses.base import Detail, Figure, Lens, View, error_name
from qkscope.lenses.charts import Drawing, Shares
from qkscope.lenses.score.table import (
    ADVANTAGE,
    MAP,
    MAP_FILE,
    POSITION,
    SHARES,
    TABLE,
    TO_CELLS,
    maps_of,
    several_rows,
)

LENS = Lens(
    name="score",
    title="Components of scores",
    question="What determines a score: key position, key content, or the query?",
    tables=(TABLE, MAP),
    figures=(
        Figure(
            "score_components",
            title="Components of Attention Scores",
            chart=Shares(SHARES, below=(ADVANTAGE,)),
            caption="Share of the variance of attention scores by component: key position, query and key position "
            "together, key content, and query. Below: by how many standard deviations later keys score higher.",
            measures=(*SHARES, ADVANTAGE),
            number=8,
        ),
        Figure(
            "score_depth",
            title="Components of Attention Scores by Depth",
            chart=Shares(SHARES, over="depth"),
            caption="The same shares by layer, or by tenth of depth.",
            measures=SHARES,
        ),
        Figure(
            "score_map",
            title="Mean Scores by Position",
            models=lambda at: [each.model for each in maps_of(at)[:2]],
            chart=Drawing("qkscope.report.drawings.heads:draw_score_map", (POSITION, ADVANTAGE)),
            caption="Mean score of two heads by query position (up) and key position (across), from each row's mean, "
            "in standard deviations of scores.",
            needs=(MAP_FILE,),
            worthwhile=several_rows,
        ),
    ),
    views=(
        View("bars", "Components of scores", SHARES, "Means over heads.", figure="score_components"),
        View("curve", "Score advantage of later keys (SD)", (ADVANTAGE,),
             "Means over heads; below 0, earlier keys score higher.", figure="score_components"),
        View("heatmap", "Positional share of every head's scores", (POSITION,)),
        View("heatmap", "Score advantage of later keys (SD), every head", (ADVANTAGE,)),
        View("scatter", "Positional share by advantage of later keys", (POSITION, ADVANTAGE)),
    ),
    details=(Detail("map", MAP, ("start", "end"), (*TO_CELLS, *map(error_name, TO_CELLS))),),
)  # fmt: skip
