"""The rotated-mean prediction at a window, or with a base, that was never run: what the heads would be there.

A checkpoint's queries and keys before RoPE are those of its own context; only rotation and positions change. What
training at that window would do to the weights is not included: compare with the checkpoint that was trained there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.errors import InputError
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.categories import CATEGORIES, classify
from qkscope.lenses.kind_of_layer import kind_name
from qkscope.lenses.rope.kernel import BEYOND, kernel_at, log_distances
from qkscope.lenses.rope.predict import RopeWindow, predict, predict_samples
from qkscope.lenses.rope.spectrum import base_of, rebased
from qkscope.lenses.rope.split_sums import EntryLayer, entry_layer
from qkscope.lenses.rows import over_layers
from qkscope.moments.file import PreRopeFile
from qkscope.results.provenance import CheckpointRecord
from qkscope.stats.jackknife import FEWEST_GROUPS, jackknife_error, scaled_correlations

COLUMNS = (
    "model", "layer", "depth", "head", "kv_head", "rotary", "layer_kind", "window", "base", "r_q_rope", "r_q_rope_se",
    "r_k_rope", "r_k_rope_se", "category_rope", "explained_rope", "bias_rope",
)  # fmt: skip
KERNEL_COLUMNS = ("model", "layer", "head", "window", "distance", "kernel", "kernel_scaled")
LONGEST = 2**24  # tokens of a window, as in a study
Turned = Callable[[LayerFacts], Rotation | None]  # the rotation that a layer is predicted with


@dataclass(frozen=True)
class Extrapolated:
    """Every head of a checkpoint at a window and rotation, and means over heads with errors over documents."""

    heads: pd.DataFrame
    kernels: pd.DataFrame
    means: dict[str, tuple[float, float]]  # r_q, r_k and share position-dominated, each with its error
    left_out: int  # heads without a prediction


def with_base(file: PreRopeFile, asked: Mapping[float | None, float], where: str) -> Turned:
    """Rotations of another base: `asked` is {old base: new base}, or {None: new base} where layers have one base only.

    InputError where measured angles are not those of a base, where it is not clear which, or where the checkpoint's
    config says another base than its angles do.
    """
    turning = {layer: facts.rotation for layer, facts in file.layers.items() if facts.rotation is not None}
    base_of_layer = {layer: base_of(rotation) for layer, rotation in turning.items()}
    odd = [layer for layer, base in base_of_layer.items() if base is None and len(turning[layer].angles) > 1]
    other = "take the rotation of a checkpoint that has it with --rotation-of NAME"
    if odd:
        raise InputError(
            f"{where}: the angles of layer {odd[0]} are not those of one RoPE base (YaRN and Llama 3 stretch theirs "
            f"unevenly), so angles of another base cannot be worked out; {other}"
        )
    if not turning:
        raise InputError(f"{where}: no layer has a measured rotation, so there is no base to change")
    bases = sorted({base for base in base_of_layer.values() if base is not None})
    _require_config_base(CheckpointRecord.read(file.provenance), bases, where, other)
    if None in asked and len(bases) > 1:
        listed = ", ".join(f"{base:g}" for base in bases)
        raise InputError(f"{where}: its layers have several bases ({listed}); write OLD=NEW for those that change")
    unknown = [old for old in asked if old is not None and not any(np.isclose(old, base, rtol=1e-3) for base in bases)]
    if unknown:
        raise InputError(f"{where}: no layer has base {unknown[0]:g}; there is {', '.join(f'{b:g}' for b in bases)}")

    def turned(facts: LayerFacts) -> Rotation | None:
        base, rotation = base_of_layer.get(facts.layer), facts.rotation
        for old, new in asked.items():
            if rotation is not None and (old is None or (base is not None and np.isclose(old, base, rtol=1e-3))):
                return rebased(rotation, new)
        return rotation

    return turned


def _require_config_base(record: CheckpointRecord, bases: list[float], where: str, other: str) -> None:
    """Refuse angles whose base is another than the config's: then powers are not spaced as a base would have them."""
    theta = record.rope_theta
    if isinstance(theta, int | float) and bases and not any(np.isclose(theta, base, rtol=1e-3) for base in bases):
        raise InputError(f"{where}: its angles look like base {bases[0]:g}, its config says {theta:g}; {other}")


def with_rotation_of(file: PreRopeFile, name: str, where: str) -> Turned:
    """The rotations of another checkpoint's layers."""

    def turned(facts: LayerFacts) -> Rotation | None:
        other = file.layers.get(facts.layer)
        if other is None or other.head_dim != facts.head_dim:
            raise InputError(f"{where}: {name!r} has no layer {facts.layer} of width {facts.head_dim}")
        if other.rotary != "nope" and other.rotation is None:
            raise InputError(f"{where}: the rotation of layer {facts.layer} of {name!r} could not be measured")
        return other.rotation

    return turned


def extrapolate(
    file: PreRopeFile, *, name: str, window: int | None, rotation: Turned | None, skip: int, context: int | None = None
) -> Extrapolated:
    """Every head of a checkpoint over a window (its own context by default) with other rotations (its own).

    `context` is the checkpoint's own, if it is shorter than what was captured.
    """
    if window is not None and not 2 <= window - skip <= LONGEST:
        raise InputError(f"a window of {window} tokens: 2 to {LONGEST:,} tokens can be predicted")
    own, groups = context or file.layout.context, _groups(file)
    stop = window or own
    last = CheckpointRecord.read(file.provenance).n_layers or max(file.layers) + 1

    def of_layer(layer: int) -> _LayerFound:
        facts = file.layers[layer]
        at = entry_layer(file, layer, range(facts.q_heads), own, skip, groups)
        turned = facts.rotation if rotation is None else rotation(facts)
        return _LayerFound.of(facts, at, turned, stop, skip)

    parts = over_layers(of_layer, file.layers)
    heads = pd.concat([part.heads.assign(depth=part.facts.layer / max(last - 1, 1)) for part in parts])
    kernels = pd.concat([part.kernels for part in parts])
    known = heads["r_q_rope"].notna()
    if not known.any():
        raise InputError(f"checkpoint {name!r}: nothing was summed before rotation, or no rotation could be measured")
    names = np.where(known, classify(heads["r_q_rope"].to_numpy(), heads["r_k_rope"].to_numpy()), CATEGORIES[-1])
    heads = heads.assign(model=name, window=stop, category_rope=names)
    return Extrapolated(
        heads[list(COLUMNS)].reset_index(drop=True),
        kernels.assign(model=name, window=stop)[list(KERNEL_COLUMNS)].reset_index(drop=True),
        _means(parts),
        int((~known).sum()),
    )


def _groups(file: PreRopeFile) -> tuple[int, ...]:
    """Document groups that have tokens; none where they are too few for errors."""
    counts = file.layer(next(iter(file.layers))).n
    filled = np.flatnonzero(counts["q"][0].sum(axis=0)) if counts else np.zeros(0, dtype=np.intp)
    return tuple(int(group) for group in filled) if len(filled) >= FEWEST_GROUPS else ()


@dataclass(frozen=True)
class _LayerFound:
    """One layer's heads and kernels, and draws of r_q and r_k for errors of means."""

    facts: LayerFacts
    heads: pd.DataFrame
    kernels: pd.DataFrame
    draws: tuple[np.ndarray, np.ndarray] | None  # (1 + groups, heads), all documents first

    @classmethod
    def of(cls, facts: LayerFacts, at: EntryLayer | None, turned: Rotation | None, stop: int, skip: int) -> _LayerFound:
        kind = kind_name(facts.rotary, facts.attention, facts.attention_window)
        who = {"layer": facts.layer, "head": range(facts.q_heads), "rotary": facts.rotary, "layer_kind": kind}
        heads = pd.DataFrame({**who, "kv_head": [facts.kv_head(head) for head in range(facts.q_heads)]})
        names = ("r_q_rope", "r_q_rope_se", "r_k_rope", "r_k_rope_se", "explained_rope", "bias_rope")
        if at is None or at.rest is None:
            return cls(facts, heads.assign(**dict.fromkeys(names, np.nan), base=np.nan), pd.DataFrame(), None)
        rest, window = at.rest.under(turned), RopeWindow.plain(stop, skip, facts.q_heads)
        whole, drawn, errors = predict(rest, window), [], []
        samples = predict_samples(rest.left, window, whole) if at.sizes else None
        for name in ("r_q", "r_k"):
            value, without = getattr(whole, name), np.zeros((0, facts.q_heads))
            if samples is not None:
                without = getattr(samples, name)
            errors.append(jackknife_error(value, without, at.sizes, "fisher"))
            draws = scaled_correlations(value, without, at.sizes) if at.sizes else without
            drawn.append(np.concatenate([value[None], draws]))
        values = (whole.r_q, errors[0], whole.r_k, errors[1], whole.explained, whole.bias)
        base = base_of(turned)
        heads = heads.assign(**dict(zip(names, values, strict=True)), base=np.nan if base is None else base)
        distances = log_distances(BEYOND * stop)
        kernel = kernel_at(rest, distances)
        scale = np.nan if facts.score_scale is None else facts.score_scale
        kernels = pd.DataFrame({
            "layer": facts.layer, "head": np.repeat(np.arange(facts.q_heads), len(distances)),
            "distance": np.tile(distances, facts.q_heads), "kernel": kernel.ravel(),
            "kernel_scaled": scale * kernel.ravel(),
        })  # fmt: skip
        return cls(facts, heads, kernels, (drawn[0], drawn[1]))


def _means(parts: list[_LayerFound]) -> dict[str, tuple[float, float]]:
    """Means over heads that have a prediction, with errors over documents (NaN where there are none)."""
    known = [part.draws for part in parts if part.draws is not None]
    r_q, r_k = (np.concatenate([draws[i] for draws in known], axis=1) for i in (0, 1))
    categories = np.where(np.isnan(r_q) | np.isnan(r_k), np.nan, classify(r_q, r_k) == CATEGORIES[0])
    with_errors = {}
    for name, values in (("r_q", r_q), ("r_k", r_k), ("position_dominated", categories)):
        means = np.nanmean(values, axis=1)
        error = float(np.sqrt(((means[1:] - means[0]) ** 2).mean())) if len(means) > 1 else float("nan")
        with_errors[name] = (float(means[0]), error)
    return with_errors
