"""What a layer of attention is: the facts that every stage carries along and writes into its results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from qkscope.text import counted

Rotary = Literal["rotary", "nope", "unknown"]
AttentionKind = Literal["full", "sliding", "chunked"]
Stage = Literal["post_rope", "pre_rope"]  # where queries and keys are taken

# Bounds of what a file may claim, far above any model: what is larger is damage, and must not be allocated.
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM = 10_000, 10_000, 4096


@dataclass(frozen=True)
class Rotation:
    """What RoPE does to a head: the planes that it rotates, and how fast.

    By an angle a, the plane (first, second) goes to (first cos a - second sin a, second cos a + first sin a); at
    position t, a is t times the plane's angle. Coordinates in no plane stay as they are.
    """

    pairs: tuple[tuple[int, int], ...]  # coordinates (first, second) of each plane
    angles: tuple[float, ...]  # radians per token, one per plane, above 0: the order of a pair gives the direction
    scale: float = 1.0  # the factor in cos and sin in addition to the rotation (YaRN's attention factor)

    def __post_init__(self) -> None:
        used = [coordinate for pair in self.pairs for coordinate in pair]
        if not self.pairs or len(self.pairs) != len(self.angles) or len(set(used)) != len(used) or min(used) < 0:
            raise ValueError("a rotation should have planes of different coordinates and one angle for each")
        if not all(0.0 < angle <= math.pi for angle in self.angles) or not 0.0 < self.scale < math.inf:
            raise ValueError("a rotation's angles should be above 0 and at most pi, its scale above 0 and finite")

    @classmethod
    def from_json(cls, stored: Any) -> Rotation:
        """The rotation that a file claims; ValueError where it is none, or beyond any model."""
        if not isinstance(stored, Mapping) or set(stored) != {"pairs", "angles", "scale"}:
            raise ValueError("a rotation should have pairs, angles and scale")
        pairs, angles, scale = stored["pairs"], stored["angles"], stored["scale"]
        if not all(isinstance(part, list) and len(part) <= MAX_HEAD_DIM // 2 for part in (pairs, angles)):
            raise ValueError(f"a rotation's pairs and angles should be lists of at most {MAX_HEAD_DIM // 2}")
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError("each of a rotation's pairs should be two coordinates")
        if not all(isinstance(number, float) for number in (*angles, scale)):
            raise ValueError("a rotation's angles and scale should be floating-point numbers")
        planes = [
            [require_integer(coordinate, "a coordinate", MAX_HEAD_DIM - 1) for coordinate in pair] for pair in pairs
        ]
        return cls(tuple((first, second) for first, second in planes), tuple(angles), scale)


@dataclass(frozen=True)
class LayerFacts:
    """One attention layer as its kernel sees it."""

    layer: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary = "unknown"
    rotary_dims: int | None = None  # None where it could not be measured
    attention: AttentionKind = "full"
    attention_window: int | None = None  # tokens a sliding or chunked layer sees
    rotation: Rotation | None = None  # None where nothing rotates or it could not be measured; `rotary` says which
    score_scale: float | None = None  # softmax sees q.k times this; None where the call did not say, or in older files

    def __post_init__(self) -> None:
        if min(self.q_heads, self.kv_heads, self.head_dim) < 1 or self.layer < 0:
            raise ValueError(f"impossible layer {self}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"layer {self.layer}: {self.q_heads} query heads over {self.kv_heads} key heads")
        if self.rotary not in get_args(Rotary) or self.attention not in get_args(AttentionKind):
            raise ValueError(f"layer {self.layer}: unknown kind {self.rotary!r} / {self.attention!r}")
        if self.score_scale is not None and not 0.0 < self.score_scale < math.inf:
            raise ValueError(f"layer {self.layer}: scores cannot be scaled by {self.score_scale}")
        if self.rotation is not None and max(map(max, self.rotation.pairs)) >= self.head_dim:
            raise ValueError(f"layer {self.layer}: a rotation beyond its {self.head_dim} coordinates")

    def kv_head(self, head: int) -> int:
        """The key head that query head `head` reads (grouped-query attention)."""
        return head // (self.q_heads // self.kv_heads)

    def to_json(self) -> dict[str, Any]:
        """The plain form stored in moments files."""
        stored, rotation = asdict(self), self.rotation
        if rotation is not None:
            pairs, angles = [list(pair) for pair in rotation.pairs], list(rotation.angles)
            stored["rotation"] = {"pairs": pairs, "angles": angles, "scale": rotation.scale}
        return stored

    def outline(self) -> dict[str, Any]:
        """The plain form for provenance, which people read: without the hundreds of numbers of a rotation."""
        return {name: value for name, value in self.to_json().items() if name != "rotation"}

    @classmethod
    def from_json(cls, stored: Any) -> LayerFacts:
        """The facts that a file claims; ValueError where a number is none, or beyond any model."""
        names = {field.name for field in fields(cls)}
        bounds = {"layer": MAX_LAYERS, "q_heads": MAX_HEADS, "kv_heads": MAX_HEADS, "head_dim": MAX_HEAD_DIM}
        if not isinstance(stored, Mapping) or not set(bounds) <= set(stored) <= names:
            raise ValueError(f"a layer should have {', '.join(bounds)} and nothing unknown")
        for name, most in bounds.items():
            require_integer(stored[name], name, most)
        for name in ("rotary_dims", "attention_window"):
            if stored.get(name) is not None:
                require_integer(stored[name], name, 2**53)
        if not all(isinstance(stored.get(name, ""), str) for name in ("rotary", "attention")):
            raise ValueError("rotary and attention should be text")
        if not isinstance(stored.get("score_scale"), float | None):
            raise ValueError("score_scale should be a floating-point number")
        rotation = stored.get("rotation")
        return cls(**{**stored, "rotation": None if rotation is None else Rotation.from_json(rotation)})


def require_integer(value: Any, name: str, most: int, least: int = 0) -> int:
    """The value, if it is an integer (neither 3.0 nor true) within bounds; else a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shown = repr(value) if isinstance(value, float | bool | str) else type(value).__name__
        raise ValueError(f"{name} should be a whole number from {least} to {most}, not {shown[:40]}")
    return value


def attention_summary(layers: Sequence[LayerFacts]) -> str:
    """One line: `36 layers, 16 query and 4 key heads of width 128, 9 NoPE, all full attention`."""
    heads = {(f.q_heads, f.kv_heads, f.head_dim) for f in layers}
    shapes = " / ".join(f"{q} query and {counted(k, 'key head')} of width {d}" for q, k, d in sorted(heads))
    nope = sum(f.rotary == "nope" for f in layers)
    unknown = sum(f.rotary == "unknown" for f in layers)
    kinds = {kind: sum(f.attention == kind for f in layers) for kind in get_args(AttentionKind)}
    parts = [f"{len(layers)} attention layers", shapes]
    parts.append(f"{nope} NoPE" if nope else "all rotary" if not unknown else "")
    parts.append(f"{unknown} of unknown position encoding" if unknown else "")
    parts.append(", ".join(f"{n} {kind}" for kind, n in kinds.items() if n))
    return ", ".join(part for part in parts if part)
