"""The rotated-mean prediction at a window, or with a base, that was never run: what the heads would be there.

A checkpoint's queries and keys before RoPE are those of its own context; only rotation and positions change. What
training at that window would do to the weights is not included: compare with the checkpoint that was trained there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from qkscope.errors import InputError
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.categories import CATEGORIES, classify
from qkscope.lenses.kind_of_layer import kind_name
from qkscope.lenses.rope.kernel import BEYOND, kernel_at, log_distances
from qkscope.lenses.rope.predict import RopeWindow, predict, predict_samples
from qkscope.lenses.rope.split import EntryLayer, entry_layer
from qkscope.lenses.rotated_moments import Array
from qkscope.lenses.rows import over_layers
from qkscope.moments.file import PreRopeFile
from qkscope.results.provenance import CheckpointRecord
from qkscope.stats.jackknife import FEWEST_GROUPS, jackknife_error, scaled_correlations

NUMBERS = ("r_q_rope", "r_q_rope_se", "r_k_rope", "r_k_rope_se", "explained_rope", "bias_rope")
COLUMNS = (
    "model", "layer", "depth", "head", "kv_head", "rotary", "layer_kind", "window", "base", *NUMBERS[:4],
    "category_rope", *NUMBERS[4:],
)  # fmt: skip
KERNEL_COLUMNS = ("model", "layer", "head", "window", "distance", "kernel", "kernel_scaled")
LONGEST = 2**24  # tokens of a window, as in a study
TOLERANCE = 1e-5  # of an angle: models compute powers in float32
DIGITS = 4  # of a base; more are not in float32 angles
NewRotation = Callable[[LayerFacts], Rotation | None]  # the rotation that a layer is predicted with


# --- rotations ----------------------------------------------------------------------------------------
# With P planes and base θ, plane p turns by θ^(-p/P) radians per token, times one factor for all where positions are
# interpolated. Angles that are stretched unevenly (YaRN, Llama 3) are of no one base.


def base_of(rotation: Rotation | None) -> float | None:
    """RoPE's base; None where nothing rotates, one plane alone could be of any, or the angles are not of one base."""
    if rotation is None or len(rotation.angles) < 2:
        return None
    angles = np.sort(rotation.angles)[::-1]
    count = len(angles)
    ratio = (angles[-1] / angles[0]) ** (1.0 / (count - 1))
    if not np.allclose(angles, angles[0] * ratio ** np.arange(count), rtol=TOLERANCE, atol=0.0) or ratio >= 1.0:
        return None
    base = ratio**-count
    rounded = float(f"{base:.{DIGITS}g}")
    return rounded if abs(rounded / base - 1.0) < 10.0**-DIGITS else float(base)


def one_base(file: PreRopeFile) -> float | None:
    """The base of all layers with RoPE; None where they have several, or none, or it is not known of one."""
    bases = {base_of(facts.rotation) for facts in file.layers.values() if facts.rotary != "nope"}
    return next(iter(bases)) if len(bases) == 1 else None


def rebased(rotation: Rotation, base: float) -> Rotation | None:
    """The same planes with the angles of another base; None where the present ones are not of one base."""
    count = len(rotation.angles)
    if count > 1 and base_of(rotation) is None:
        return None
    largest = max(rotation.angles)
    places = np.argsort(np.argsort(-np.array(rotation.angles), kind="stable"), kind="stable")
    angles = np.asarray(largest * base ** (-places / count), dtype=np.float32)  # as models keep them
    return replace(rotation, angles=tuple(float(angle) for angle in angles))


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
    heads, kernels = (pd.concat([part[i] for part in parts], ignore_index=True) for i in (0, 1))
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
