"""Where a head's queries and keys lie along a direction, bucket by bucket, and whether that is a line.

r is a summary of these profiles. Two directions are followed: component 0, as in `qk.csv`, and the drift axis, the
direction whose projection has the largest covariance with position in queries and keys together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import Detail, Figure, HeadTable, Lens, Measure, View
from qkscope.lenses.categories import CATEGORIES, LOW, UNDEFINED
from qkscope.lenses.charts import Drawing
from qkscope.lenses.pca import NO_VARIANCE, Array
from qkscope.lenses.rotation.axes import drift_axis
from qkscope.lenses.sums import LayerSums
from qkscope.lenses.views import WindowView, named_entries
from qkscope.moments.second_moments import Kind

PROFILE_FILE, BEND_FILE = "profile", "bend"
SHARE, SIZE = (0.0, 1.0), (0.0, np.inf)
FEWEST_BUCKETS = 3  # a line goes through any two
KINDS: tuple[tuple[Kind, str], ...] = (("q", "queries"), ("k", "keys"))
# Direction: end of the names of its columns, and what it is called in definitions and titles.
AXES = {"pc0": ("", "component 0", "PC0"), "a": ("_a", "the drift axis a", "the drift axis")}
PROFILE_COLUMNS = (
    Measure("tokens", "Queries (and keys) of the bucket.", "", SIZE, error=None),
    *(
        column
        for axis, (_, name, _) in AXES.items()
        for kind, what in KINDS
        for column in (
            Measure(f"{kind}_{axis}", f"Mean of the {what} of the bucket along {name}."),
            Measure(f"{kind}_{axis}_sd", f"Standard deviation of the {what} of the bucket along {name}; no standard "
                    "error: document groups have no squares in single buckets.", "", SIZE, error=None),
        )
    ),
)  # fmt: skip
BEND_COLUMNS = tuple(
    column
    for end, name, along in AXES.values()
    for kind, what in KINDS
    for column in (
        Measure(f"between_{kind}{end}", f"Share of the variance of {what} along {name} that lies between the means of "
                "buckets.", "", SHARE, title=f"variance of {what} along {along} between positions"),
        Measure(f"bend_{kind}{end}", "Share of that variance between buckets that no line in position explains, for "
                f"{what} along {name}; empty with fewer than {FEWEST_BUCKETS} buckets.", "", SHARE,
                title=f"nonlinear share of {what} between positions along {along}"),
    )
)  # fmt: skip


def directions(sums: LayerSums) -> dict[str, Array]:
    """(heads, d) of each direction."""
    return {"pc0": sums.principal.directions[:, :, 0], "a": sums.once(drift_axis)}


def profile(sums: LayerSums) -> Mapping[str, NDArray[Any]]:
    """Means and standard deviations along both directions, (heads, buckets); a replicate has means alone."""
    means = {kind: sums.bucket_means(kind) for kind, _ in KINDS}
    values: dict[str, NDArray[Any]] = {"tokens": means["q"].n.round()}
    for axis, direction in directions(sums).items():
        for kind, _ in KINDS:
            values[f"{kind}_{axis}"] = np.einsum("hbd,hd->hb", means[kind].mean, direction)
            spread = np.full((len(sums.heads), len(sums.edges) - 1), np.nan)
            if sums.whole is None:
                of = sums.q_buckets if kind == "q" else sums.k_buckets
                which = np.arange(len(sums.heads)) if kind == "q" else sums.distinct_keys[1]
                for head, (key, along) in enumerate(zip(which, direction, strict=True)):
                    spread[head] = np.einsum("bd,d->b", of.cov_xx[key] @ along, along)
            values[f"{kind}_{axis}_sd"] = np.sqrt(np.maximum(spread, 0.0))
    return values


def bend(sums: LayerSums) -> Mapping[str, Array]:
    """How much of each projection lies between buckets, and how much of that no line explains."""
    shares = {}
    for axis, direction in directions(sums).items():
        for kind, _ in KINDS:
            window, of = sums.q if kind == "q" else sums.k, sums.bucket_means(kind)
            there = of.n > 0
            weight = of.n / of.n.sum(axis=1, keepdims=True)
            place = np.where(there, of.mean_t, 0.0)
            value = np.where(there, np.einsum("hbd,hd->hb", of.mean, direction), 0.0)
            place = place - (weight * place).sum(axis=1, keepdims=True)
            value = value - (weight * value).sum(axis=1, keepdims=True)
            variance = (weight * value**2).sum(axis=1)
            whole = np.einsum("hd,hd->h", direction, (window.cov_xx @ direction[..., None])[..., 0])
            with np.errstate(invalid="ignore", divide="ignore"):
                line = (weight * value * place).sum(axis=1) ** 2 / (weight * place**2).sum(axis=1)
                bent = np.clip(1.0 - line / variance, 0.0, 1.0)
                between = np.clip(variance / whole, 0.0, 1.0)
            exists = whole > NO_VARIANCE * window.spread
            defined = exists & (variance > NO_VARIANCE * whole) & (there.sum(axis=1) >= FEWEST_BUCKETS)
            shares[f"between_{kind}{AXES[axis][0]}"] = np.where(exists, between, np.nan)
            shares[f"bend_{kind}{AXES[axis][0]}"] = np.where(defined, bent, np.nan)
    return shares


# --- which heads are drawn ---------------------------------------------------------------------------

MOST_BENT = "most bent"
MOST_COLUMNS = 6  # of seeds and models together


@dataclass(frozen=True)
class HeadProfile:
    """A head of an entry: its rows of `buckets`, its numbers, and why it was chosen."""

    model: str
    layer: int
    head: int
    why: str  # its category, or that it is the most bent
    numbers: pd.Series  # its row of `heads`
    rows: pd.DataFrame  # by bucket

    @property
    def name(self) -> str:
        """`L3 H5`."""
        return f"L{self.layer} H{self.head}"


def profiles_of(at: WindowView) -> list[HeadProfile]:
    """The chosen heads of the last checkpoint of a run, in the order of the categories; of seeds and models a few."""
    if at.study.one_run:
        return _profiles_in(at, at.names[-1])
    models = [entry.name for entry in named_entries(at.study) if _has_shape(at, entry.name)]
    each = max(1, MOST_COLUMNS // max(1, len(models)))
    by_model = [_profiles_in(at, model) for model in models]
    return [head for heads in by_model for head in (heads if len(heads) <= each else [*heads[: each - 1], heads[-1]])]


def _profiles_in(at: WindowView, model: str) -> list[HeadProfile]:
    """Of each category the head whose PC0 explains most, and the most bent of the others.

    That is the head with the largest share of its queries' or keys' variance along PC0 that follows position, not a
    line.
    """
    profiles, heads = at.of_entry(model, PROFILE_FILE), at.of_entry(model).reset_index(drop=True)
    chosen: list[tuple[int, str]] = []  # row of the head, and why
    for category in CATEGORIES:
        explained = heads["explained_variance"].where(heads["category"] == category)
        if category != UNDEFINED and explained.notna().any():
            chosen.append((int(np.nanargmax(explained)), category))
    curved = pd.concat([heads["bend_q"] * heads["between_q"], heads["bend_k"] * heads["between_k"]], axis=1).max(axis=1)
    curved = curved.drop([row for row, _ in chosen])
    if curved.notna().any():
        chosen.append((int(str(curved.idxmax())), MOST_BENT))
    chosen_profiles = []
    for row, why in chosen:
        layer, head = int(heads["layer"].iloc[row]), int(heads["head"].iloc[row])
        rows = profiles[(profiles["layer"] == layer) & (profiles["head"] == head)].sort_values("bucket")
        if len(rows):
            chosen_profiles.append(HeadProfile(model, layer, head, why, heads.iloc[row], rows))
    return chosen_profiles


def shape_shows(at: WindowView) -> bool:
    """Whether an entry has buckets enough for a shape; two, as at a short common window, are always a line."""
    return any(_has_shape(at, entry.name) for entry in named_entries(at.study))


def _has_shape(at: WindowView, model: str) -> bool:
    rows = at.of_entry(model, PROFILE_FILE)
    return not at.common or len(without_sink(rows.drop_duplicates("bucket"))) >= FEWEST_BUCKETS


def without_sink(rows: pd.DataFrame) -> pd.DataFrame:
    """The buckets but position 0, where that is one by itself: it can lie far from all others."""
    return rows[~((rows["start"] == 0) & (rows["end"] == 1) & (len(rows) > 1))]


def examples(at: WindowView) -> list[dict[str, Any]]:
    """Three real heads that show how to read r_q and r_k: both follow position, keys run against it, neither follows.

    The clearest of each sort at the last entry. A sort that no head belongs to is left out, and the page says that
    there is none. `profile` has rows of position, mean q, its spread, mean k, its spread, if results have profiles.
    """
    heads = at.of_entry(at.names[-1]).dropna(subset=["r_q", "r_k"])
    r_q, r_k = heads["r_q"].to_numpy(float), heads["r_k"].to_numpy(float)
    clear = {
        "both": np.minimum(r_q, r_k),
        "against": np.minimum(r_q, -r_k),
        "neither": LOW - np.maximum(np.abs(r_q), np.abs(r_k)),
    }
    clearest = []
    for sort, how in clear.items():
        if not len(how) or how.max() <= (0 if sort == "neither" else LOW):
            continue
        head, lines = heads.iloc[int(how.argmax())], []
        if at.has(PROFILE_FILE):
            rows = at.of_entry(at.names[-1], PROFILE_FILE)
            own = rows[(rows["layer"] == head["layer"]) & (rows["head"] == head["head"])].sort_values("bucket")
            own = without_sink(own).assign(middle=lambda rows: (rows["start"] + rows["end"] - 1) / 2)
            columns = own[["middle", "q_pc0", "q_pc0_sd", "k_pc0", "k_pc0_sd"]].to_numpy(float)
            lines = [[float(f"{value:.4g}") if np.isfinite(value) else None for value in line] for line in columns]
        numbers = {name: round(float(head[name]), 4) for name in ("r_q", "r_k")}
        clearest.append(
            {"sort": sort, "layer": int(head["layer"]), "head": int(head["head"]), **numbers, "profile": lines}
        )
    return clearest


PROFILE = HeadTable(PROFILE_FILE, PROFILE_COLUMNS, profile, across="bucket", detail=True, stackable=True)
BEND = HeadTable(BEND_FILE, BEND_COLUMNS, bend, stackable=True)
LENS = Lens(
    name="profile",
    title="Profiles along position",
    question="How do queries and keys change with position, and is the relation linear?",
    tables=(PROFILE, BEND),
    figures=(
        Figure(
            "profile",
            title="Projection on PC0 by Position",
            models=lambda at: [head.model for head in profiles_of(at)],
            chart=Drawing("qkscope.report.drawings.heads:draw_profile", ("bend_q", "bend_k")),
            caption="Mean projection of queries (blue) and keys (red) on PC0 by position, for the clearest head of "
            "each category and the most bent one. Bands: ± 1 SD over tokens.",
            needs=(PROFILE_FILE, BEND_FILE),
            worthwhile=shape_shows,
        ),
    ),
    views=(
        View("curve", "Nonlinear share of the variance between buckets", ("bend_q", "bend_k"),
             "Along PC0; means over heads.", figure="profile"),
        View("heatmap", "Nonlinear share of every head's queries along PC0", ("bend_q",)),
        View("scatter", "Share of position and its nonlinear part", ("between_q", "bend_q")),
    ),
    details=(Detail("profile", PROFILE, ("start", "end"), ("q_pc0", "q_pc0_sd", "k_pc0", "k_pc0_sd")),),
    examples=examples,
)  # fmt: skip
