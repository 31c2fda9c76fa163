"""Does each layer rotate what the model's config says? Measured angles and scale next to those that are declared.

Measured: by the probe, from what reaches the kernel (`capture/rotation.py`). Declared: the rope parameters of the
config, through the functions that transformers itself computes inverse frequencies with (`ROPE_INIT_FUNCTIONS`), or the
metadata of a GGUF file. Both are compared plane by plane.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import ModelError, first_line
from qkscope.layers import LayerFacts, Rotation
from qkscope.text import short_number

CLOSE = 1e-4  # relative difference of angles: half precision tables of cos and sin resolve no less
LAYER_TYPES = {"full": "full_attention", "sliding": "sliding_attention", "chunked": "chunked_attention"}
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Declared:
    """What is declared of a layer's rotation; `angles` empty: none."""

    words: str
    angles: Array
    scale: float = 1.0


@dataclass(frozen=True)
class LayerCheck:
    """One layer: what it rotates by, what is declared, and in which way they differ ("" where they do not)."""

    facts: LayerFacts
    measured: str
    declared: str
    problem: str

    def same_as(self, other: LayerCheck) -> bool:
        """Whether all but the number of the layer is equal."""
        return _without_number(self) == _without_number(other)


def _without_number(check: LayerCheck) -> tuple[object, ...]:
    facts = check.facts
    kind = facts.rotary, facts.attention, facts.attention_window, facts.rotation
    return (*kind, check.measured, check.declared, check.problem)


def check_rotations(
    layers: Iterable[LayerFacts],
    config: Any,
    context: int,
    *,
    unmeasured: Mapping[int, str] | None = None,
    metadata: Declared | None = None,
) -> list[LayerCheck]:
    """Every layer against the config (a text model's), and against a GGUF file's metadata if that is given."""
    checks = []
    for facts in layers:
        declared: Declared | None = None
        try:
            declared = declared_rotation(config, facts, context)
            words = declared.words
        except ModelError as error:
            words = str(error)
        measured = measured_words(facts, (unmeasured or {}).get(facts.layer, ""))
        problem = "" if declared is None else difference(facts, declared)
        if metadata is not None and not problem and facts.rotary == "rotary":
            problem = difference(facts, metadata)
            words = f"{words}; GGUF: {metadata.words}" if problem else words
        checks.append(LayerCheck(facts, measured, words, problem))
    return checks


def compare_rotations(ours: Sequence[LayerFacts], others: Sequence[LayerFacts]) -> list[LayerCheck]:
    """Every layer against the same layer of another model, whose rotation stands for what is declared."""
    by_layer, checks = {facts.layer: facts for facts in others}, []
    for facts in ours:
        other = by_layer.get(facts.layer)
        if other is None:
            checks.append(LayerCheck(facts, measured_words(facts), "no such layer", "only one model has it"))
            continue
        problem = difference(facts, _as_declared(other))
        checks.append(LayerCheck(facts, measured_words(facts), measured_words(other), problem))
    missing = sorted(set(by_layer) - {facts.layer for facts in ours})
    checks += [
        LayerCheck(by_layer[n], "no such layer", measured_words(by_layer[n]), "only one model has it") for n in missing
    ]
    return checks


def _as_declared(facts: LayerFacts) -> Declared:
    rotation = facts.rotation
    if rotation is None:
        return Declared(measured_words(facts), np.zeros(0))
    return Declared(measured_words(facts), np.array(rotation.angles), rotation.scale)


def layer_groups(checks: Sequence[LayerCheck]) -> list[tuple[str, LayerCheck]]:
    """Identical layers together, with their numbers as text: "0-2, 4-6"."""
    groups: list[list[LayerCheck]] = []
    for check in checks:
        group = next((each for each in groups if each[0].same_as(check)), None)
        groups.append([check]) if group is None else group.append(check)
    return [(_ranges([each.facts.layer for each in group]), group[0]) for group in groups]


def _ranges(numbers: Sequence[int]) -> str:
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# -- measured ----------------------------------------------------------------------------------------------


def measured_words(facts: LayerFacts, why: str = "") -> str:
    """What a layer rotates by: planes, base where one gives all angles, range of slowing otherwise, scale."""
    if facts.rotary == "nope":
        return "no rotation"
    if facts.rotation is None:
        return f"not measured: {why}" if why else "not measured"
    return rotation_words(facts.rotation)


def rotation_words(rotation: Rotation) -> str:
    """A rotation in words."""
    angles = np.sort(np.array(rotation.angles))[::-1]
    planes = f"{len(angles)} planes"
    base = single_base(angles)
    if base is not None:
        slowed = f" slowed {1 / angles[0]:.3g} times" if abs(angles[0] - 1.0) > CLOSE else ""
        how = f"base {short_base(base)}{slowed}"
    else:
        how = f"{2 * np.pi / angles[0]:.3g} to {short_number(2 * np.pi / angles[-1])} tokens per turn, no single base"
    scale = "" if abs(rotation.scale - 1.0) <= CLOSE else f", cos and sin times {rotation.scale:.4g}"
    return f"{planes}, {how}{scale}"


def single_base(angles: Array) -> float | None:
    """The base b with angles proportional to b^(-i / planes); None if there is none, or only one plane."""
    if len(angles) < 2:
        return None
    slope = np.polyfit(np.arange(len(angles)), np.log(angles), 1)[0]
    fitted = angles[0] * np.exp(slope * np.arange(len(angles)))
    return float(np.exp(-slope * len(angles))) if np.abs(fitted / angles - 1.0).max() < 10 * CLOSE else None


def short_base(base: float) -> str:
    """A base with thousands separated, rounded to four digits."""
    digits = 10.0 ** (np.floor(np.log10(base)) - 3)
    rounded = round(base / digits) * digits
    return f"{rounded:,.0f}" if rounded >= 1000 else f"{rounded:.4g}"


# -- declared ----------------------------------------------------------------------------------------------


def declared_rotation(config: Any, facts: LayerFacts, context: int) -> Declared:
    """What a config says of one layer; ModelError where it says nothing that can be computed."""
    if _declares_nope(config, facts.layer):
        return Declared("no rotation", np.zeros(0))
    parameters = rope_parameters(config, facts)
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    base = parameters.get("rope_theta")
    if base is None:
        raise ModelError("the config states no RoPE base")
    angles, scale = _inverse_frequencies(config, facts, parameters, kind, context)
    factor = parameters.get("factor")
    words = f"{kind}, base {short_base(float(base))}" + (f", factor {factor:g}" if factor else "")
    words += "" if abs(scale - 1.0) <= CLOSE else f", cos and sin times {scale:.4g}"
    return Declared(words, angles[angles > 0], scale)


def _declares_nope(config: Any, layer: int) -> bool:
    rotating: Sequence[int] = getattr(config, "no_rope_layers", None) or ()  # 1 where a layer rotates, despite the name
    return layer < len(rotating) and not rotating[layer]


def rope_parameters(config: Any, facts: LayerFacts) -> Mapping[str, Any]:
    """The rope parameters that a config states for a layer.

    A config may state them once, or once for each layer type. One that states both (a flat set in a family that reads
    them by layer type) is ambiguous: the flat set is what its author wrote, since defaults are added by layer type.
    """
    stated: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in stated or "type" in stated or "rope_theta" in stated:
        return {key: value for key, value in stated.items() if not isinstance(value, Mapping)}
    types = getattr(config, "layer_types", None) or []
    layer_type = types[facts.layer] if facts.layer < len(types) else LAYER_TYPES[facts.attention]
    chosen = stated.get(layer_type)
    if not isinstance(chosen, Mapping):
        raise ModelError(f"the config states no rope parameters for {layer_type.replace('_', ' ')} layers")
    return chosen


def _inverse_frequencies(
    config: Any, facts: LayerFacts, parameters: Mapping[str, Any], kind: str, context: int
) -> tuple[Array, float]:
    """Angles per token and scale of cos and sin."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    share = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    width = int((getattr(config, "qk_rope_head_dim", None) or facts.head_dim * share) // 2 * 2)
    if kind == "default":
        return float(parameters["rope_theta"]) ** (-np.arange(0, width, 2) / width), 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ModelError(f"the config's rope type {kind!r} is not known to the installed transformers")
    copy = deepcopy(config)
    copy.rope_parameters = {"rope_type": kind, **parameters}
    if getattr(copy, "head_dim", None) is None and not getattr(copy, "qk_rope_head_dim", None):
        copy.head_dim = facts.head_dim
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](copy, device=None, seq_len=context)
    except Exception as error:
        raise ModelError(
            f"its {kind} parameters cannot be computed ({type(error).__name__}: {first_line(error)})"
        ) from error
    return frequencies.double().numpy(), float(scale)


def gguf_rotation(fields: Mapping[str, Any], head_dim: int) -> Declared | None:
    """What a GGUF file's metadata declare, for types that state angles without further tables; None otherwise."""
    architecture = fields.get("general.architecture")

    def value(name: str) -> Any:
        return fields.get(f"{architecture}.rope.{name}")

    base, width = value("freq_base"), value("dimension_count") or head_dim
    kind, factor = value("scaling.type") or "none", value("scaling.factor")
    if base is None or kind not in ("none", "linear"):
        return None
    angles = float(base) ** (-np.arange(0, int(width), 2) / int(width))
    slowed = float(factor) if kind == "linear" and factor else 1.0
    return Declared(f"{kind}, base {short_base(float(base))}", angles / slowed)


# -- compared ----------------------------------------------------------------------------------------------


def difference(facts: LayerFacts, declared: Declared) -> str:
    """How a layer's rotation differs from a declared one, in words; "" where it does not, or is not known."""
    if facts.rotary == "nope":
        return "declared to rotate, but does not" if len(declared.angles) else ""
    rotation = facts.rotation
    if rotation is None:
        return ""
    if not len(declared.angles):
        return "rotates, but is declared not to"
    angles, expected = np.sort(np.array(rotation.angles))[::-1], np.sort(declared.angles)[::-1]
    if len(angles) != len(expected):
        return f"{len(angles)} planes rotate, {len(expected)} are declared"
    ratio = angles / expected
    worst = int(np.abs(ratio - 1.0).argmax())
    problems = []
    if abs(ratio[worst] - 1.0) > CLOSE:
        faster = ratio[worst] > 1.0
        times = ratio[worst] if faster else 1.0 / ratio[worst]
        count = int((np.abs(ratio - 1.0) > CLOSE).sum())
        problems.append(
            f"{count} of {len(angles)} planes differ, up to {times:.3g} times {'faster' if faster else 'slower'}"
        )
    if abs(rotation.scale / declared.scale - 1.0) > CLOSE:
        problems.append(f"cos and sin are scaled by {rotation.scale:.4g}, not {declared.scale:.4g}")
    return "; ".join(problems)
