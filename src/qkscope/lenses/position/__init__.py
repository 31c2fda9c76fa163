"""How closely the leading component of a head's queries and keys follows position: the published statistic."""

from qkscope.lenses.base import Figure, Lens, Summary, later
from qkscope.lenses.position.card import explained_variance, position_signal
from qkscope.lenses.position.kinds_words import signal_by_kind
from qkscope.lenses.position.portraits_card import rq_rk_scatter_grid
from qkscope.lenses.position.summaries import MEASURES, portraits_at, trajectory_at, with_measures
from qkscope.lenses.position.table import COMMON, LEADING, OWN

DRAW = "qkscope.lenses.position"

LENS = Lens(
    name="position",
    title="Position signal",
    question="Which heads follow position, in their queries and in their keys?",
    tables=(OWN, COMMON, LEADING),
    from_vectors=(OWN,),
    derive=with_measures,
    summaries=(
        Summary("trajectory", trajectory_at, means=MEASURES),
        Summary("portraits", portraits_at),
    ),
    figures=(
        Figure(
            "position_signal",
            later(f"{DRAW}.figure:draw_position_signal"),
            position_signal,
            needs=("trajectory", "concordance"),
            at_common_window=True,
            number=1,
            leads=2,  # queries and keys are two sentences of one statement
        ),
        Figure(
            "explained_variance",
            later(f"{DRAW}.figure:draw_explained_variance"),
            explained_variance,
            needs=("trajectory",),
            at_common_window=True,
            number=3,
        ),
        Figure(
            "rq_rk_scatter_grid",
            later(f"{DRAW}.portraits:draw_rq_rk_scatter_grid"),
            rq_rk_scatter_grid,
            needs=("trajectory", "portraits", "taxonomy_fractions", "concordance"),
            at_common_window=True,
            number=6,
        ),
        Figure(
            "signal_by_kind",
            later(f"{DRAW}.kinds_figure:draw_signal_by_kind"),
            signal_by_kind,
            needs=("trajectory",),
            number=50,  # clear of those that other lenses count on
        ),
    ),
)
