"""Draw what a study carries into `figures/<folder>/`, each figure next to its card, with a gallery of all."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from qkscope.draw import style
from qkscope.files import write_text
from qkscope.lenses.base import Figure
from qkscope.lenses.views import Results
from qkscope.processes import over_cores
from qkscope.report.cards import figure_card
from qkscope.report.catalogue import drawable, folder_name
from qkscope.report.charts import draw_chart
from qkscope.report.charts.layout import hide_titles
from qkscope.report.gallery import gallery
from qkscope.report.published import PUBLISHED, published_folder
from qkscope.results.folder import CARD, FIGURE, FIGURE_FILES, FIGURES, entries, gallery_path, output_folder, subfolder
from qkscope.results.mapped import drop_page_cache
from qkscope.results.remove import remove_figure
from qkscope.words.blocks import to_markdown

WORTH_SHARING = 12  # figures; fewer are drawn before another process has started


def write_figure(
    figure: Figure, tables: Results, folder: Path, *, name: str | None = None, titles: bool = True
) -> list[Path]:
    """Draw one figure, with its card, into the folder `figures/<name>`; returns what was written."""
    place = output_folder(folder, FIGURES, name or folder_name(figure))
    picture = draw_chart(figure, tables)
    style.save(picture if titles else hide_titles(picture), place)
    write_text(place / CARD, to_markdown(figure_card(figure, tables)))
    drop_page_cache()
    return [place / each for each in FIGURE_FILES]


def write_figures(tables: Results, folder: Path, *, titles: bool = True) -> list[Path]:
    """Draw every figure that the study carries, and the published ones.

    Figures of an earlier report that no longer apply are removed.
    """
    shown = drawable(tables)
    named = {folder_name(figure): figure for figure in shown}
    named |= {published_folder(figure): figure for figure in PUBLISHED.values()}
    for figure in named.values():
        figure_card(figure, tables)  # here, so that what cards need is computed once, not in every process

    def write(item: tuple[str, Figure]) -> list[Path]:
        return write_figure(item[1], tables, folder, name=item[0], titles=titles)

    written = [path for paths in over_cores(write, list(named.items()), WORTH_SHARING) for path in paths]
    remove_stale_figures(folder, set(named))
    write_text(gallery_path(folder), to_markdown(gallery(shown, tables)))
    return [*written, gallery_path(folder)]


def remove_stale_figures(folder: Path, drawn: Collection[str]) -> None:
    """Remove our files of figures that were not drawn now, under whatever name an earlier version gave them."""
    for entry in entries(subfolder(folder, FIGURES)):
        if FIGURE.fullmatch(entry.name) and entry.name not in drawn:
            remove_figure(folder, entry.name)
