"""The report of a results folder: tables, figures with a card next to each, claims, and the interactive page."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from qkscope.files import replacing, require_writable, write_text
from qkscope.lenses.long_tables import changes_pieces, head_changes, means_pieces
from qkscope.lenses.views import Results, build_tables, write_tables
from qkscope.page.write import PageCard, write_page
from qkscope.report.cards import drawable, figure_card
from qkscope.report.claims import claims_page
from qkscope.report.summary import summarize
from qkscope.results.csv_files import write_csv_pieces
from qkscope.results.folder import CHANGES_CSV, CLAIMS_MD, HEAD_CHANGES_PARQUET, MEANS_CSV, results_file, table_path
from qkscope.results.read import load_results
from qkscope.results.remove import remove_table, remove_unfinished
from qkscope.words.blocks import to_markdown


def write_report(
    results_folder: Path | str, *, figures: bool = True, page: bool = True, out: Path | None = None
) -> list[Path]:
    """Write `tables/*.csv`, `figures/<folder>/` (picture, vector picture, card), `claims.md` and `report.html`.

    Returns what was written. `out` is another folder to write to, where the results are to stay as they are. Raises
    TableError when the folder has no usable `qk.csv`. Running it again gives the same files.
    """
    return write_report_of(build_tables(load_results(Path(results_folder))), figures=figures, page=page, out=out)


def write_report_of(tables: Results, *, figures: bool = True, page: bool = True, out: Path | None = None) -> list[Path]:
    """The same of results that were read already."""
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
    if page:
        written.append(write_page(tables, summarize(tables).to_page(), page_cards(tables), out))
    return written


def write_long_tables(results: Results, folder: Path) -> list[Path]:
    """Write `means.csv`, `changes.csv` and `head_changes.parquet`, as far as there is any; remove the others."""
    written = []
    pieces: dict[str, Sequence[Callable[[], pd.DataFrame]]] = {
        MEANS_CSV: means_pieces(results),
        CHANGES_CSV: changes_pieces(results),
    }
    for name, of_table in pieces.items():
        if of_table:
            write_csv_pieces(of_table, table_path(folder, name))
            written.append(table_path(folder, name))
        else:
            remove_table(folder, name)
    changes, path = list(head_changes(results)), table_path(folder, HEAD_CHANGES_PARQUET)
    if not changes:
        remove_table(folder, HEAD_CHANGES_PARQUET)
        return written
    with replacing(path) as temporary, temporary.open("wb") as file:
        pd.concat(changes, ignore_index=True).to_parquet(file, index=False, compression="zstd")
    return [*written, path]


def page_cards(tables: Results) -> list[PageCard]:
    """The cards of all figures that the study carries."""
    return [PageCard(figure.name, figure_card(figure, tables)) for figure in drawable(tables)]
