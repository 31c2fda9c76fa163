"""Read a results folder back: the tables, who the checkpoints are and in which order they come.

`qk.csv` is needed; `qk_matched.csv`, `qk_windows.csv` and `provenance.json` are used when they are there.
A table may come from elsewhere with the required columns only: then depth is layer / last layer, labels are
the model names, and there are no phases. Everything later stages rely on is checked here, once, so they need
not doubt a column; what cannot be used is refused with the file, the line and what to do.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.analysis import schema
from qkscope.analysis.depth import depth_of_layers
from qkscope.errors import TableError
from qkscope.foreign import Missing, Unreadable, lines_of, opened, parse_json, read_bytes
from qkscope.results.folder import results_file

# What the checkpoints of a study span, as titles say it.
DURING_TRAINING = "during training"
ACROSS_CHECKPOINTS = "across checkpoints"  # one layout, but nothing says that it is one training run
ACROSS_MODELS = "across models"

N_SELECTED = 6  # panels of the phase portraits, as published

_KEY = ["model", "layer", "head", "pc"]
_NUMBERS = ("explained_variance", "r_q", "r_k")
_WHOLE = ("layer", "head", "pc")
_EMPTY = ["", "nan", "NaN", "NA"]
_SLACK = 1e-6  # rounding of a correlation or a share that is exactly 1
_TEXT_COLUMNS = ("model", "rotary", "attention")
_MOST = 10_000  # layers, heads and components; more is damage
_LONGEST = 2**31  # tokens of a window
_MAX_TABLE = 16 * 2**30  # bytes; 1000 checkpoints of 80 layers with 64 heads and 10 components have 12 GB
_MAX_PROVENANCE = 256 * 1024 * 1024  # bytes; 10 000 checkpoints of a 36-layer model have 60 MB


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint (or one model) of the study; `record` is what its provenance says about it."""

    name: str
    label: str
    phase: str | None = None
    context: int | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Who is compared: the title of all figures, the checkpoints in order, those with a phase portrait."""

    title: str
    checkpoints: tuple[Checkpoint, ...]
    selected: tuple[str, ...]
    different_models: bool = False  # then the heads of one row are not the heads of the next
    span: str = ACROSS_CHECKPOINTS

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoints' names, in order: the `model` column of every table."""
        return tuple(c.name for c in self.checkpoints)

    @property
    def labels(self) -> dict[str, str]:
        """Short labels by name."""
        return {c.name: c.label for c in self.checkpoints}

    def only(self, models: Sequence[str]) -> "Study":
        """The study restricted to some of its checkpoints (the order stays)."""
        kept = tuple(c for c in self.checkpoints if c.name in set(models))
        selected = tuple(name for name in self.selected if name in set(models))
        return replace(self, checkpoints=kept, selected=selected)


@dataclass(frozen=True)
class Results:
    """A results folder: component 0 of each table, checked, with depth, rotary and window filled in."""

    folder: Path
    study: Study
    heads: pd.DataFrame
    matched: pd.DataFrame | None
    windows: pd.DataFrame | None
    provenance: Mapping[str, Any]
    unmeasured: tuple[str, ...]  # checkpoints of the provenance that have no rows (yet)


def load_results(folder: Path | str) -> Results:
    """Read and check a results folder. Raises TableError when something that is needed is not there."""
    folder = Path(folder)
    heads = _read_pc0(results_file(folder, schema.QK_CSV))
    provenance = _read_provenance(results_file(folder, schema.PROVENANCE_JSON))
    checkpoints, unmeasured = _order_checkpoints(heads, provenance)
    heads = _fill_window(heads, checkpoints)
    names = [c.name for c in checkpoints]
    matched = _read_optional(results_file(folder, schema.QK_MATCHED_CSV), names)
    if matched is not None:
        matched = _fill_matched_window(matched, provenance)
        if _windows_of(matched) == _windows_of(heads):
            matched = None  # all contexts are the common window: there is only one reading
    study_record = _mapping(provenance.get("study"))
    title = _text(study_record.get("title")) or _text(study_record.get("study"))
    different = _are_different_models(heads, checkpoints)
    study = Study(
        title=title or folder.resolve().name or "study",
        checkpoints=checkpoints,
        selected=select_checkpoints(checkpoints, study_record.get("figure_checkpoints")),
        different_models=different,
        span=_span(checkpoints, different),
    )
    windows = _read_optional(results_file(folder, schema.QK_WINDOWS_CSV), names, extra_key=["window"])
    return Results(folder, study, heads, matched, windows, provenance, unmeasured)


def load_components(results: Results) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Every component of `qk.csv`, and of `qk_matched.csv` where it is a reading of its own; checked as PC0 is."""
    path = results_file(results.folder, schema.QK_CSV)
    own = _read_table(path)
    _refuse_repeated(own, _KEY, path)
    own = _fill_window(_with_layer_columns(own, path), results.study.checkpoints)
    if results.matched is None:
        return own, None
    path = results_file(results.folder, schema.QK_MATCHED_CSV)
    matched = _read_table(path)
    _refuse_repeated(matched, _KEY, path)
    return own, _fill_matched_window(_with_layer_columns(matched, path), results.provenance)


def _windows_of(heads: pd.DataFrame) -> dict[str, float]:
    """The window of each checkpoint."""
    return dict(zip(heads["model"], heads["window"], strict=True))


def phase_segments(checkpoints: Sequence[Checkpoint]) -> list[tuple[str | None, int, int]]:
    """Runs of consecutive checkpoints of one phase: (phase, index of the first, index of the last)."""
    segments: list[tuple[str | None, int, int]] = []
    for i, checkpoint in enumerate(checkpoints):
        if segments and segments[-1][0] == checkpoint.phase:
            segments[-1] = (checkpoint.phase, segments[-1][1], i)
        else:
            segments.append((checkpoint.phase, i, i))
    return segments


def select_checkpoints(checkpoints: Sequence[Checkpoint], chosen: object = None) -> tuple[str, ...]:
    """The checkpoints with a phase portrait: the study's choice, else first, last, phase ends, the rest even."""
    names = [c.name for c in checkpoints]
    if isinstance(chosen, Sequence) and not isinstance(chosen, str):
        wanted = [name for name in names if name in set(map(str, chosen))]
        if wanted:
            return tuple(wanted[:N_SELECTED])
    last = len(names) - 1
    phase_ends = {end for _, _, end in phase_segments(checkpoints)} - {0, last}
    if len(phase_ends) > N_SELECTED - 2:  # too many: those nearest to an even spread
        even = [last * k / (N_SELECTED - 1) for k in range(1, N_SELECTED - 1)]
        phase_ends = {min(sorted(phase_ends), key=lambda end: abs(end - place)) for place in even}
    picked = {0, last, *phase_ends}
    return tuple(names[i] for i in _filled_evenly(sorted(picked), N_SELECTED))


def _filled_evenly(anchors: list[int], wanted: int) -> list[int]:
    """The anchors, and between them further whole numbers, up to `wanted` in all, with even gaps."""
    gaps = list(itertools.pairwise(anchors))
    parts = [1] * len(gaps)
    for _ in range(wanted - len(anchors)):
        room = [i for i, (a, b) in enumerate(gaps) if parts[i] < b - a]
        if not room:
            break
        widest = max(room, key=lambda i: (gaps[i][1] - gaps[i][0]) / parts[i])
        parts[widest] += 1
    between = [a + round((b - a) * k / n) for (a, b), n in zip(gaps, parts, strict=True) for k in range(1, n)]
    return sorted({*anchors, *between})


# --- tables ---------------------------------------------------------------------------------------


def _read_optional(path: Path, names: Sequence[str], extra_key: Sequence[str] = ()) -> pd.DataFrame | None:
    if not path.exists():
        return None
    table = _read_pc0(path, extra_key)
    strangers = sorted(set(table["model"]) - set(names))
    if strangers:
        raise TableError(f"{path}: has checkpoints that {schema.QK_CSV} does not have: {_listed(strangers)}")
    if extra_key and table["window"].isna().any():
        raise TableError(f"{path}: column 'window' is empty in some rows")
    return table


def _read_pc0(path: Path, extra_key: Sequence[str] = ()) -> pd.DataFrame:
    """Component 0 of a table, one row per head (and `extra_key`), in file order, with all columns present."""
    table = _read_table(path, extra_key)
    pc0 = table[table["pc"] == 0].reset_index(drop=True)
    if pc0.empty:
        raise TableError(f"{path}: no rows with pc == 0; taxonomy and figures are about component 0")
    _refuse_repeated(pc0, [*_KEY, *extra_key], path)
    return _with_layer_columns(pc0, path)


def _read_table(path: Path, extra_key: Sequence[str] = ()) -> pd.DataFrame:
    """All rows of a table, its numbers checked."""
    table = _read_csv(path)
    missing = [c for c in (*schema.REQUIRED_COLUMNS, *extra_key) if c not in table.columns]
    if missing:
        raise TableError(
            f"{path}: missing column{'s' if len(missing) > 1 else ''} {_listed(missing)}; "
            f"a table needs at least {', '.join(schema.REQUIRED_COLUMNS)}"
        )
    if table.empty:
        raise TableError(f"{path}: has a header but no rows")
    for column in table.columns:
        if column in schema.QK_COLUMNS and column not in _TEXT_COLUMNS:
            table[column] = _numbers(table[column], path)
    return _checked(table, path)


def _refuse_repeated(table: pd.DataFrame, key: Sequence[str], path: Path) -> None:
    repeated = table[table.duplicated(list(key))]
    if not repeated.empty:
        row = repeated.iloc[0]
        where = ", ".join(f"{name} {row[name]}" for name in key)
        raise TableError(f"{path}: {len(repeated)} repeated row(s), the first is {where}")


def _read_csv(path: Path) -> pd.DataFrame:
    try:
        header = _parse_csv(path, nrows=0)
        empty = {c: _EMPTY for c in header.columns if c != "model"}  # a checkpoint may be called "NA"
        text: dict[str, type] = {c: str for c in _TEXT_COLUMNS if c in header.columns}
        table = _parse_csv(path, dtype=text, keep_default_na=False, na_values=empty, low_memory=False)
    except Missing:
        raise TableError(f"{path}: not found; `qkscope run STUDY` writes it") from None
    except Unreadable as error:
        raise TableError(f"{path}: {error}") from None
    except pd.errors.EmptyDataError:
        raise TableError(f"{path}: is empty") from None
    except (pd.errors.ParserError, ValueError, OverflowError, OSError) as error:
        raise TableError(f"{path}: cannot be read as a table: {error}") from error
    if not isinstance(table.index, pd.RangeIndex):  # pandas then takes the first cells for names of rows
        raise TableError(f"{path}: cannot be read as a table: its rows have more cells than its header")
    return table


def _parse_csv(path: Path, **options: Any) -> pd.DataFrame:
    with opened(path, _MAX_TABLE) as file:
        table: pd.DataFrame = pd.read_csv(lines_of(file), encoding="utf-8", **options)
    return table


def _numbers(column: "pd.Series[Any]", path: Path) -> "pd.Series[Any]":
    numbers = pd.to_numeric(column, errors="coerce")
    bad = (numbers.isna() & column.notna()) | np.isinf(numbers.astype(float))
    if bad.any():
        place = int(np.flatnonzero(bad.to_numpy())[0])
        value = str(column.iloc[place])[:40]
        raise TableError(f"{path}: line {place + 2}: {column.name} is {value!r}, which is not a finite number")
    return numbers


def _checked(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Ranges that hold for every table; one pass over the columns, the first offending line is named."""
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
        inside = (window >= 1) & (window <= _LONGEST) & (window % 1 == 0)
        checks.append(("window", window.notna() & ~inside, "a number of tokens, or empty"))
    for name, bad, expected in checks:
        if bad.any():
            place = int(np.flatnonzero(bad.to_numpy())[0])
            value = str(table[name].iloc[place])[:40]
            raise TableError(f"{path}: line {place + 2}: {name} is {value!r}, expected {expected}")
    return table.astype(dict.fromkeys(_WHOLE, int))


def _with_layer_columns(pc0: pd.DataFrame, path: Path) -> pd.DataFrame:
    last_layer = pc0.groupby("model")["layer"].transform("max").to_numpy()
    computed = pd.Series(depth_of_layers(pc0["layer"].to_numpy(), last_layer), index=pc0.index)
    depth = pc0["depth"].fillna(computed) if "depth" in pc0.columns else computed
    rotary = pc0["rotary"].fillna(schema.UNKNOWN) if "rotary" in pc0.columns else schema.UNKNOWN
    window = pc0["window"] if "window" in pc0.columns else np.nan
    filled = pc0.assign(depth=depth.astype(float), rotary=rotary, window=window)
    known = {schema.ROTARY, schema.NOPE, schema.UNKNOWN}
    strange = sorted(set(filled["rotary"]) - known)
    if strange:
        raise TableError(f"{path}: column 'rotary' says {_listed(strange)}, expected {_listed(sorted(known))}")
    return filled.astype({"window": float, **dict.fromkeys(_NUMBERS, float)})


def _fill_window(heads: pd.DataFrame, checkpoints: Sequence[Checkpoint]) -> pd.DataFrame:
    contexts = {c.name: np.nan if c.context is None else float(c.context) for c in checkpoints}
    return heads.assign(window=heads["window"].fillna(heads["model"].map(contexts).astype(float)))


def _fill_matched_window(matched: pd.DataFrame, provenance: Mapping[str, Any]) -> pd.DataFrame:
    window = _whole(_mapping(provenance.get("analysis")).get("matched_window"))
    return matched.assign(window=matched["window"].fillna(np.nan if window is None else float(window)))


# --- provenance -----------------------------------------------------------------------------------


def _read_provenance(path: Path) -> Mapping[str, Any]:
    try:
        return parse_json(read_bytes(path, _MAX_PROVENANCE))
    except Missing:
        return {}
    except Unreadable as error:
        raise TableError(f"{path}: {error}") from None


def _order_checkpoints(
    heads: pd.DataFrame, provenance: Mapping[str, Any]
) -> tuple[tuple[Checkpoint, ...], tuple[str, ...]]:
    measured = list(dict.fromkeys(heads["model"]))
    recorded = provenance.get("checkpoints")
    records: dict[str, Mapping[str, Any]] = {}
    for entry in recorded if isinstance(recorded, list) else []:
        name = _mapping(entry).get("name")
        if isinstance(name, str) and name.strip():
            records.setdefault(name, _mapping(entry))
    strangers = [name for name in measured if records and name not in records]
    if strangers:
        raise TableError(
            f"{schema.QK_CSV} has checkpoints that {schema.PROVENANCE_JSON} does not have: "
            f"{_listed(strangers)}; the two files belong to different runs"
        )
    order = [name for name in records if name in set(measured)] or measured
    checkpoints = tuple(_checkpoint(name, records.get(name, {})) for name in order)
    left_out = provenance.get("checkpoints_left_out")
    names = [_text(_mapping(entry).get("name")) for entry in (left_out if isinstance(left_out, list) else [])]
    unmeasured = dict.fromkeys([*records, *(name for name in names if name)])
    return checkpoints, tuple(name for name in unmeasured if name not in set(measured))


def _checkpoint(name: str, record: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(
        name=name,
        label=_text(record.get("label")) or one_line(name) or "?",
        phase=_text(record.get("phase")),
        context=_whole(record.get("context")),
        record=record,
    )


def _are_different_models(heads: pd.DataFrame, checkpoints: Sequence[Checkpoint]) -> bool:
    """Whether rows are different models rather than stages of one: their layouts differ."""
    for key in ("model_type", "n_layers"):
        if len({str(c.record[key]) for c in checkpoints if c.record.get(key) is not None}) > 1:
            return True
    if any(c.record for c in checkpoints):  # one layout; a sample of heads may still differ by checkpoint
        return False
    layouts = {frozenset(zip(g["layer"], g["head"], strict=True)) for _, g in heads.groupby("model")}
    return len(layouts) > 1


def _span(checkpoints: Sequence[Checkpoint], different_models: bool) -> str:
    if different_models:
        return ACROSS_MODELS
    sources = {_text(c.record.get("model")) for c in checkpoints}
    one_source = len(sources) == 1 and None not in sources
    return DURING_TRAINING if one_source or any(c.phase for c in checkpoints) else ACROSS_CHECKPOINTS


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def one_line(text: str) -> str:
    """Text from a file as one printable line: control characters would break an SVG, a card or a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _text(value: object) -> str | None:
    """One line of text, or None for anything else."""
    return one_line(value) or None if isinstance(value, str) else None


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST:
        return None
    return int(value)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
