"""What a comparison says: a card of blocks, a note for the picture, lines for a terminal. Every claim is computed.

Names of checkpoints and folders come from data: they are one printable line, shortened.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pandas as pd

from qkscope.compare.judge import DIFFERS, MISSING, REPRODUCED
from qkscope.compare.lenses import LENS_MEANS
from qkscope.compare.references import ROTATION
from qkscope.lenses.depth_axis import DEPTH_COLUMNS, N_BINS
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, TableBlock, paragraph
from qkscope.words.phrases import listed, shortened

WORST = 8  # rows in the table of the largest differences
LISTED = 6  # names in a sentence
MEASURE_WORDS = {"r_q": "r_q", "r_k": "r_k", "explained_variance": "explained variance"}


# --- numbers and names ------------------------------------------------------------------------------


def three_decimals(value: float) -> str:
    """A number of a comparison: three decimals, or an order of magnitude where these would be zeros."""
    if math.isnan(value):
        return "undefined"
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.3f}".replace("-", "−")
    return f"{value:.1e}".replace("-", "−")


def spelled(what: str, value: float) -> str:
    """A value of this table: heads where it counts heads."""
    if what == "taxonomy" and not math.isnan(value):
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"
    if what == ROTATION and not math.isnan(value):
        return f"{value:.3g}".replace("-", "−")  # slopes per token are far below a thousandth
    return three_decimals(value)


def cell_words(what: str, cell: str) -> str:
    """Which number of a checkpoint a row is about."""
    if cell in DEPTH_COLUMNS:
        i = DEPTH_COLUMNS.index(cell)
        return f"mean {'r_q' if what == 'heatmap_rq' else 'r_k'}, depth {i / N_BINS:.1f} to {(i + 1) / N_BINS:.1f}"
    if what in LENS_MEANS:
        return LENS_MEANS[what].words[cell]
    if what == "trajectory":
        return f"mean {MEASURE_WORDS[cell]}"
    if what == "taxonomy":
        return f"{cell} heads"
    return f"{MEASURE_WORDS[what]}, {cell}"


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows, each by column name."""
    return cast("list[dict[str, Any]]", table.to_dict("records"))


def _spelled_row(row: dict[str, Any]) -> dict[str, str]:
    """The numbers of a judged row in words, and what it is about."""
    numbers = {name: spelled(row["what"], row[name]) for name in ("value", "reference", "difference", "tolerance")}
    return {"model": row["model"], "number": cell_words(row["what"], row["cell"]), **numbers}


def tally_of(cells: pd.DataFrame) -> dict[str, int]:
    """How many rows have which verdict."""
    counted = cells["verdict"].value_counts()
    return {verdict: int(counted.get(verdict, 0)) for verdict in (REPRODUCED, DIFFERS, MISSING)}


def _worst(cells: pd.DataFrame, verdict: str) -> pd.DataFrame:
    """Rows of this verdict, the farthest from their tolerance first; a number against none comes first of all."""
    rows = cells[cells["verdict"] == verdict]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(rows["difference"].to_numpy()) / rows["tolerance"].to_numpy()
    undefined = rows["difference"].isna().to_numpy() & (rows["value"].isna() ^ rows["reference"].isna()).to_numpy()
    ratio = np.where(undefined, np.inf, np.nan_to_num(ratio, nan=0.0, posinf=np.inf))
    return rows.iloc[np.argsort(-ratio, kind="stable")]


def some_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    shown = [shortened(name) for name in names[:LISTED]]
    return listed([*shown, f"{len(names) - LISTED} more"] if len(names) > LISTED else shown)


def verdict_words(reproduced: bool, tally: dict[str, int], noun: str) -> str:
    """The verdict in one sentence."""
    total = sum(tally.values())
    if reproduced:
        return f"Reproduced: {f'all {total:,} {noun}s are' if total > 1 else f'the one {noun} is'} within tolerance."
    parts = [
        f"{tally[REPRODUCED]:,} within tolerance",
        f"{tally[DIFFERS]:,} different" if tally[DIFFERS] else "",
        f"{tally[MISSING]:,} missing" if tally[MISSING] else "",
    ]
    return f"Not reproduced: of {counted(total, noun)}, {listed([part for part in parts if part])}."


def _worst_table(cells: pd.DataFrame) -> TableBlock:
    columns = ("model", "number", "value", "reference", "difference", "tolerance")
    rows = [_spelled_row(row) for row in records(cells.head(WORST))]
    titles = ("checkpoint", "number", "this run", "reference", "difference", "tolerance")
    return TableBlock(titles, [[shortened(row[column]) for column in columns] for row in rows])


def worst_section(cells: pd.DataFrame) -> list[AnyBlock]:
    """What lies outside its tolerance, farthest first; if nothing does, what comes closest."""
    different = _worst(cells, DIFFERS)
    if len(different):
        said = f"{len(different):,} numbers lie outside their tolerance"
        said += f", the {WORST} farthest are:" if len(different) > WORST else ":"
        said = said if len(different) > 1 else "One number lies outside its tolerance:"
        return [paragraph(said), _worst_table(different)]
    inside = _worst(cells, REPRODUCED)
    if inside.empty:
        return [paragraph("Nothing could be compared.")]
    if not bool((inside["difference"].abs() > 0).any()):
        return [paragraph("All differences are zero.")]
    row = {name: shortened(text) for name, text in _spelled_row(records(inside.head(1))[0]).items()}
    return [
        paragraph(
            f"Nothing lies outside its tolerance. Closest to it is {row['number']} at {row['model']}: {row['value']} "
            f"against {row['reference']}, tolerance {row['tolerance']}."
        )
    ]


def one_side(only_results: Sequence[str], only_reference: Sequence[str]) -> list[str]:
    """Sentences about checkpoints that only one side has."""
    said = []
    if only_reference:
        said.append(f"Only in the reference: {some_names(only_reference)}.")
    if only_results:
        said.append(f"Only in this run: {some_names(only_results)}.")
    return said


def worst_lines(cells: pd.DataFrame, most: int = 3) -> list[str]:
    """The same for a terminal."""
    rows = [_spelled_row(row) for row in records(_worst(cells, DIFFERS).head(most))]
    return [
        f"differs: {shortened(row['model'])}, {row['number']}: {row['value']} against {row['reference']}, "
        f"difference {row['difference']} (tolerance {row['tolerance']})"
        for row in rows
    ]
