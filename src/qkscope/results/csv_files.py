"""Tables as CSV that is only ever data: written whole or not at all, with no cell that a spreadsheet would compute.

Names of our own studies cannot start a formula, but a table may come from elsewhere, with names that do. Such a cell,
or column name, gets an apostrophe in front, which spreadsheets take as "this is text"; control characters are spelled
out. Numbers are numbers and stay as they are.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from qkscope.files import replacing
from qkscope.processes import over_cores

FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four are their full-width twins

LINES = 4_000  # that are put into words at a time


def harmless_cell(value: Any) -> Any:
    """A text cell that is no formula and steers no terminal; anything but text is returned as it is."""
    if not isinstance(value, str):
        return value
    shown = value.isprintable()
    text = value if shown else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    return f"'{text}" if text.lstrip().startswith(FORMULA) else text


def csv_text(table: pd.DataFrame, digits: int | None = None, *, header: bool = True) -> str:
    """The table as CSV, one line per row, column names and text cells harmless; numbers in full or to `digits`."""
    changed: dict[str, Any] = {}
    for name, column in table.items():
        if isinstance(column.dtype, pd.Int64Dtype):
            changed[str(name)] = column.to_numpy(dtype=object, na_value="")  # pandas would format cell by cell
        elif not pd.api.types.is_numeric_dtype(column.dtype) and not all(
            (cell := harmless_cell(value)) is value or cell == value for value in column.unique()
        ):
            changed[str(name)] = column.map(harmless_cell)
    safe = table.assign(**changed)
    safe.columns = pd.Index([harmless_cell(str(name)) for name in table.columns])
    shown = None if digits is None else f"%.{digits}g"
    return safe.to_csv(index=False, header=header, lineterminator="\n", float_format=shown)


def write_csv(table: pd.DataFrame, path: Path, digits: int | None = None) -> None:
    """Write the table; a link at that place is replaced, not followed."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        for first in range(0, max(len(table), 1), LINES):
            file.write(csv_text(table.iloc[first : first + LINES], digits, header=first == 0))


def write_csv_pieces(pieces: Sequence[Callable[[], pd.DataFrame]], path: Path) -> None:
    """Write a table whose pieces (at least one) are made on all cores; each core holds one piece at a time."""

    def lines(number: int) -> str:
        return csv_text(pieces[number](), header=number == 0)

    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        for text in over_cores(lines, range(len(pieces))):
            file.write(text)
