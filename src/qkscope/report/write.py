"""The report of a results folder: tables, figures with a card next to each, claims, and the interactive page."""

from collections.abc import Callable
from pathlib import Path

from qkscope.files import require_writable, write_text
from qkscope.lenses.views import Results, build_tables, write_tables
from qkscope.page.write import PageCard, write_page
from qkscope.report.cards import figure_card
from qkscope.report.catalogue import catalogue, drawable
from qkscope.report.claims import claims_page
from qkscope.report.summary import summarize
from qkscope.report.tables import write_long_tables
from qkscope.results.folder import CLAIMS_MD, results_file
from qkscope.results.read import load_results
from qkscope.results.remove import remove_unfinished
from qkscope.words.blocks import to_markdown


def write_report(
    results_folder: Path | str,
    *,
    figures: bool = True,
    page: bool = True,
    out: Path | None = None,
    show_summary: Callable[[str], None] | None = None,
) -> list[Path]:
    """Write `tables/*.csv`, `figures/<folder>/` (picture, vector picture, card), `claims.md` and `report.html`.

    Returns what was written. `out` is another folder to write to, where the results are to stay as they are;
    `show_summary` is called with the summary. Raises TableError when the folder has no usable `qk.csv`. Running it
    again gives the same files.
    """
    tables = build_tables(load_results(Path(results_folder)))
    place = out or tables.files.writable_folder
    require_writable(place)
    remove_unfinished(place)  # of reports that were killed
    written = [*write_long_tables(tables, place), *write_tables(tables, place)]
    claims = claims_page(tables)
    if claims:
        path = results_file(place, CLAIMS_MD)
        write_text(path, to_markdown(claims))
        written.append(path)
    if figures:
        from qkscope.report.figures import write_figures  # matplotlib, only when something is drawn

        written += write_figures(tables, place)
    if page or show_summary:
        summary = summarize(tables)
        if page:
            written.append(write_page(tables, summary.to_page(), page_cards(tables), out))
        if show_summary:
            show_summary(str(summary))
    return written


def page_cards(tables: Results) -> list[PageCard]:
    """The cards of all figures that the study carries."""
    return [PageCard(figure.name, figure_card(figure, tables)) for figure in drawable(tables)]


def write_card_and_figure(results_folder: Path | str, name: str) -> Path:
    """Write one figure of the catalogue with its card; returns its folder.

    Raises KeyError for a name that is not in the catalogue, ValueError where the tables do not carry the figure.
    """
    from qkscope.report.figures import write_figure

    folder = Path(results_folder)
    tables = build_tables(load_results(folder))
    figure = {each.name: each for each in catalogue()}[name]
    if not figure.exists(tables.own):
        raise ValueError(f"{folder} does not have the tables for the figure {name}")
    return write_figure(figure, tables, folder)[0].parent
