"""An entry in a few numbers for trackers: means over heads, by kind of layer and depth, and the share of each category.

Each has its standard error over documents beside it (`_se`) where there is one. What is undefined is left out.
"""

from __future__ import annotations

import math
import re

from qkscope.lenses.categories import CATEGORIES
from qkscope.lenses.depth.findings import EARLY, LATE, MIDDLE
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.views import WindowView
from qkscope.stats.means import EVERY_HEAD, Part

MEASURES = ("r_q", "r_k", "r_k_abs", "explained_variance")
DEPTHS = {"early": EARLY, "middle": MIDDLE, "late": LATE}  # three, four and three tenths, as cards have them
PREFIX = "eval/qkscope/"  # where trackers put what a trainer logs as eval_qkscope/...


def entry_scalars(at: WindowView, name: str, prefix: str = PREFIX) -> dict[str, float]:
    """The numbers of one entry; a callback in training has the same under a prefix of its own."""
    scalars = _means(at, name, "", EVERY_HEAD)
    kinds = kinds_in_order(at.heads["layer_kind"])
    for kind in kinds if len(kinds) > 1 else []:
        scalars |= _means(at, name, f"{_plain(kind)}/", Part(layer_kind=kind))
    for depth, part in DEPTHS.items():
        scalars |= _means(at, name, f"{depth}/", part)
    for category in CATEGORIES:
        scalars |= _with_error(at, name, category, f"share/{_plain(category)}", EVERY_HEAD)
    return {f"{prefix}{key}": value for key, value in scalars.items()}


def _means(at: WindowView, name: str, prefix: str, part: Part) -> dict[str, float]:
    scalars: dict[str, float] = {}
    for quantity in MEASURES:
        scalars |= _with_error(at, name, quantity, f"{prefix}{quantity}_mean", part)
    return scalars


def _with_error(at: WindowView, name: str, quantity: str, key: str, part: Part) -> dict[str, float]:
    values = at.panel.values(quantity, name, part)
    defined = [float(value) for value in values if math.isfinite(value)]
    numbers = {
        key: sum(defined) / len(defined) if defined else math.nan,
        f"{key}_se": at.panel.error(quantity, name, part),
    }
    return {each: value for each, value in numbers.items() if math.isfinite(value)}


def _plain(words: str) -> str:
    """A name that every tracker takes: `rotary, sliding 512` becomes `rotary_sliding_512`."""
    return re.sub(r"[^A-Za-z0-9-]+", "_", words).strip("_")
