"""Write `tables/means.csv`, `tables/changes.csv` and `tables/head_changes.parquet`, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from qkscope.files import replacing
from qkscope.lenses.long_tables import changes_pieces, head_changes, means_pieces
from qkscope.lenses.views import Results
from qkscope.results.csv_files import write_csv_pieces
from qkscope.results.folder import CHANGES_CSV, HEAD_CHANGES_PARQUET, MEANS_CSV, table_path
from qkscope.results.remove import remove_table


def write_long_tables(results: Results, folder: Path) -> list[Path]:
    """Write the tables over heads that these results have, remove those that they have not; returns what is there."""
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
    changes = list(head_changes(results))
    if not changes:
        remove_table(folder, HEAD_CHANGES_PARQUET)
        return written
    with replacing(table_path(folder, HEAD_CHANGES_PARQUET)) as temporary, temporary.open("wb") as file:
        pd.concat(changes, ignore_index=True).to_parquet(file, index=False, compression="zstd")
    return [*written, table_path(folder, HEAD_CHANGES_PARQUET)]
