"""Which card belongs to which figure, and what it is given."""

from collections.abc import Callable
from dataclasses import dataclass

from qkscope.lenses.concordance import card as concordance
from qkscope.lenses.depth import card as depth
from qkscope.lenses.layer_kinds import card as layer_kinds
from qkscope.lenses.position import card as curves
from qkscope.lenses.position import portraits_card as portraits
from qkscope.lenses.summaries import SummaryTables
from qkscope.lenses.taxonomy import card as taxonomy
from qkscope.lenses.windows import card as windows
from qkscope.results.read import Results
from qkscope.stats.noise import HeadPanel
from qkscope.words.card import Card, CardInput, render

WRITERS: dict[str, Callable[[CardInput], Card]] = {
    "position_signal": curves.position_signal,
    "taxonomy_evolution": taxonomy.taxonomy_evolution,
    "explained_variance": curves.explained_variance,
    "layer_heatmap_rq": depth.layer_heatmap_rq,
    "layer_heatmap_rk": depth.layer_heatmap_rk,
    "rq_rk_scatter_grid": portraits.rq_rk_scatter_grid,
    "concordance": concordance.concordance,
    "layer_kinds": layer_kinds.layer_kinds,
    "window_dependence": windows.window_dependence,
}


@dataclass(frozen=True)
class CardWriter:
    """Writes cards of one study; the per-head panels are built once."""

    results: Results
    tables: SummaryTables
    own: HeadPanel
    matched: HeadPanel | None

    def given(self, matched: bool = False) -> CardInput:
        """The input of a card at one choice of windows."""
        reading = self.tables.matched if matched else self.tables.own
        panel = self.matched if matched else self.own
        if reading is None or panel is None:
            raise ValueError("these results have no reading at a common window")
        study = self.results.study.only(list(reading.trajectory["model"]))
        return CardInput(self.results, self.tables, study, reading, panel, self.own, self.matched, matched)

    def text(self, name: str, matched: bool = False) -> str:
        """The card of the figure with this name, as Markdown."""
        given = self.given(matched)
        return render(WRITERS[name](given), given)


def card_writer(results: Results, tables: SummaryTables) -> CardWriter:
    """Prepare the cards of a study."""
    same_heads = results.study.one_run
    matched = None if results.matched is None else HeadPanel(results.matched, same_heads)
    return CardWriter(results, tables, HeadPanel(results.heads, same_heads), matched)
