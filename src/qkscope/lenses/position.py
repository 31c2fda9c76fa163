"""The published statistic: combined PCA of a head's queries and keys, each component correlated with position.

Component 0 (PC0) is what figures, categories and most other lenses are about.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.draw.palette import BLUE, RED
from qkscope.errors import QkscopeWarning
from qkscope.lenses.base import Figure, HeadTable, Judged, Lens, Measure
from qkscope.lenses.categories import HIGH, LOW, classify
from qkscope.lenses.charts import DepthMap, HeadScatter, Panel, Trajectories
from qkscope.lenses.draws import drawn_correlations
from qkscope.lenses.rows import ZERO_R, checkpoint_rows
from qkscope.lenses.sums import LayerSums
from qkscope.moments.moments import Moments
from qkscope.stats.significance import is_significant
from qkscope.study.rows import COMPONENTS, HeadSample, LayerChoice, RowSettings
from qkscope.text import counted

CORRELATION, SHARE = (-1.0, 1.0), (0.0, 1.0)
FISHER: Literal["fisher"] = "fisher"

COLUMNS = (
    Measure("explained_variance", "Share of the variance of queries and keys together on the component.", "", SHARE,
            title="explained variance of PC0"),
    Measure("r_q", "Pearson correlation of the component's projection of queries with position.", "", CORRELATION,
            FISHER, title="r_q", color=BLUE),
    Measure("r_k", "The same for keys; below 0, keys move against their queries.", "", CORRELATION, FISHER, title="r_k",
            color=RED),
    Measure("n_q", "Queries that were summed.", "tokens", error=None, kind="constant", title="number of queries"),
    Measure("n_k", "Keys that were summed.", "tokens", error=None, kind="constant", title="number of keys"),
    Measure("mu_q", "Where the line through the projected queries is at position 0.", title="queries at position 0"),
    Measure("mu_k", "Where the line through the projected keys is at position 0.", title="keys at position 0"),
    Measure("alpha", "Slope of the line through the projected queries.", "per token", title="slope of queries"),
    Measure("beta", "Slope of the line through the projected keys.", "per token", title="slope of keys"),
    Measure("gap", "How far the next component's variance is below this one's, as a share of this one's.", "", SHARE,
            title="gap to the next component"),
)  # fmt: skip
JUDGED = (
    Measure("unstable", "1 if the gap to a neighbor is not significant: the component is not a single direction.",
            title="heads with an unstable component", kind="indicator"),
    Measure("sign_sure", "1 if r_q differs significantly from 0; otherwise the sign of r_k means nothing.",
            title="heads whose r_q differs from 0", kind="indicator"),
    Measure("category_share", "Share of other samples of documents, by the jackknife, that give the same category."),
)  # fmt: skip


def judge(of: Judged) -> Mapping[str, NDArray[np.float64]]:
    """How sure a component, the sign of its r_k and the category that it gives are; empty where there are no errors."""
    columns, error = of.columns, of.columns["r_q_se"]
    known = np.isfinite(error) & (error > ZERO_R)  # copies of one document have no error
    freedom = len(of.sums.replication.groups) - 1
    close = is_significant(columns["gap"], columns["gap_se"], freedom) == 0
    above = np.pad(close[:, :-1], ((0, 0), (1, 0))) if close.ndim == 2 else False  # the component before is as close
    sure = is_significant(columns["r_q"], columns["r_q_se"], freedom)
    share = np.full(columns["r_q"].shape, np.nan)
    if of.replicates:
        sizes = of.sums.replication.sizes
        r_q, r_k = ((columns[name], of.replicates[name]) for name in ("r_q", "r_k"))
        drawn = drawn_correlations(r_q, r_k, sizes)
        share = (classify(*drawn) == classify(columns["r_q"], columns["r_k"])).mean(axis=0)
    return {
        "unstable": np.where(np.isfinite(columns["gap_se"]), close | above, np.nan),
        "sign_sure": np.where(known, sure, np.nan),
        "category_share": np.where(known, share, np.nan),
    }


def components_of(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """Every component that tables keep."""
    columns = {column.name: getattr(sums.principal, column.name) for column in COLUMNS}
    columns |= {name: columns[name].astype(np.int64) for name in ("n_q", "n_k")}
    return {name: values[:, : sums.components] if values.ndim == 2 else values for name, values in columns.items()}


def leading_component(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """Component 0 alone, one number per head."""
    return {name: values[:, 0] if values.ndim == 2 else values for name, values in components_of(sums).items()}


def warn_undefined(table: pd.DataFrame, model: str) -> None:
    """Say which heads have no correlation on component 0, and why."""
    leading = table[table["pc"] == 0] if "pc" in table.columns else table
    undefined = leading[leading["r_q"].isna() | leading["r_k"].isna()]
    if undefined.empty:
        return
    few = undefined[(undefined["n_q"] < undefined["head_dim"]) | (undefined["n_k"] < undefined["head_dim"])]
    first = undefined.iloc[0]
    if len(few):
        why = f"{int(first['n_q'])} tokens are fewer than the head's {int(first['head_dim'])} dimensions"
    elif first["alpha"] != first["alpha"]:
        why = "all tokens are at one position"
    else:
        why = "the projection does not vary"
    warnings.warn(
        f"checkpoint {model!r}, window {first['window']}: r_q or r_k is undefined (NaN) for {len(undefined)} of "
        f"{counted(len(leading), 'head')}, first layer {first['layer']} head {first['head']}: {why}",
        QkscopeWarning,
        stacklevel=3,
    )


OWN = HeadTable(
    "qk", COLUMNS, components_of, "own", across="pc", stackable=True, check=warn_undefined, judged=JUDGED, judge=judge
)
COMMON = replace(OWN, name="components", windows="common")
# Component 0 at every window; its replicates are what errors of means and shares over heads are made of.
LEADING = HeadTable(
    "position", COLUMNS, leading_component, "every", stackable=True, check=warn_undefined, judged=JUDGED, judge=judge,
    replicated=("explained_variance", "r_q", "r_k", "n_q"),
)  # fmt: skip


def qk_table(
    moments: Moments,
    *,
    model: str,
    window: int | None = None,
    components: int = COMPONENTS,
    heads: HeadSample | None = None,
    layers: LayerChoice = "all",
    skip: int = 0,
) -> pd.DataFrame:
    """One checkpoint's rows: every chosen head and component over the first `window` positions (all by default)."""
    settings = RowSettings(own=window, components=components, heads=heads, layers=layers, skip=skip)
    return checkpoint_rows(moments, [OWN], settings, model=model)[OWN.table]


def with_measures(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads with |r_k|, and how far r_q and r_k are from their checkpoint's median."""
    medians = heads.groupby("model")[["r_q", "r_k"]].transform("median")
    return heads.assign(
        r_k_abs=heads["r_k"].abs(),
        r_q_spread=(heads["r_q"] - medians["r_q"]).abs(),
        r_k_spread=(heads["r_k"] - medians["r_k"]).abs(),
    )


LENS = Lens(
    name="position",
    title="Position signal",
    question="Which heads follow position, in their queries and in their keys?",
    tables=(OWN, COMMON, LEADING),
    derive=with_measures,
    derived=(
        Measure("r_k_abs", "Absolute value of r_k.", "", SHARE, title="size of r_k", color=RED),
        Measure("r_q_spread", "Distance of r_q from its checkpoint's median.", "", SHARE, title="spread of r_q"),
        Measure("r_k_spread", "Distance of r_k from its checkpoint's median.", "", SHARE, title="spread of r_k"),
    ),
    figures=(
        Figure(
            "position_signal",
            title="Position Correlation on PC0",
            chart=Trajectories((Panel(("r_q", "r_k"), "Correlation with position"),), heads=True),
            caption="Mean r_q (blue circles) and r_k (red squares); every head is a faint dot.",
            number=1,
        ),
        Figure(
            "depth",
            title="Position Correlation by Depth",
            chart=DepthMap(("r_q", "r_k"), margin="discordant"),
            caption="Mean r_q and r_k of the heads at each depth, one row each. The margin gives the share of "
            "discordant heads, whose keys track position in reverse.",
            number=3,
        ),
        Figure(
            "phase_portraits",
            title="Phase Portraits",
            chart=HeadScatter("r_q", "r_k", color="category", thresholds=(LOW, HIGH)),
            caption="Every head by r_q and r_k, colored by category; dashed lines are the thresholds of the "
            "categories.",
            number=4,
        ),
        Figure(
            "explained_variance",
            title="Explained Variance of PC0",
            chart=Trajectories((Panel(("explained_variance",)),)),
            caption="Share of the variance of queries and keys together on the first principal component.",
        ),
    ),
)
