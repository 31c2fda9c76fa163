"""Predictions for the checkpoints of a results folder where they were not run, next to what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from qkscope.errors import InputError, TableError
from qkscope.lenses.categories import CATEGORIES, classify
from qkscope.lenses.rope.extrapolate import Extrapolated, extrapolate, one_base, with_base, with_rotation_of
from qkscope.moments.file import PreRopeFile
from qkscope.results.folder import MOMENTS_SUFFIX, entries, moments_folder, moments_path
from qkscope.results.read import ResultsFolder, load_results

KEY, MEASURED = ["layer", "head"], ["r_q", "r_k", "category"]


@dataclass(frozen=True)
class PredictionRequest:
    """What to predict: a window, a base (or bases, old to new), or the rotation of another checkpoint."""

    window: int | None = None
    bases: Mapping[float | None, float] | None = None
    rotation_of: str | None = None

    def __post_init__(self) -> None:
        if self.bases and self.rotation_of is not None:
            raise InputError("the rotation is either of another base or of another checkpoint, not both")
        bad = [base for base in (self.bases or {}).values() if not 1.0 < base < 1e30]
        if bad:
            raise InputError(f"a RoPE base is above 1, not {bad[0]:g}")


@dataclass(frozen=True)
class CheckpointPrediction:
    """One checkpoint: as measured, the rotated-mean prediction at its native context, and the one asked for."""

    name: str
    context: int
    base: float | None  # None where there is no one base
    measured: dict[str, float]  # empty where the folder has no tables
    heads: pd.DataFrame  # the predicted heads, with r_q, r_k and category as measured at the native context
    own: Extrapolated
    predicted: Extrapolated
    trained: tuple[str, dict[str, float]] | None  # another checkpoint that was run so: its name and measurement


def predict_folder(
    folder: Path, names: Sequence[str], request: PredictionRequest, skip: int | None = None
) -> list[CheckpointPrediction]:
    """The predictions for these checkpoints of a results folder (all by default)."""
    try:
        results = load_results(folder)
        known, analysis = list(results.study.names), results.provenance.analysis
    except TableError:  # no tables (yet): the checkpoints that have moments
        results, analysis = None, None
        paths = [Path(entry.name) for entry in entries(moments_folder(folder))]
        known = sorted(path.stem for path in paths if path.suffix == MOMENTS_SUFFIX and not path.name.startswith("."))
    wanted = list(names) or known
    for name in (*wanted, *([request.rotation_of] if request.rotation_of else [])):
        if not moments_path(folder, name).is_file():
            raise InputError(f"{folder}: no moments of a checkpoint {name!r}; there is {', '.join(known) or 'none'}")
    there = [name for name in dict.fromkeys((*known, *wanted)) if moments_path(folder, name).is_file()]
    files = {name: PreRopeFile(moments_path(folder, name)) for name in there}
    start = skip if skip is not None else (analysis.skip_positions if analysis else None) or 0
    return [_answer(name, files, request, results, start) for name in wanted]


def _answer(
    name: str, files: Mapping[str, PreRopeFile], request: PredictionRequest, results: ResultsFolder | None, skip: int
) -> CheckpointPrediction:
    file, where = files[name], f"checkpoint {name!r}"
    rotation = None
    if request.bases:
        rotation = with_base(file, request.bases, where)
    elif request.rotation_of is not None:
        rotation = with_rotation_of(files[request.rotation_of], request.rotation_of, where)
    context = _context(results, name, file)
    predicted = extrapolate(file, name=name, window=request.window, rotation=rotation, skip=skip, context=context)
    own = extrapolate(file, name=name, window=None, rotation=None, skip=skip, context=context)
    measured = _measured_heads(results, name, context)
    heads, place = predicted.heads.merge(measured, on=KEY, how="left"), list(predicted.heads).index("r_q_rope")
    heads = heads[[*predicted.heads.columns[:place], *MEASURED, *predicted.heads.columns[place:]]]
    trained = _trained(name, files, predicted, results)
    return CheckpointPrediction(name, context, one_base(file), _means(measured), heads, own, predicted, trained)


def _context(results: ResultsFolder | None, name: str, file: PreRopeFile) -> int:
    """A checkpoint's own context; a study may use the first positions of longer sums."""
    known = [] if results is None else results.study.checkpoints
    context = next((entry.context for entry in known if entry.name == name), None)
    return context if context in file.layout.edges else file.layout.context


def _measured_heads(results: ResultsFolder | None, name: str, window: int) -> pd.DataFrame:
    """r_q, r_k and category of each measured head; no rows where the folder has no tables."""
    if results is None:
        return pd.DataFrame(columns=[*KEY, *MEASURED]).astype(dict.fromkeys(KEY, "int64"))
    here = results.heads[(results.heads["model"] == name) & (results.heads["window"] == window)]
    here = here[[*KEY, *MEASURED[:2]]].astype(dict.fromkeys(KEY, "int64"))
    return here.assign(category=classify(here["r_q"].to_numpy(), here["r_k"].to_numpy()))


def _means(heads: pd.DataFrame) -> dict[str, float]:
    """Means over heads as measured; empty where nothing was."""
    if heads.empty:
        return {}
    dominated = float((heads["category"] == CATEGORIES[0]).mean())
    return {key: float(heads[key].mean()) for key in ("r_q", "r_k")} | {"position_dominated": dominated}


def _trained(
    name: str, files: Mapping[str, PreRopeFile], predicted: Extrapolated, results: ResultsFolder | None
) -> tuple[str, dict[str, float]] | None:
    """The first other checkpoint that was run at this window with this base, and what was measured of it."""
    window = int(predicted.heads["window"].iloc[0])
    bases = set(predicted.heads["base"].dropna())
    for other, file in files.items():
        base = one_base(file)
        if other != name and _context(results, other, file) == window and base is not None and bases == {base}:
            measured = _means(_measured_heads(results, other, window))
            if measured:
                return other, measured
    return None


def head_rows(answers: Sequence[CheckpointPrediction]) -> pd.DataFrame:
    """Every head of every checkpoint, measured and predicted."""
    return pd.concat([each.heads for each in answers], ignore_index=True)


def kernel_rows(answers: Sequence[CheckpointPrediction]) -> pd.DataFrame:
    """Every head's kernel."""
    return pd.concat([each.predicted.kernels for each in answers], ignore_index=True)
