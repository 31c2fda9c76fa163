"""Several runs, or seeds, of one training: how their heads are distributed at each step, side by side."""

from qkscope.lenses.base import Figure, Lens, Summary, later
from qkscope.lenses.runs.card import runs_card
from qkscope.lenses.runs.table import ACROSS, NAME, across_at, runs_at

LENS = Lens(
    name="runs",
    title="Runs",
    question="Do several runs of one training come to the same distribution of heads?",
    summaries=(Summary(NAME, runs_at), Summary(ACROSS, across_at)),
    figures=(Figure("runs", later("qkscope.lenses.runs.figure:draw_runs"), runs_card, needs=(NAME, ACROSS)),),
)
