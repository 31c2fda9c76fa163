"""The report of a results folder: tables, figures, and a card beside each figure."""

from pathlib import Path

from qkscope.analysis.results import load_results
from qkscope.analysis.summary_tables import build_tables, write_tables
from qkscope.files import write_text
from qkscope.report.cards.build import card_writer

CARD = "README.md"


def write_report(results_folder: Path | str) -> list[Path]:
    """Write `tables/*.csv` and `figures/<nn>_<name>/` (picture, vector picture, card); returns what was written.

    Raises TableError when the folder has no usable `qk.csv`. Running it again gives the same files.
    """
    from qkscope.figures.draw import write_figures  # matplotlib, only when something is drawn

    folder = Path(results_folder)
    results = load_results(folder)
    tables = build_tables(results)
    written = write_tables(tables, folder)
    cards = card_writer(results, tables)
    for drawn in write_figures(results.study, tables, folder):
        card = drawn.folder / CARD
        write_text(card, cards.text(drawn.spec.name, drawn.matched))
        written += [*drawn.files, card]
    return written


def write_card_and_figure(results_folder: Path | str, name: str) -> Path:
    """Write one figure of the catalogue, each checkpoint at its own context, with its card; returns its folder.

    Raises KeyError for a name that is not in the catalogue, ValueError where the tables do not carry the figure.
    """
    from qkscope.figures.draw import CATALOGUE, write_figure

    folder = Path(results_folder)
    results = load_results(folder)
    tables = build_tables(results)
    spec = {entry.name: entry for entry in CATALOGUE}[name]
    drawn = write_figure(spec, results.study, tables, folder)
    if drawn is None:
        raise ValueError(f"the tables of {folder} do not carry the figure {name}")
    text = card_writer(results, tables).text(name)
    write_text(drawn.folder / CARD, text)
    return drawn.folder
