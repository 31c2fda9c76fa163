"""What kind of layer a head is in: how it encodes position, and how far it sees.

A sliding or chunked layer sees a part of the window and a full one all of it, so their heads answer different
questions and are told apart wherever rotary and NoPE layers are.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.concordance.table import with_concordance
from qkscope.lenses.errors import with_mean_errors
from qkscope.lenses.position.summaries import MEASURES, means_and_spreads, with_measures
from qkscope.results.schema import CHUNKED, FULL, NOPE, ROTARY, SLIDING, UNKNOWN
from qkscope.stats.noise import Part

SHARES = ("concordant", "discordant")
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
        _name(str(rotary), str(attention), float(window), limited)
        for rotary, attention, window in zip(*(column.iloc[first] for column in columns), strict=True)
    ]
    return heads.assign(layer_kind=pd.Series(names).take(which.reshape(-1)).set_axis(heads.index))


def kind_name(rotary: str, attention: str, window: int | None) -> str:
    """A layer's kind with how far it attends: `rotary, sliding 512`."""
    return _name(rotary, attention, float("nan") if window is None else float(window), limited=True)


def _name(rotary: str, attention: str, window: float, limited: bool) -> str:
    position = _POSITIONS.get(rotary, "")
    if not limited:
        return position
    reach = "full" if attention in ("", FULL) else attention
    if attention in (SLIDING, CHUNKED) and pd.notna(window):
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


def unusual_layers(heads: pd.DataFrame) -> dict[int, str]:
    """Of one entry's heads, the layers of another kind than most, each with what tells it apart: NoPE, full, …"""
    layers = heads.drop_duplicates("layer")
    kinds: dict[int, str] = dict(zip(layers["layer"].tolist(), layers["layer_kind"].tolist(), strict=True))
    usual = max(dict.fromkeys(kinds.values()), key=list(kinds.values()).count, default="")
    apart = set(usual.replace(",", "").split())
    found = {}
    for layer, kind in kinds.items():
        if kind and kind != usual:
            words = [word for word in kind.replace(",", "").split() if word not in apart and not word.isdigit()]
            found[layer] = " ".join(words) or kind
    return found


def layer_kinds(heads: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame | None:
    """The measures of each kind of layer apart, for models that have more than one; None where none has."""
    named = with_layer_kind(with_concordance(with_measures(heads)))
    named = named[named["layer_kind"] != ""]
    several = named.groupby("model")["layer_kind"].transform("nunique") > 1
    named = named[several]
    if named.empty:
        return None
    groups = named.groupby(["model", "layer_kind"], sort=False)
    table = means_and_spreads(groups)
    for share in SHARES:
        table[share] = groups[share].mean()
    for i, fact in enumerate(("rotary", "attention", "attention_window")):
        table.insert(i, fact, groups[fact].first())
    order = [(m, kind) for m in models for kind in kinds_in_order(named["layer_kind"]) if (m, kind) in table.index]
    return table.reindex(pd.MultiIndex.from_tuples(order, names=["model", "layer_kind"])).reset_index()


def layer_kinds_at(at: AtWindow) -> pd.DataFrame | None:
    """The kinds of layers of a study at one choice of windows, with errors over documents and over heads."""
    table = layer_kinds(at.heads, at.names)
    if table is None:
        return None
    parts = [Part(layer_kind=str(kind)) for kind in table["layer_kind"]]
    return with_mean_errors(table, at.panel, (*MEASURES, *SHARES), parts=parts, over_heads=True)
