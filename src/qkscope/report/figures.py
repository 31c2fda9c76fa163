"""Draw what a study carries into `figures/<nn>_<name>/`, each figure with its card beside it."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure as Drawing

from qkscope.draw import style
from qkscope.files import write_text
from qkscope.lenses.at_window import AtWindow, StudyTables
from qkscope.lenses.catalogue import Numbered, catalogue, drawable
from qkscope.processes import over_cores
from qkscope.results.folder import CARD, FIGURE_FILES, figure_folder
from qkscope.results.mapped import let_go
from qkscope.results.remove import remove_figure
from qkscope.words.blocks import to_markdown

RETIRED = ("08_rope_vs_nope",)  # folders of earlier versions; our files in them are taken away
WORTH_SHARING = 12  # figures; fewer are drawn before another process has started


def draw(entry: Numbered, at: AtWindow) -> Drawing:
    """One figure, not yet written."""
    with matplotlib.rc_context(style.RC):
        return entry.figure.draw(at)


def write_figure(entry: Numbered, tables: StudyTables, at: AtWindow, folder: Path) -> list[Path]:
    """Draw one figure into its folder, with its card; returns what was written."""
    place = figure_folder(folder, entry.folder(at.common))
    style.save(draw(entry, at), place)
    write_text(place / CARD, to_markdown(entry.card(tables, at)))
    let_go()
    return [place / name for name in FIGURE_FILES]


def write_figures(tables: StudyTables, folder: Path) -> list[Path]:
    """Draw every figure that the study carries; files of an earlier run that no longer apply are removed."""
    wanted = list(drawable(tables))
    for entry, at in wanted:
        entry.card(tables, at)  # here, so that all summaries are built once, and the page finds the cards
        let_go()
    drawing = over_cores(lambda one: write_figure(one[0], tables, one[1], folder), wanted, WORTH_SHARING)
    written = [path for paths in drawing for path in paths]
    drawn = {entry.folder(at.common) for entry, at in wanted}
    possible = {entry.folder(common) for entry in catalogue() for common in (False, True)}
    for name in sorted((possible | set(RETIRED)) - drawn):
        remove_figure(folder, name)
    return written
