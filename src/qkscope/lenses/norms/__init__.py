"""How long queries and keys are, how far scores spread, and how large a score can be."""

from qkscope.lenses.base import Figure, Lens, Summary, View, later
from qkscope.lenses.norms.buckets import TABLE as BUCKETS
from qkscope.lenses.norms.card import norms_card
from qkscope.lenses.norms.summary import NAME, norms_at
from qkscope.lenses.norms.table import FILE, TABLE

LENS = Lens(
    name="norms",
    title="Norms and scores",
    question="Does anything grow that should not: lengths of queries and keys, scores, or too few dimensions?",
    question_across="How long are queries and keys, how large are scores, and how many dimensions do they use?",
    tables=(TABLE, BUCKETS),
    summaries=(Summary(NAME, norms_at),),
    figures=(
        Figure(
            "norms",
            later("qkscope.lenses.norms.figure:draw_norms"),
            norms_card,
            needs=(FILE, NAME),
            at_common_window=True,
        ),
    ),
    views=(
        View("curve", "Length of queries and keys", ("rms_q", "rms_k"), "Root mean square, means over heads.", "norms"),
        View("curve", "Spread of scores as softmax sees it", ("logit_std",), "Means over heads.", "norms"),
        View("curve", "Dimensions in use", ("effective_rank", "participation_ratio"), "Means over heads.", "norms"),
        View("heatmap", "Spread of every head's scores", ("score_std",)),
        View("scatter", "Length of queries against keys, a dot per head", ("rms_q", "rms_k")),
    ),
)
