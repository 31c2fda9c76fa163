"""What kind of layer a head is in: how it encodes position, and how far it sees.

A sliding or chunked layer sees a part of the window and a full one all of it, so their heads answer different
questions and are separated wherever rotary and NoPE layers are. Summaries over heads have a column `layer_kind` for
that: `all` in the row over all heads, and a row for each kind where an entry has several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.draw.palette import AMBER, BLUE
from qkscope.lenses.base import Lens
from qkscope.results.schema import CHUNKED, FULL, NOPE, ROTARY, SLIDING, UNKNOWN
from qkscope.stats.means import EVERY_HEAD, Part

EVERY_KIND = "all"  # the `layer_kind` of a summary's rows over all heads
_POSITIONS = {ROTARY: "rotary", NOPE: "NoPE", UNKNOWN: ""}


def with_layer_kind(heads: pd.DataFrame) -> pd.DataFrame:
    """The table with a `layer_kind` column, such as `rotary`, `NoPE` or `rotary, sliding 512`.

    Attention is named only in tables where some layer is not full. Empty where nothing is known of a layer.
    """
    if heads.empty:
        return heads.assign(layer_kind=pd.Series(dtype=str))
    heads = heads.drop(columns="layer_kind", errors="ignore")
    limited = bool(heads["attention"].isin([SLIDING, CHUNKED]).any())
    columns = [heads[name] for name in ("rotary", "attention", "attention_window")]
    codes = np.stack([pd.factorize(column, use_na_sentinel=False)[0] for column in columns])
    _, first, which = np.unique(codes, axis=1, return_index=True, return_inverse=True)
    names = [
        kind_name(str(rotary), str(attention), float(window), limited=limited)
        for rotary, attention, window in zip(*(column.iloc[first] for column in columns), strict=True)
    ]
    return heads.assign(layer_kind=pd.Series(names).take(which.reshape(-1)).set_axis(heads.index))


def kind_name(rotary: str, attention: str, window: float | None, *, limited: bool = True) -> str:
    """A layer's kind, `rotary, sliding 512`; without how far it attends where no layer is `limited`."""
    position = _POSITIONS.get(rotary, "")
    if not limited:
        return position
    reach = "full" if attention in ("", FULL) else attention
    if attention in (SLIDING, CHUNKED) and window is not None and pd.notna(window):
        reach += f" {int(window):,}"
    return f"{position}, {reach}" if position else reach


def kinds_in_order(kinds: Iterable[str]) -> list[str]:
    """The distinct kinds: rotary before NoPE, full before sliding before chunked, shorter reach first."""
    distinct = kinds.unique() if isinstance(kinds, pd.Series) else kinds  # pandas finds them without Python's help
    return sorted({kind for kind in distinct if kind}, key=_rank)


def _rank(kind: str) -> tuple[int, int, int]:
    words = kind.replace(",", "").split()
    position = next((i for i, name in enumerate(("rotary", "NoPE")) if name in words), 2)
    attention = next((i for i, name in enumerate((FULL, SLIDING, CHUNKED)) if name in words), 0)
    return position, attention, int(words[-1]) if words[-1].isdigit() else 0


def rows_by_kind(kinds: Iterable[str]) -> list[str]:
    """The layer types of a summary's rows: `all`, then each type where there are several."""
    names = kinds_in_order(kinds)
    return [EVERY_KIND, *(names if len(names) > 1 else [])]


def part_of(kind: str) -> Part:
    """The heads that a row of a summary is about."""
    return EVERY_HEAD if kind == EVERY_KIND else Part(layer_kind=kind)


def over_all_heads(summary: pd.DataFrame) -> pd.DataFrame:
    """A summary's rows over all heads; the whole of one without layer types."""
    if "layer_kind" not in summary.columns:
        return summary
    return summary[summary["layer_kind"] == EVERY_KIND].reset_index(drop=True)


def reach_of(kind: str) -> str:
    """How far layers of a kind see: `full`, `sliding 512`; empty where a study names no reach."""
    return kind.partition(", ")[2]


def unusual_layers(heads: pd.DataFrame) -> dict[int, str]:
    """Of one entry's heads, the layers of another kind than most, each with what distinguishes it: NoPE, full, …"""
    layers = heads.drop_duplicates("layer")
    kinds: dict[int, str] = dict(zip(layers["layer"].tolist(), layers["layer_kind"].tolist(), strict=True))
    usual = max(dict.fromkeys(kinds.values()), key=list(kinds.values()).count, default="")
    apart = set(usual.replace(",", "").split())
    unusual = {}
    for layer, kind in kinds.items():
        if kind and kind != usual:
            words = [word for word in kind.replace(",", "").split() if word not in apart and not word.isdigit()]
            unusual[layer] = " ".join(words) or kind
    return unusual


@dataclass(frozen=True)
class KindMark:
    """How one kind of layer is drawn."""

    colour: str
    marker: str


_ROTARY, _NOPE = KindMark(BLUE, "o"), KindMark(AMBER, "^")
_USUAL = {"rotary": _ROTARY, "rotary, full": _ROTARY, "NoPE": _NOPE, "NoPE, full": _NOPE}
# Far apart in lightness as well as in hue; more kinds than these begin again.
_OTHERS = (KindMark("#0f766e", "s"), KindMark("#9d174d", "D"), KindMark("#4c1d95", "v"), KindMark("#65a30d", "P"))


def kind_marks(kinds: Sequence[str]) -> dict[str, KindMark]:
    """The marks of these kinds: rotary and NoPE layers with full attention always look the same."""
    others = [kind for kind in kinds if kind not in _USUAL]
    return {kind: _USUAL.get(kind) or _OTHERS[others.index(kind) % len(_OTHERS)] for kind in kinds}


LENS = Lens(
    name="layer_types",
    title="Layer types",
    question="Do layers of different types differ?",
    derive=with_layer_kind,
)
