"""The figures of a study: which there are, when each can be drawn, where its files go.

`write_figures` draws all that the tables allow into `figures/<nn>_<name>/`. Figures 1, 2, 3 and 6 are also
drawn at the common window where there is one (`..._matched`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.lenses.concordance import figure as signs
from qkscope.lenses.depth import figure as heatmaps
from qkscope.lenses.layer_kinds import figure as layer_kinds
from qkscope.lenses.position import figure as curves
from qkscope.lenses.position import portraits
from qkscope.lenses.summaries import MATCHED_SUFFIX, SummaryTables
from qkscope.lenses.taxonomy import figure as stacks
from qkscope.lenses.windows import figure as windows
from qkscope.results.folder import figure_folder
from qkscope.results.read import Study
from qkscope.results.remove import remove_figure

RETIRED = ("08_rope_vs_nope",)  # folders of earlier versions; our files in them are taken away

Draw = Callable[[Study, SummaryTables, bool], Figure | None]


@dataclass(frozen=True)
class FigureSpec:
    """One figure of the catalogue; `draw` returns None where the tables do not carry it."""

    number: int
    name: str
    draw: Draw
    at_common_window: bool = False

    def folder(self, matched: bool = False) -> str:
        """`01_position_signal`, or `01_position_signal_matched` at the common window."""
        return f"{self.number:02d}_{self.name}{MATCHED_SUFFIX if matched else ''}"


@dataclass(frozen=True)
class DrawnFigure:
    """A figure that was written: which, at which windows, into which folder."""

    spec: FigureSpec
    matched: bool
    folder: Path

    @property
    def files(self) -> list[Path]:
        """The two pictures."""
        return [self.folder / "figure.png", self.folder / "figure.svg"]


def _of_reading(draw: Callable[..., Figure]) -> Draw:
    def draw_reading(study: Study, tables: SummaryTables, matched: bool) -> Figure | None:
        reading = tables.matched if matched else tables.own
        if reading is None:
            return None
        return draw(study.only(list(reading.trajectory["model"])), reading, matched)

    return draw_reading


def _layer_kinds(study: Study, tables: SummaryTables, _matched: bool) -> Figure | None:
    if tables.layer_kinds is None:
        return None
    note = style.window_note(list(tables.own.trajectory["window"]), False, study.noun)
    if not study.one_run:  # a gap in a run says something; an empty place among models does not
        study = study.only(list(tables.layer_kinds["model"]))
    return layer_kinds.draw_layer_kinds(study, tables.layer_kinds, note)


def _window_dependence(study: Study, tables: SummaryTables, _matched: bool) -> Figure | None:
    if tables.window_dependence is None:
        return None
    own_window = dict(zip(tables.own.trajectory["model"], tables.own.trajectory["window"], strict=True))
    return windows.draw_window_dependence(study, tables.window_dependence, own_window)


CATALOGUE = (
    FigureSpec(1, "position_signal", _of_reading(curves.draw_position_signal), at_common_window=True),
    FigureSpec(2, "taxonomy_evolution", _of_reading(stacks.draw_taxonomy_evolution), at_common_window=True),
    FigureSpec(3, "explained_variance", _of_reading(curves.draw_explained_variance), at_common_window=True),
    FigureSpec(4, "layer_heatmap_rq", _of_reading(heatmaps.draw_heatmap_rq)),
    FigureSpec(5, "layer_heatmap_rk", _of_reading(heatmaps.draw_heatmap_rk)),
    FigureSpec(6, "rq_rk_scatter_grid", _of_reading(portraits.draw_rq_rk_scatter_grid), at_common_window=True),
    FigureSpec(7, "concordance", _of_reading(signs.draw_concordance)),
    FigureSpec(8, "layer_kinds", _layer_kinds),
    FigureSpec(9, "window_dependence", _window_dependence),
)


def draw_figure(spec: FigureSpec, study: Study, tables: SummaryTables, matched: bool = False) -> Figure | None:
    """One figure, not yet written; None where the tables do not carry it."""
    with matplotlib.rc_context(style.RC):
        return spec.draw(study, tables, matched)


def write_figure(
    spec: FigureSpec, study: Study, tables: SummaryTables, results_folder: Path, matched: bool = False
) -> DrawnFigure | None:
    """Draw one figure into its folder under `figures/`; None where the tables do not carry it."""
    figure = draw_figure(spec, study, tables, matched)
    if figure is None:
        return None
    folder = figure_folder(results_folder, spec.folder(matched))
    style.save(figure, folder)
    return DrawnFigure(spec, matched, folder)


def write_figures(study: Study, tables: SummaryTables, results_folder: Path) -> list[DrawnFigure]:
    """Draw every figure that the tables allow; files of an earlier run that no longer apply are removed."""
    drawn = []
    for spec in CATALOGUE:
        for matched in (False, True) if spec.at_common_window else (False,):
            written = write_figure(spec, study, tables, results_folder, matched)
            if written is not None:
                drawn.append(written)
            else:
                remove_figure(results_folder, spec.folder(matched))
    for folder in RETIRED:
        remove_figure(results_folder, folder)
    return drawn
