"""`qkscope compare`: compare a results folder with a published study or another results folder, and write the outcome.

`RESULTS/comparison/<reference>/` gets the long table, the heads that changed category (two folders), figure and card.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from qkscope.compare.heads import compare_folders
from qkscope.compare.published import compare_folder_with_published
from qkscope.compare.references import PublishedReference, load_reference, shipped_references
from qkscope.compare.text import comparison_card, comparison_lines
from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.results.archive import is_archive
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import (
    CARD,
    CHANGED_HEADS_CSV,
    COMPARISON,
    COMPARISON_CSV,
    COMPARISON_PNG,
    COMPARISON_SVG,
    output_folder,
    plain_name,
)
from qkscope.results.read import ResultsFolder, load_results
from qkscope.words.blocks import Code, paragraph, to_markdown
from qkscope.words.phrases import shortened

PREFIX = "published:"


@dataclass(frozen=True)
class Comparison:
    """The outcome: the verdict, lines for a terminal, what was written, and the tables behind it."""

    reproduced: bool
    lines: tuple[str, ...]
    folder: Path
    files: tuple[Path, ...]
    cells: pd.DataFrame
    changed: pd.DataFrame | None  # heads of another category; None where the reference has no heads


def compare_results(
    results: Path | str, with_: str, *, tolerance: float | None = None, out: Path | None = None
) -> Comparison:
    """Compare RESULTS with `published:NAME` or with another results folder, and write the comparison.

    `tolerance` replaces the default (see `compare.tolerance` and `compare.heads`). Raises InputError when either side
    cannot be read, or when the two have nothing in common.
    """
    from qkscope.compare.figure import draw_comparison  # matplotlib: only here
    from qkscope.draw.style import save_as

    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"--tolerance {tolerance}: expected a number that is not negative")
    mine = _load(Path(results))
    if with_.startswith(PREFIX):
        published = _published(with_.removeprefix(PREFIX))
        judged = compare_folder_with_published(mine, published, tolerance)
        reference, name = with_, f"published-{published.name}"
        source = f": {shortened(published.source, 300)}"
    else:
        other = Path(with_)
        if other.resolve() == mine.source.resolve():
            raise InputError(f"{with_}: is the results folder itself; choose another one to compare it with")
        judged = compare_folders(mine, _load(other), tolerance)
        reference, name, source = shortened(str(other), 200), folder_name(other), "."
    folder = out or output_folder(mine.writable_folder, COMPARISON, name)
    files = [folder / COMPARISON_CSV]
    write_csv(judged.cells, files[0])
    if judged.changed is not None:
        files.append(folder / CHANGED_HEADS_CSV)
        write_csv(judged.changed, files[-1])
    figure = draw_comparison(mine.study, judged, "Compared with a Reference", shortened(reference, 100))
    files += [*save_as(figure, folder / COMPARISON_PNG, folder / COMPARISON_SVG), folder / CARD]
    about = paragraph("The reference is ", Code(reference), f"{source} Differences are this run minus the reference.")
    write_text(files[-1], to_markdown(comparison_card(judged, shortened(mine.study.title), about)))
    lines = comparison_lines(judged, f"compared with {reference}")
    return Comparison(judged.reproduced, tuple(lines), folder, tuple(files), judged.cells, judged.changed)


def _load(folder: Path) -> ResultsFolder:
    if not folder.is_dir() and not (is_archive(folder) and folder.exists()):
        raise InputError(f"{folder}: no such results folder or archive; {_choices()}")
    return load_results(folder)


def _published(name: str) -> PublishedReference:
    try:
        return load_reference(name)
    except KeyError:
        raise InputError(f"there is no published reference {name[:60]!r}; {_choices()}") from None


def _choices() -> str:
    shipped = ", ".join(PREFIX + name for name in shipped_references())
    return f"compare with what `qkscope run` or `qkscope export` wrote, or with what ships with the package: {shipped}"


def folder_name(reference: Path) -> str:
    """A name for the comparison with this folder: its own, and a digest of its whole path.

    So two references of the same name do not overwrite each other.
    """
    whole = reference.resolve()
    return f"{plain_name(whole.name)}-{hashlib.sha256(str(whole).encode()).hexdigest()[:8]}"
