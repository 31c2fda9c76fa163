"""Tables written by hand into a results folder, in the format of each, for tests of what is read and shown."""

from pathlib import Path

import pandas as pd

from qkscope.results.schema import HEADS, LAYER_MEANS, REPLICATES, TABLES

KEYS = {name: list(kind.key) for name, kind in TABLES.items()} | {
    REPLICATES: ["model", "window", "layer", "head"],
    LAYER_MEANS: ["model", "window", "layer", "measure", "heads_of"],
}


def put(folder: Path, name: str, rows: pd.DataFrame) -> Path:
    """Write rows of a table; measures of rows that are there already stand beside what those have."""
    parquet = name not in TABLES or TABLES[name].parquet
    path, key = folder / f"{name}.{'parquet' if parquet else 'csv'}", KEYS[name]
    rows = rows.drop(columns="pc", errors="ignore") if name == HEADS else rows
    if path.exists():
        before = table_of(folder, name).set_index(key)
        rows = rows.set_index(key).combine_first(before).reset_index()
    if parquet:
        rows.to_parquet(path, index=False)
    else:
        rows.to_csv(path, index=False)
    return path


def table_of(folder: Path, name: str) -> pd.DataFrame:
    """A table that is there."""
    path = folder / f"{name}.parquet"
    if path.exists():
        return pd.read_parquet(path)
    return pd.read_csv(folder / f"{name}.csv", dtype={"model": str}, keep_default_na=False, na_values=[""])


def windows_of(folder: Path, measure: str = "r_q") -> pd.DataFrame:
    """The rows of `heads` that have a measure."""
    rows = table_of(folder, HEADS)
    return rows[rows[measure].notna()].reset_index(drop=True)
