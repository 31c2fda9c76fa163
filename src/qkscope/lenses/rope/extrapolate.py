"""The rotated-mean prediction at a window, or with a base, that was never run: what the heads would be there.

A checkpoint's queries and keys before RoPE are those of its own context; only rotation and positions change. What
training at that window would do to the weights is not included: compare with the checkpoint that was trained there.
Of a results folder, predictions stand next to what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.errors import InputError, TableError
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.categories import CATEGORIES, classify
from qkscope.lenses.kind_of_layer import kind_name
from qkscope.lenses.rope.kernel import BEYOND, kernel_at, log_distances
from qkscope.lenses.rope.predict import RopeWindow, base_of, one_base, predict, predict_samples, rebased
from qkscope.lenses.rope.split import EntryLayer, entry_layer
from qkscope.lenses.rotated_moments import Array
from qkscope.lenses.rows import over_layers
from qkscope.moments.file import PreRopeFile
from qkscope.results.folder import MOMENTS_SUFFIX, entries, moments_folder, moments_path
from qkscope.results.provenance import CheckpointRecord
from qkscope.results.read import ResultsFolder, load_results
from qkscope.stats.jackknife import FEWEST_GROUPS, jackknife_error, scaled_correlations

NUMBERS = ("r_q_rope", "r_q_rope_se", "r_k_rope", "r_k_rope_se", "explained_rope", "bias_rope")
COLUMNS = (
    "model", "layer", "depth", "head", "kv_head", "rotary", "layer_kind", "window", "base", *NUMBERS[:4],
    "category_rope", *NUMBERS[4:],
)  # fmt: skip
KERNEL_COLUMNS = ("model", "layer", "head", "window", "distance", "kernel", "kernel_scaled")
KEY, MEASURED = ["layer", "head"], ["r_q", "r_k", "category"]
LONGEST = 2**24  # tokens of a window, as in a study
NewRotation = Callable[[LayerFacts], Rotation | None]  # the rotation that a layer is predicted with


# --- rotations ----------------------------------------------------------------------------------------


def with_base(file: PreRopeFile, asked: Mapping[float | None, float], where: str) -> NewRotation:
    """Rotations of another base: `asked` is {old base: new base}, or {None: new base} where layers have one base only.

    InputError where measured angles are not those of a base, where it is not clear which, or where the checkpoint's
    config says another base than its angles do.
    """
    rotations = {layer: facts.rotation for layer, facts in file.layers.items() if facts.rotation is not None}
    base_of_layer = {layer: base_of(rotation) for layer, rotation in rotations.items()}
    odd = [layer for layer, base in base_of_layer.items() if base is None and len(rotations[layer].angles) > 1]
    other = "take the rotation of a checkpoint that has it with --rotation-of NAME"
    if odd:
        raise InputError(
            f"{where}: the angles of layer {odd[0]} are not those of one RoPE base (YaRN and Llama 3 stretch theirs "
            f"unevenly), so angles of another base cannot be worked out; {other}"
        )
    if not rotations:
        raise InputError(f"{where}: no layer has a measured rotation, so there is no base to change")
    bases = sorted({base for base in base_of_layer.values() if base is not None})
    theta = CheckpointRecord.read(file.provenance).rope_theta
    # Powers are not spaced as a base would have them where the config's base is another.
    if isinstance(theta, int | float) and bases and not any(np.isclose(theta, base, rtol=1e-3) for base in bases):
        raise InputError(f"{where}: its angles look like base {bases[0]:g}, its config says {theta:g}; {other}")
    if None in asked and len(bases) > 1:
        listed = ", ".join(f"{base:g}" for base in bases)
        raise InputError(f"{where}: its layers have several bases ({listed}); write OLD=NEW for those that change")
    unknown = [old for old in asked if old is not None and not any(np.isclose(old, base, rtol=1e-3) for base in bases)]
    if unknown:
        raise InputError(f"{where}: no layer has base {unknown[0]:g}; there is {', '.join(f'{b:g}' for b in bases)}")

    def new(facts: LayerFacts) -> Rotation | None:
        base, rotation = base_of_layer.get(facts.layer), facts.rotation
        for old, target in asked.items():
            if rotation is not None and (old is None or (base is not None and np.isclose(old, base, rtol=1e-3))):
                return rebased(rotation, target)
        return rotation

    return new


def with_rotation_of(file: PreRopeFile, name: str, where: str) -> NewRotation:
    """The rotations of another checkpoint's layers."""

    def new(facts: LayerFacts) -> Rotation | None:
        other = file.layers.get(facts.layer)
        if other is None or other.head_dim != facts.head_dim:
            raise InputError(f"{where}: {name!r} has no layer {facts.layer} of width {facts.head_dim}")
        if other.rotary != "nope" and other.rotation is None:
            raise InputError(f"{where}: the rotation of layer {facts.layer} of {name!r} could not be measured")
        return other.rotation

    return new


# --- predictions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extrapolated:
    """Every head of a checkpoint at a window and rotation, and means over heads with errors over documents."""

    heads: pd.DataFrame
    kernels: pd.DataFrame
    means: dict[str, tuple[float, float]]  # r_q, r_k and share position-dominated, each with its error
    left_out: int  # heads without a prediction


def extrapolate(
    file: PreRopeFile,
    *,
    name: str,
    window: int | None,
    rotation: NewRotation | None,
    skip: int,
    context: int | None = None,
) -> Extrapolated:
    """Every head of a checkpoint over a window (its own context by default) with other rotations (its own).

    `context` is the checkpoint's own, if it is shorter than what was captured.
    """
    if window is not None and not 2 <= window - skip <= LONGEST:
        raise InputError(f"a window of {window} tokens: 2 to {LONGEST:,} tokens can be predicted")
    own = context or file.layout.context
    stop = window or own
    counts = file.layer(next(iter(file.layers))).n
    filled = np.flatnonzero(counts["q"][0].sum(axis=0)).tolist() if counts else []
    groups = filled if len(filled) >= FEWEST_GROUPS else []  # else too few for errors

    def of_layer(layer: int) -> tuple[pd.DataFrame, pd.DataFrame, Array | None]:
        facts = file.layers[layer]
        at = entry_layer(file, layer, range(facts.q_heads), own, skip, groups)
        return _layer(facts, at, facts.rotation if rotation is None else rotation(facts), stop, skip)

    parts = over_layers(of_layer, file.layers)
    last = CheckpointRecord.read(file.provenance).n_layers or max(file.layers) + 1
    heads = pd.concat([each for each, _, _ in parts], ignore_index=True)
    kernels = pd.concat([each for _, each, _ in parts], ignore_index=True)
    known = heads["r_q_rope"].notna()
    if not known.any():
        raise InputError(f"checkpoint {name!r}: nothing was summed before rotation, or no rotation could be measured")
    names = np.where(known, classify(heads["r_q_rope"].to_numpy(), heads["r_k_rope"].to_numpy()), CATEGORIES[-1])
    heads = heads.assign(model=name, window=stop, category_rope=names, depth=heads["layer"] / max(last - 1, 1))
    r_q, r_k = np.concatenate([draws for _, _, draws in parts if draws is not None], axis=2).swapaxes(0, 1)
    dominated = np.where(np.isnan(r_q) | np.isnan(r_k), np.nan, classify(r_q, r_k) == CATEGORIES[0])
    means = {}
    for quantity, values in (("r_q", r_q), ("r_k", r_k), ("position_dominated", dominated)):
        whole, *drawn = np.nanmean(values, axis=1)
        error = np.sqrt(((np.array(drawn) - whole) ** 2).mean()) if drawn else np.nan
        means[quantity] = float(whole), float(error)
    kernels = kernels.assign(model=name, window=stop)[list(KERNEL_COLUMNS)]
    return Extrapolated(heads[list(COLUMNS)], kernels, means, int((~known).sum()))


def _layer(
    facts: LayerFacts, at: EntryLayer | None, rotation: Rotation | None, stop: int, skip: int
) -> tuple[pd.DataFrame, pd.DataFrame, Array | None]:
    """One layer's heads and kernels, and r_q and r_k with draws for errors of means (1 + groups, 2, heads)."""
    count = facts.q_heads
    kind, kv_heads = kind_name(facts.rotary, facts.attention, facts.attention_window), map(facts.kv_head, range(count))
    heads = pd.DataFrame({"layer": facts.layer, "head": range(count), "rotary": facts.rotary, "layer_kind": kind,
                          "kv_head": list(kv_heads), **dict.fromkeys(NUMBERS, np.nan), "base": np.nan})  # fmt: skip
    if at is None:
        return heads, pd.DataFrame(), None
    rest, window = at.rest.under(rotation), RopeWindow.plain(stop, skip, count)
    whole = predict(rest, window)
    values = np.stack([whole.r_q, whole.r_k])
    draws = without = np.zeros((0, *values.shape))
    if at.sizes:
        samples = predict_samples(rest, window, whole)
        without = np.stack([samples.r_q, samples.r_k], axis=1)
        draws = scaled_correlations(values, without, at.sizes)
    errors = jackknife_error(values, without, at.sizes, "fisher")
    numbers = (whole.r_q, errors[0], whole.r_k, errors[1], whole.explained, whole.bias)
    base = base_of(rotation)
    heads = heads.assign(**dict(zip(NUMBERS, numbers, strict=True)), base=np.nan if base is None else base)
    distances = log_distances(BEYOND * stop)
    kernel = kernel_at(rest, distances).ravel()
    scale = np.nan if facts.score_scale is None else facts.score_scale
    kernels = {"head": np.repeat(np.arange(count), len(distances)), "distance": np.tile(distances, count)}
    kernels |= {"kernel": kernel, "kernel_scaled": scale * kernel}
    return heads, pd.DataFrame({"layer": facts.layer, **kernels}), np.concatenate([values[None], draws])


# --- a results folder ----------------------------------------------------------------------------------


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
