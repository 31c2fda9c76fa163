"""Read a results folder or an exported archive: the tables, who the checkpoints are and in which order they come.

`qk.csv` is needed; the other tables and `provenance.json` are used when they are there. A table may come from elsewhere
with the required columns only: then depth is layer / last layer, labels are the model names, and there are no phases.
Everything later stages rely on is checked here, once, so they need not doubt a column; what cannot be used is refused
with the file, the line and what to do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.errors import InputError, TableError, first_line
from qkscope.foreign import Missing, Unreadable, lines_of, opened, parse_json, read_bytes
from qkscope.results import folder as layout
from qkscope.results import schema
from qkscope.results.archive import SUFFIX, is_archive, unpacked
from qkscope.results.entries import (
    Entries,
    kind_and_span,
    listed_names,
    order_checkpoints,
    saw_the_same,
    select_checkpoints,
)
from qkscope.results.mapped import SpillingTable, drop_page_cache, in_blocks, is_large, memory_mapped, select_rows
from qkscope.results.provenance import LONGEST, Provenance, StudyRecord
from qkscope.results.schema import EARLIER_TABLES, HEADS, MEANS_KEY, TABLES, TEXT_COLUMNS, TableKind, depth_of_layers

_KEY = ["model", "layer", "head", "pc"]
_AGAIN = "`qkscope analyze RESULTS` writes it again"
_NUMBERS = ("explained_variance", "r_q", "r_k")
_OF_LAYER = ("depth", "rotary", "attention", "attention_window")
_WHOLE = ("layer", "head", "pc")
_EMPTY = ["", "nan", "NaN", "NA"]
_SLACK = 1e-6  # rounding of a correlation or a share that is exactly 1
_KINDS = {
    "rotary": (schema.ROTARY, schema.NOPE, schema.UNKNOWN),
    "attention": (schema.FULL, schema.SLIDING, schema.CHUNKED),  # or empty: not recorded
}
_MOST = 10_000  # layers, heads and components; more is damage
# Beyond so many bytes only component 0 is kept of qk.csv and its kin: memory does not depend on how many components
# were written, and no page could show them all. 100 checkpoints of 576 heads with ten components have 300 MB.
EVERY_COMPONENT = 512 * 2**20
PART = 20_000  # lines of a larger table that are parsed together
_MAX_TABLE = 16 * 2**30  # bytes; 1000 checkpoints of 80 layers with 64 heads and 10 components have 12 GB
_MAX_PROVENANCE = 256 * 1024 * 1024  # bytes; 10 000 checkpoints of a 36-layer model have 60 MB


@dataclass(frozen=True)
class ResultsFolder:
    """What the files of a results folder hold, checked; component 0 has depth, rotary and window filled in."""

    folder: Path  # where its files are: of an archive, where they were unpacked
    source: Path  # the folder or archive that was named
    study: Entries
    heads: pd.DataFrame  # component 0 of `qk.csv`: each checkpoint over its own context
    common: pd.DataFrame | None  # the same over the window that all share, where that is another for some checkpoint
    provenance: Provenance
    unmeasured: tuple[str, ...]  # checkpoints of the provenance that have no rows (yet)
    components: pd.DataFrame  # `heads` with every component, of a very large table only with component 0
    components_common: pd.DataFrame | None  # `common`, likewise
    _read: dict[str, pd.DataFrame | None] = field(default_factory=dict, repr=False, compare=False)

    def table(self, name: str, kind: TableKind | None = None) -> pd.DataFrame | None:
        """Every row of one of the tables, such as `heads` or `buckets`; None where the folder has none (yet)."""
        if name not in self._read:
            kind, path = kind or TABLES.get(name), layout.stored_table(self.folder, name)
            key = kind.key if kind else MEANS_KEY if name == schema.LAYER_MEANS else TABLES[HEADS].key
            self._read[name] = None if path is None else _known_table(path, key, key, self.study.names)
            drop_page_cache()
        return self._read[name]

    @property
    def windows(self) -> pd.DataFrame | None:
        """Component 0 of every head at every window; None where the table `heads` does not have it."""
        rows = self.table(HEADS)
        if rows is None or not set(_NUMBERS) <= set(rows.columns):
            return None
        if not set(_OF_LAYER) <= set(rows.columns):  # a table from elsewhere
            rows = self._read[HEADS] = _with_layer_columns(rows, layout.stored_table(self.folder, HEADS) or self.folder)
        return rows

    @property
    def writable_folder(self) -> Path:
        """The folder, to write something into it; an archive has none."""
        if self.folder == self.source:
            return self.folder
        raise InputError(f"{self.source}: is an archive, which is only read").advised(
            python="give `out`, the folder to write to", command="give --out, the folder to write to"
        )


def load_results(folder: Path | str) -> ResultsFolder:
    """Read and check a results folder, or an archive that `qkscope export` made, each file once.

    Raises TableError when something that is needed is not there.
    """
    source = Path(folder)
    folder = unpacked(source) if is_archive(source) else source
    if folder.is_file():
        raise TableError(
            f"{source}: is a file; give a results folder, or an archive (.zip) that `qkscope export` wrote"
        )
    _refuse_earlier_tables(folder, source)
    components = _read_components(layout.results_file(folder, schema.QK_CSV))
    provenance = read_provenance(layout.results_file(folder, layout.PROVENANCE_JSON))
    checkpoints, unmeasured = order_checkpoints(components, provenance)
    contexts = {c.name: np.nan if c.context is None else float(c.context) for c in checkpoints}
    window = components["window"].fillna(components["model"].map(contexts).astype(float))
    components = memory_mapped(components.assign(window=window))
    drop_page_cache()
    heads = _leading(components)
    components_common = _read_common(
        layout.results_file(folder, TABLES[schema.COMPONENTS_TABLE].file), components, provenance
    )
    settings = provenance.study or StudyRecord()
    kind, span = kind_and_span(heads, checkpoints, provenance)
    study = Entries(
        title=settings.title or settings.study or source.resolve().name.removesuffix(SUFFIX) or "study",
        checkpoints=checkpoints,
        selected=select_checkpoints(checkpoints, settings.figure_checkpoints),
        kind=kind,
        span=span,
        sampled_heads=provenance.analysis is None or provenance.analysis.heads != "all",
        same_documents=saw_the_same([c.record for c in checkpoints]),
        axis=settings.axis or "entries",
        axis_scale=settings.axis_scale or "linear",
    )
    common = None if components_common is None else _leading(components_common)
    return ResultsFolder(folder, source, study, heads, common, provenance, unmeasured, components, components_common)


def _refuse_earlier_tables(folder: Path, source: Path) -> None:
    """Refuse a folder with tables of 0.2, and state how to get those of this version; `source` is how it was named."""
    there = [name for name in EARLIER_TABLES if layout.head_table_path(folder, name).is_file()]
    if not there:
        return
    more = f" and {len(there) - 1} more" if len(there) > 1 else ""
    problem = f"{source}: has tables of qkscope 0.2 ({there[0]}{more})"
    if any(entry.name.endswith(layout.MOMENTS_SUFFIX) for entry in layout.entries(layout.moments_folder(folder))):
        raise TableError(f"{problem}; `qkscope analyze {source}` writes them again from its moments")
    raise TableError(
        f"{problem} and no moments to write them again from; read it with qkscope 0.2, or keep qk.csv and "
        "provenance.json alone in a folder and read that"
    )


def _read_common(path: Path, own: pd.DataFrame, provenance: Provenance) -> pd.DataFrame | None:
    """Every component over the common window; of checkpoints whose own context that is, the rows of `qk.csv`."""
    if not path.exists():
        return None
    table = _read_components(path)
    names = list(dict.fromkeys(own["model"]))
    _refuse_strangers(table, ["model"], names, path)
    window = provenance.analysis.common_window if provenance.analysis else None
    table = table.assign(window=table["window"].fillna(np.nan if window is None else float(window)))
    there = set(table["model"].unique())
    if there == set(names):
        return memory_mapped(table)
    both = pd.concat([table, own[~own["model"].isin(there)]], ignore_index=True)
    order = both["model"].map({name: place for place, name in enumerate(names)})
    return memory_mapped(both.iloc[np.argsort(order.to_numpy(), kind="stable")].reset_index(drop=True))


def require_numbers(results: ResultsFolder, table: pd.DataFrame, name: str, columns: Sequence[str]) -> None:
    """Refuse a table with only some of these columns of one set, or with anything but numbers in them."""
    path = layout.stored_table(results.folder, name)
    missing = [column for column in columns if column not in table.columns]
    if path is None or len(missing) == len(columns):
        return
    if missing and not {*columns} & {*_NUMBERS}:  # of components, tables from elsewhere have what they have
        raise TableError(f"{path}: missing column {missing[0]!r}; {_AGAIN}")
    for column in columns:
        if column in table.columns and column not in TEXT_COLUMNS:
            _make_numbers(table, column, path)


def read_named_table(
    results: ResultsFolder, file: str, columns: Sequence[str], key: Sequence[str], texts: Sequence[str] = TEXT_COLUMNS
) -> pd.DataFrame | None:
    """A table in a file of its own, such as `ablation_heads.csv` or one about the study as a whole; None without one.

    `texts` are its columns of words, those ending in `model` name entries.
    """
    path = layout.head_table_path(results.folder, file)
    return _known_table(path, (*key, *columns), key, results.study.names, texts) if path.exists() else None


def _known_table(
    path: Path, needed: Sequence[str], key: Sequence[str], names: Sequence[str], texts: Sequence[str] = TEXT_COLUMNS
) -> pd.DataFrame:
    """A table with these columns; `key` are the columns that identify a row, `names` the known entries."""
    models = [name for name in texts if name.endswith("model")]
    pieces = _parquet_pieces(path) if path.suffix == ".parquet" else _read_csv(path, texts)
    whole = SpillingTable()
    for piece in pieces:
        missing = [name for name in (*needed, *models) if name not in piece.columns]
        if missing or piece.empty:
            raise TableError(f"{path}: {f'missing column {missing[0]!r}' if missing else 'has no rows'}; {_AGAIN}")
        for name in (str(name) for name in piece.columns if name not in texts):
            if name in needed or not pd.api.types.is_string_dtype(piece[name].dtype):
                _make_numbers(piece, name, path)
        whole.add(piece.copy())  # a block per type: pandas is slow where a table has hundreds of them
    table = whole.table()
    _refuse_repeated(table, key, path)
    _refuse_strangers(table, models, names, path)
    return table


def _refuse_strangers(table: pd.DataFrame, models: Sequence[str], names: Sequence[str], path: Path) -> None:
    strangers = sorted({str(name) for column in models for name in table[column].unique()} - set(names))
    if strangers:
        raise TableError(f"{path}: has checkpoints that {schema.QK_CSV} does not have: {listed_names(strangers)}")


def _refuse_repeated(table: pd.DataFrame, key: Sequence[str], path: Path) -> None:
    blocks = in_blocks(table[list(key)]) if "model" in key else iter([table[list(key)]])
    repeats = [block[block.duplicated()] for block in blocks]  # an entry's rows are in one block
    repeated = next((rows for rows in repeats if not rows.empty), None)
    if repeated is not None:
        row = repeated.iloc[0]
        where = ", ".join(f"{name} {row[name]}" for name in key)
        raise TableError(f"{path}: {sum(map(len, repeats))} repeated row(s), the first is {where}")


def _leading(components: pd.DataFrame) -> pd.DataFrame:
    """Component 0."""
    return select_rows(components, (components["pc"] == 0).to_numpy())


# --- files ----------------------------------------------------------------------------------------


def _read_csv(path: Path, texts: Sequence[str] = TEXT_COLUMNS) -> Iterator[pd.DataFrame]:
    """The table in a file: whole, or of a large one some rows at a time, numbered through."""
    rows = PART if path.exists() and is_large(path.stat().st_size) else None
    try:
        with opened(path, _MAX_TABLE) as file:
            header = pd.read_csv(lines_of(file), encoding="utf-8", nrows=0)
            file.seek(0)
            options: dict[str, Any] = {
                "encoding": "utf-8",
                "dtype": {c: str for c in texts if c in header.columns},
                "keep_default_na": False,
                "na_values": {c: _EMPTY for c in header.columns if not c.endswith("model")},  # one may be called "NA"
                "low_memory": False,
            }
            read: Any = pd.read_csv(lines_of(file), chunksize=rows, **options)
            for table in [read] if rows is None else read:
                if not isinstance(table.index, pd.RangeIndex):  # pandas then takes the first cells for names of rows
                    raise ValueError("its rows have more cells than its header")
                yield table
    except Missing:
        raise TableError(f"{path}: not found; `qkscope run STUDY` writes it") from None
    except Unreadable as error:
        raise TableError(f"{path}: {error}") from None
    except pd.errors.EmptyDataError:
        raise TableError(f"{path}: is empty") from None
    except (pd.errors.ParserError, ValueError, OverflowError, OSError) as error:
        raise TableError(f"{path}: cannot be read as a table: {error}") from error


def _parquet_pieces(path: Path) -> Iterator[pd.DataFrame]:
    """The row groups of a table, one for each checkpoint; numbers have the precision of all others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with opened(path, _MAX_TABLE) as file:
            table = pq.ParquetFile(file)
            sizes = [table.metadata.row_group(number).total_byte_size for number in range(table.num_row_groups)]
            if sum(sizes) > _MAX_TABLE:
                raise Unreadable(f"expands to more than {_MAX_TABLE / 2**30:,.0f} GiB")
            first = 0
            for number in range(table.num_row_groups):
                piece = table.read_row_group(number).to_pandas()
                narrow = {name: "float64" for name, kind in piece.dtypes.items() if kind == "float32"}
                yield piece.astype(narrow).set_axis(pd.RangeIndex(first, first + len(piece)))
                first += len(piece)
    except Unreadable as error:
        raise TableError(f"{path}: {error}") from None
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise TableError(f"{path}: cannot be read as a table: {first_line(error)}; {_AGAIN}") from error


def read_provenance(path: Path) -> Provenance:
    """What a `provenance.json` says; nothing where there is none."""
    try:
        return Provenance.read(parse_json(read_bytes(path, _MAX_PROVENANCE)))
    except Missing:
        return Provenance()
    except Unreadable as error:
        raise TableError(f"{path}: {error}") from None


# --- components -----------------------------------------------------------------------------------


def _read_components(path: Path) -> pd.DataFrame:
    """A table with one row per head and component, in file order, with all columns; of a very large one component 0."""
    leading = path.exists() and path.stat().st_size > EVERY_COMPONENT
    whole = SpillingTable()
    for piece in _read_csv(path):
        missing = [c for c in schema.REQUIRED_COLUMNS if c not in piece.columns]
        if missing:
            raise TableError(
                f"{path}: missing column{'s' if len(missing) > 1 else ''} {listed_names(missing)}; "
                f"a table needs at least {', '.join(schema.REQUIRED_COLUMNS)}"
            )
        if piece.empty:
            raise TableError(f"{path}: has a header but no rows")
        for column in piece.columns:
            known = column in schema.QK_COLUMNS or column.endswith("_se") or column in schema.JUDGED_COLUMNS
            if known and column not in TEXT_COLUMNS:
                _make_numbers(piece, column, path)
        checked = _checked(piece, path)
        whole.add(checked[checked["pc"] == 0] if leading else checked)
    table = whole.table()
    if not (table["pc"] == 0).any():
        raise TableError(f"{path}: no rows with pc == 0; taxonomy and figures are about component 0")
    _refuse_repeated(table, _KEY, path)
    drop_page_cache()
    return _with_layer_columns(table, path)


def _make_numbers(table: pd.DataFrame, name: str, path: Path) -> None:
    """Make numbers of a column's cells. Most columns are read as numbers: these are looked at, and stay as they are."""
    column = table[name]
    if column.dtype.kind in "fiu" and not np.isinf(column.to_numpy()).any():
        return
    numbers = pd.to_numeric(column, errors="coerce")
    bad = (numbers.isna() & column.notna()) | np.isinf(numbers.astype(float))
    _refuse_bad(table, name, bad, path, "which is not a finite number")
    table[name] = numbers


def _refuse_bad(table: pd.DataFrame, name: str, bad: "pd.Series[bool]", path: Path, problem: str) -> None:
    """Name the first line in which a column is bad."""
    if bad.any():
        place = int(np.flatnonzero(bad.to_numpy())[0])
        value = str(table[name].iloc[place])[:40]
        raise TableError(f"{path}: line {table.index[place] + 2}: {name} is {value!r}, {problem}")


def _checked(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Ranges that are true of every table; one pass over the columns, the first offending line is named."""
    checks: list[tuple[str, pd.Series, str]] = [("model", table["model"].str.strip() == "", "a checkpoint's name")]
    for name in _WHOLE:
        values = table[name]
        whole = values.notna() & (values >= 0) & (values % 1 == 0) & (values < _MOST)
        checks.append((name, ~whole, "a whole number from 0 on"))
    for name, low in (("r_q", -1.0), ("r_k", -1.0), ("explained_variance", 0.0)):
        outside = (table[name] < low - _SLACK) | (table[name] > 1.0 + _SLACK)
        checks.append((name, outside, f"between {low:g} and 1, or empty"))
    if "depth" in table.columns:
        checks.append(("depth", (table["depth"] < 0) | (table["depth"] > 1), "between 0 and 1, or empty"))
    if "window" in table.columns:
        window = table["window"]
        inside = (window >= 1) & (window <= LONGEST) & (window % 1 == 0)
        checks.append(("window", window.notna() & ~inside, "a number of tokens, or empty"))
    for name, bad, expected in checks:
        _refuse_bad(table, name, bad, path, f"expected {expected}")
    return table.astype(dict.fromkeys(_WHOLE, int))


def _with_layer_columns(pc0: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The table with depth, rotary, attention, attention_window and window, filled in where they are not there."""
    last_layer = pc0.groupby("model")["layer"].transform("max").to_numpy()
    computed = pd.Series(depth_of_layers(pc0["layer"].to_numpy(), last_layer), index=pc0.index)
    filled = pc0.assign(
        depth=(pc0["depth"].fillna(computed) if "depth" in pc0.columns else computed).astype(float),
        rotary=pc0["rotary"].fillna(schema.UNKNOWN) if "rotary" in pc0.columns else schema.UNKNOWN,
        attention=pc0["attention"].fillna("") if "attention" in pc0.columns else "",
        attention_window=pc0["attention_window"] if "attention_window" in pc0.columns else np.nan,
        window=pc0["window"] if "window" in pc0.columns else np.nan,
    )
    for column, known in _KINDS.items():
        strange = sorted(set(filled[column].unique()) - {*known, ""})
        if strange:
            there, expected = listed_names(strange), listed_names(sorted(known))
            raise TableError(f"{path}: column {column!r} has {there}, expected {expected}")
    return filled.astype({"window": float, **dict.fromkeys(_NUMBERS, float)})
