"""A checkpoint in a few numbers for trackers: means over heads, by layer type and depth, and shares of categories.

Each has its standard error over documents next to it (`_se`) where there is one. What is undefined is left out.
"""

from __future__ import annotations

import math
import re

from qkscope.lenses.categories import CATEGORIES
from qkscope.lenses.depth_axis import EARLY, LATE, MIDDLE
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.views import WindowView
from qkscope.stats.means import EVERY_HEAD, Part

MEASURES = ("r_q", "r_k", "r_k_abs", "explained_variance")
DEPTHS = {"early": EARLY, "middle": MIDDLE, "late": LATE}  # three, four and three tenths, as cards have them
PREFIX = "eval/qkscope/"  # where trackers put what a trainer logs as eval_qkscope/...


def entry_scalars(at: WindowView, name: str, prefix: str = PREFIX) -> dict[str, float]:
    """The numbers of one checkpoint; callbacks log the same under another prefix."""
    kinds = kinds_in_order(at.heads["layer_kind"])
    parts = {"": EVERY_HEAD}
    parts |= {f"{_key(kind)}/": Part(layer_kind=kind) for kind in (kinds if len(kinds) > 1 else [])}
    parts |= {f"{depth}/": part for depth, part in DEPTHS.items()}
    means = {f"{place}{each}_mean": (each, part) for place, part in parts.items() for each in MEASURES}
    shares = {f"share/{_key(category)}": (category, EVERY_HEAD) for category in CATEGORIES}
    scalars: dict[str, float] = {}
    for key, (quantity, part) in (means | shares).items():
        values = [float(value) for value in at.panel.values(quantity, name, part) if math.isfinite(value)]
        scalars[f"{prefix}{key}"] = sum(values) / len(values) if values else math.nan
        scalars[f"{prefix}{key}_se"] = at.panel.error(quantity, name, part)
    return {key: value for key, value in scalars.items() if math.isfinite(value)}


def _key(words: str) -> str:
    """A name that every tracker takes: `rotary, sliding 512` becomes `rotary_sliding_512`."""
    return re.sub(r"[^A-Za-z0-9-]+", "_", words).strip("_")
