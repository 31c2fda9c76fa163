"""`qkscope compare`: compare a results folder with a published study or another results folder, and write the outcome.

`RESULTS/comparison/<reference>/` gets the long table, the heads that changed category (two folders), figure and card.
Names of checkpoints and folders come from data: in text they are one printable line, shortened.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from qkscope.compare.heads import compare_folders
from qkscope.compare.judge import DIFFERS, MISSING, REPRODUCED, JudgedNumbers, largest_differences, listed_names
from qkscope.compare.numbers import load_reference, number_title, shipped_references
from qkscope.compare.published import compare_folder_with_published
from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.results import folder as names
from qkscope.results.archive import is_archive
from qkscope.results.csv_files import write_csv
from qkscope.results.read import ResultsFolder, load_results
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, Code, Strong, bullet, heading, paragraph, table_of, to_markdown, to_terminal
from qkscope.words.phrases import listed, shortened, significant

PREFIX = "published:"
MOST_ROWS = 8  # of the largest differences
_ROUNDING = 1e-12  # printed as 0


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
        name = with_.removeprefix(PREFIX)
        if name not in shipped_references():
            raise InputError(f"there is no published reference {name[:60]!r}; {_choices()}")
        published = load_reference(name)
        judged = compare_folder_with_published(mine, published, tolerance)
        reference, name, source = with_, f"published-{name}", f": {shortened(published.source, 300)}"
    else:
        other = Path(with_)
        if other.resolve() == mine.source.resolve():
            raise InputError(f"{with_}: is the results folder itself; choose another one to compare it with")
        judged = compare_folders(mine, _load(other), tolerance)
        reference, name, source = shortened(str(other), 200), folder_name(other), "."
    folder = out or names.output_folder(mine.writable_folder, names.COMPARISON, name)
    files = [folder / names.COMPARISON_CSV]
    write_csv(judged.cells, files[0])
    if judged.changed is not None:
        files.append(folder / names.CHANGED_HEADS_CSV)
        write_csv(judged.changed, files[-1])
    figure = draw_comparison(mine.study, judged, "Compared with a Reference", shortened(reference, 100))
    pictures = folder / names.COMPARISON_PNG, folder / names.COMPARISON_SVG
    save_as(figure, *pictures)
    files += [*pictures, folder / names.CARD]
    report, verdict = _report(judged), _verdict(judged)
    card = [
        heading(1, f"{shortened(mine.study.title)}: comparison"),
        paragraph(Strong(verdict)),
        paragraph("The reference is ", Code(reference), f"{source} Differences are this run minus the reference."),
        *report,
        paragraph(f"{judged.tolerance_note} ", Code(names.COMPARISON_CSV), " has every number."),
    ]
    write_text(files[-1], to_markdown(card))
    lines = (f"compared with {reference}", *to_terminal(report), verdict)
    return Comparison(judged.reproduced, lines, folder, tuple(files), judged.cells, judged.changed)


def _load(folder: Path) -> ResultsFolder:
    if not folder.is_dir() and not (is_archive(folder) and folder.exists()):
        raise InputError(f"{folder}: no such results folder or archive; {_choices()}")
    return load_results(folder)


def _choices() -> str:
    shipped = ", ".join(PREFIX + name for name in shipped_references())
    return f"compare with what `qkscope run` or `qkscope export` wrote, or with what ships with the package: {shipped}"


def folder_name(reference: Path) -> str:
    """A name for the comparison with this folder: its own, and a digest of its path, so that no two share one."""
    whole = reference.resolve()
    return f"{names.plain_name(whole.name)}-{hashlib.sha256(str(whole).encode()).hexdigest()[:8]}"


# --- text -------------------------------------------------------------------------------------------


def _digits(*names: str) -> Callable[[Any], str]:
    """The text of a cell with these columns' numbers; once where all are equal."""

    def text(row: Any) -> str:
        shown = [significant(0.0 if abs(row[name]) < _ROUNDING else row[name]) for name in names]
        return shown[0] if len(set(shown)) == 1 else " … ".join(shown)

    return text


_SUMMARY = {
    "what": lambda row: row["group"],
    "numbers": lambda row: f"{row['numbers']:,}",
    "within tolerance": lambda row: f"{row[REPRODUCED]:,}",
    "differ": lambda row: f"{row[DIFFERS]:,}",
    "missing": lambda row: f"{row[MISSING]:,}",
    "mean difference": _digits("mean"),
    "|difference|: median … 95% … largest": _digits("median", "p95", "largest"),
    "correlation": _digits("correlation"),
    "tolerance": _digits("tolerance_low", "tolerance_high"),
}
_LARGEST = {
    "farthest from its tolerance": lambda row: f"{shortened(row['model'])}, {number_title(row['what'], row['cell'])}",
    "this run": _digits("value"),
    "reference": _digits("reference"),
    "difference": _digits("difference"),
    "tolerance": _digits("tolerance"),
    "verdict": lambda row: row["verdict"],
}


def _report(judged: JudgedNumbers) -> list[AnyBlock]:
    """The tables and the notes, for the card and for a terminal."""
    largest = largest_differences(judged.counted, MOST_ROWS).to_dict("records")
    return [
        table_of(judged.summary().to_dict("records"), _SUMMARY),
        *(bullet(shortened(note, 500)) for note in [*judged.notes, *_one_side(judged)]),
        table_of(largest, _LARGEST) if largest else paragraph("All differences are zero."),
    ]


def _verdict(judged: JudgedNumbers) -> str:
    verdicts, total = judged.counted["verdict"].value_counts(), len(judged.counted)
    if judged.reproduced:
        which = f"all {total:,} {judged.noun}s are" if total > 1 else f"the one {judged.noun} is"
        return f"Reproduced: {which} within tolerance."
    words = {REPRODUCED: "within tolerance", DIFFERS: "different", MISSING: "missing"}
    parts = [f"{verdicts.get(v, 0):,} {word}" for v, word in words.items() if v == REPRODUCED or verdicts.get(v, 0)]
    return f"Not reproduced: of {counted(total, judged.noun)}, {listed(parts)}."


def _one_side(judged: JudgedNumbers) -> list[str]:
    """Checkpoints and numbers that one side lacks."""
    absent = judged.counted["model"].isin([*judged.only_results, *judged.only_reference])
    lacking = judged.counted.loc[(judged.counted["verdict"] == MISSING) & ~absent, "model"]
    lost = f"{counted(len(lacking), 'number')} at {listed_names(list(lacking.unique()))} are missing."
    return [
        *([lost] if len(lacking) else []),
        *([f"Only in the reference: {listed_names(judged.only_reference)}."] if judged.only_reference else []),
        *([f"Only in this run: {listed_names(judged.only_results)}."] if judged.only_results else []),
    ]
