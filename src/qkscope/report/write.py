"""The report of a results folder: tables, figures with a card beside each, and the interactive page."""

from pathlib import Path

from qkscope.files import require_writable, write_text
from qkscope.lenses.cards import WRITERS, CardWriter, card_writer
from qkscope.lenses.summaries import SummaryTables, build_tables, write_tables
from qkscope.page.write import CardText, write_page
from qkscope.report.lead import lead
from qkscope.results.folder import CARD
from qkscope.results.read import Results, load_results
from qkscope.results.remove import remove_unfinished


def write_report(
    results_folder: Path | str, *, figures: bool = True, page: bool = True, out: Path | None = None
) -> list[Path]:
    """Write `tables/*.csv`, `figures/<nn>_<name>/` (picture, vector picture, card) and `report.html`; returns what
    was written. `out` is another folder to write them to, where the results are to stay as they are.

    Raises TableError when the folder has no usable `qk.csv`. Running it again gives the same files.
    """
    folder = Path(results_folder)
    results = load_results(folder)
    place = out or folder
    require_writable(place)
    remove_unfinished(place)  # of reports that were killed
    tables = build_tables(results)
    written = write_tables(tables, place)
    cards = card_writer(results, tables)
    if figures:
        written += _write_figures(place, results, tables, cards)
    if page:
        written.append(write_page(results, lead(cards), page_cards(cards), out))
    return written


def _write_figures(folder: Path, results: Results, tables: SummaryTables, cards: CardWriter) -> list[Path]:
    from qkscope.lenses.figures import write_figures  # matplotlib, only when something is drawn

    written = []
    for drawn in write_figures(results.study, tables, folder):
        card = drawn.folder / CARD
        write_text(card, cards.text(drawn.spec.name, drawn.matched))
        written += [*drawn.files, card]
    return written


def page_cards(cards: CardWriter) -> list[CardText]:
    """The cards of all views of the page, at both choices of windows where there are two."""
    tables = cards.tables
    lacking = {"layer_kinds": tables.layer_kinds is None, "window_dependence": tables.window_dependence is None}
    readings = (False,) if tables.matched is None else (False, True)
    return [
        CardText(name, matched, cards.text(name, matched))
        for name in WRITERS
        for matched in (readings if name not in lacking else (False,))
        if not lacking.get(name, False)
    ]


def write_card_and_figure(results_folder: Path | str, name: str) -> Path:
    """Write one figure of the catalogue, each checkpoint at its own context, with its card; returns its folder.

    Raises KeyError for a name that is not in the catalogue, ValueError where the tables do not carry the figure.
    """
    from qkscope.lenses.figures import CATALOGUE, write_figure

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
