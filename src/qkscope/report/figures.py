"""Draw what a study carries into `figures/<nn>_<name>/`, each figure with its card beside it."""

from collections.abc import Collection
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure as Drawing

from qkscope.draw import style
from qkscope.files import write_text
from qkscope.lenses.views import COMMON_SUFFIX, Results, WindowView
from qkscope.processes import over_cores
from qkscope.report.catalogue import Numbered, catalogue, drawable
from qkscope.report.charts import draw_chart
from qkscope.results.folder import CARD, FIGURE, FIGURE_FILES, entries, figure_folder, figures_folder
from qkscope.results.mapped import let_go
from qkscope.results.remove import remove_figure
from qkscope.words.blocks import to_markdown

RETIRED = ("rope_vs_nope",)  # figures of earlier versions, whose files are removed
WORTH_SHARING = 12  # figures; fewer are drawn before another process has started


def draw(entry: Numbered, tables: Results, at: WindowView) -> Drawing:
    """One figure, not yet written."""
    if entry.figure.draw is None:
        return draw_chart(entry.figure, tables)
    with matplotlib.rc_context(style.RC):
        return entry.figure.draw(at)


def write_figure(entry: Numbered, tables: Results, at: WindowView, folder: Path) -> list[Path]:
    """Draw one figure into its folder, with its card; returns what was written."""
    place = figure_folder(folder, entry.folder(at.common))
    style.save(draw(entry, tables, at), place)
    write_text(place / CARD, to_markdown(entry.card(tables, at)))
    let_go()
    return [place / name for name in FIGURE_FILES]


def write_figures(tables: Results, folder: Path) -> list[Path]:
    """Draw every figure that the study carries; files of an earlier run that no longer apply are removed."""
    wanted = list(drawable(tables))
    for entry, at in wanted:
        entry.card(tables, at)  # here, so that all summaries are built once, and the page finds the cards
        let_go()
    drawing = over_cores(lambda one: write_figure(one[0], tables, one[1], folder), wanted, WORTH_SHARING)
    written = [path for paths in drawing for path in paths]
    remove_stale_figures(folder, {entry.folder(at.common) for entry, at in wanted})
    return written


def remove_stale_figures(folder: Path, drawn: Collection[str]) -> None:
    """Remove figures of an earlier report that were not drawn now, under whatever number: a new lens renumbers them."""
    names = {*(entry.name for entry in catalogue()), *RETIRED}
    for entry in entries(figures_folder(folder)):
        known = FIGURE.fullmatch(entry.name) and entry.name[3:].removesuffix(COMMON_SUFFIX) in names
        if known and entry.name not in drawn:
            remove_figure(folder, entry.name)
