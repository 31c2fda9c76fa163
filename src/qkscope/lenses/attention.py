"""Where heads attend: the softmax of sampled query rows (`moments/attention_rows.py`), per head, with errors.

Distances leave out position 0, which often takes a large share (the attention sink); rows count by what they attend to
elsewhere. Entropy and masses are means over rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import Figure, HeadTable, Lens, Measure, View
from qkscope.lenses.charts import Panel, Trajectories
from qkscope.lenses.sums import LayerSums
from qkscope.moments.attention_rows import SCALARS, AttentionSums, SampledPositions, distance_edges
from qkscope.moments.layout import Layout

Array = NDArray[np.float64]
SHARE, SIZE = (0.0, 1.0), (0.0, np.inf)
NO_VARIANCE = 1e-4  # of the squared mean weight: float32 sums resolve no less

COLUMNS = (
    Measure(
        "max_logit",
        "Largest logit (score as it enters softmax) of the sampled rows.",
        "logit",
        error=None,
        title="largest logit",
    ),
    Measure("row_max", "Mean over rows of the largest logit.", "logit", title="largest logit of a row"),
    Measure("entropy", "Mean entropy of the attention weights over keys.", "nats", SIZE, title="attention entropy"),
    Measure(
        "entropy_share",
        "The same as a share of the entropy of even attention to all visible keys.",
        "",
        SHARE,
        title="relative attention entropy",
    ),
    Measure("sink_mass", "Mean attention weight on position 0.", "", SHARE, title="attention to position 0"),
    Measure("sink4_mass", "Mean attention weight on positions 0 to 3.", "", SHARE, title="attention to positions 0-3"),
    Measure(
        "self_mass", "Mean attention weight on the token itself.", "", SHARE, title="attention to the token itself"
    ),
    Measure(
        "previous_mass",
        "Mean attention weight on the token before.",
        "",
        SHARE,
        title="attention to the previous token",
    ),
    Measure(
        "unattended_mass",
        "Mean attention weight on no token (learned sinks).",
        "",
        SHARE,
        title="attention to learned sinks",
    ),
    Measure(
        "distance_mean",
        "Mean distance from query to key, weighted by attention, without position 0.",
        "tokens",
        SIZE,
        title="mean attention distance",
    ),
    Measure(
        "distance_50",
        "Number of most recent tokens that get half of the attention that is not on position 0.",
        "tokens",
        SIZE,
        title="tokens with 50% of attention",
    ),
    Measure(
        "distance_90",
        "Number of most recent tokens that get 90% of the attention that is not on position 0: the effective context.",
        "tokens",
        SIZE,
        title="effective context",
    ),
    Measure(
        "distance_share",
        "Share of the variance of attention weights (without position 0) that distance alone explains: 1 means that a "
        "head attends by distance only.",
        "",
        SHARE,
        title="attention explained by distance",
    ),
)
_REPEATED = "on random tokens that are repeated once, queries of the second copy"
TYPE_COLUMNS = (
    Measure(
        "previous_token", f"Mean attention weight on the previous token, {_REPEATED}.", "", SHARE,
        title="previous-token score",
    ),
    Measure(
        "duplicate_token", f"Mean attention weight on the same token's first copy, {_REPEATED}.", "", SHARE,
        title="duplicate-token score",
    ),
    Measure(
        "induction", f"Mean attention weight on the token that followed the first copy, {_REPEATED}.", "", SHARE,
        title="induction score",
    ),
)  # fmt: skip
BUCKET_COLUMNS = tuple(
    each
    for each in COLUMNS
    if each.name in ("row_max", "entropy", "entropy_share", "sink_mass", "sink4_mass", "self_mass", "previous_mass")
)


def attention_rows(sums: LayerSums) -> Mapping[str, Array]:
    """All measures of a layer's heads; NaN where no rows were evaluated."""
    source = sums.sampled_rows
    if source is None:
        return {column.name: np.full(len(sums.heads), np.nan) for column in COLUMNS}
    measures = attention_measures(source.sums, source.layout, source.tokens, source.cells, source.kept)
    return {column.name: measures[column.name].reshape(-1) for column in COLUMNS}


def head_types(sums: LayerSums) -> Mapping[str, Array]:
    """Scores of a layer's heads; NaN where repeated tokens were not run."""
    source = sums.sampled_rows
    if source is None:
        return {column.name: np.full(len(sums.heads), np.nan) for column in TYPE_COLUMNS}
    means = np.einsum("hgp,cg->pch", source.sums.patterns.astype(np.float64), source.kept)
    means = means / source.kept.sum(axis=1)[:, None]
    return {column.name: mean.reshape(-1) for column, mean in zip(TYPE_COLUMNS, means, strict=True)}


def attention_by_bucket(sums: LayerSums) -> Mapping[str, Array]:
    """(heads, buckets) of the measures that are means over rows."""
    source = sums.sampled_rows
    if source is None:
        nothing = np.full((len(sums.heads), len(sums.edges) - 1), np.nan)
        return {column.name: nothing for column in BUCKET_COLUMNS}
    rows = (source.sums.rows[source.cells] @ source.kept.T).T[:, None]  # (copies, 1, buckets)
    logs = (source.sums.log_keys[source.cells] @ source.kept.T).T[:, None]
    scalars = source.sums.scalars[:, source.cells].astype(np.float64)
    totals = np.einsum("hbgm,cg->mchb", scalars, source.kept)
    by_name = dict(zip(SCALARS, totals, strict=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        means_of = {
            name: by_name[name.removesuffix("_mass")] / rows
            for name in ("row_max", "entropy", "sink_mass", "sink4_mass", "self_mass", "previous_mass")
        }
        means_of["entropy_share"] = by_name["entropy"] / logs
    return {name: values.reshape(-1, values.shape[-1]) for name, values in means_of.items()}


def attention_measures(
    sums: AttentionSums, layout: Layout, tokens: Array, cells: slice, kept: Array
) -> Mapping[str, Array]:
    """Each measure over a window, (copies, heads).

    `tokens` (buckets, groups) are the tokens summed, `cells` the window's buckets, and `kept` (copies, groups) is 1 for
    the document groups that a copy has and 0 for those left out. Rows are spread evenly over the tokens of each span;
    spans are weighted by their tokens.
    """
    spans, rows, weight = _span_weights(sums, layout, tokens, cells, kept)
    parts = [span in spans for span in SampledPositions.of(layout).spans]
    scalars = np.stack(
        [sums.scalars[:, layout.spans[n]].sum(axis=1) for n in spans], axis=1
    )  # (heads, spans, groups, …)
    log_keys = np.stack([sums.log_keys[layout.spans[n]].sum(axis=0) for n in spans])
    means = np.einsum("cs,hsgm,cg->mch", weight, scalars.astype(np.float64), kept)
    by_name = dict(zip(SCALARS, means, strict=True))
    count = np.einsum("cs,sc->c", weight, rows)[:, None]
    logs = np.einsum("cs,sg,cg->c", weight, log_keys, kept)[:, None]
    there = np.where(kept[:, None, None] > 0, sums.largest[:, parts], -np.inf).max(axis=(2, 3))
    with np.errstate(invalid="ignore", divide="ignore"):
        measures = {
            "max_logit": np.where(np.isfinite(there), there, np.nan),
            "row_max": by_name["row_max"] / count,
            "entropy": by_name["entropy"] / count,
            "entropy_share": by_name["entropy"] / logs,
            "sink_mass": by_name["sink"] / count,
            "sink4_mass": by_name["sink4"] / count,
            "self_mass": by_name["self"] / count,
            "previous_mass": by_name["previous"] / count,
            "unattended_mass": by_name["unattended"] / count,
        }
        return measures | _of_distance(
            sums, parts, _of_parts(layout, parts, spans, weight), kept, distance_edges(layout.context)
        )


def mass_by_distance(sums: AttentionSums, layout: Layout, tokens: Array, cells: slice, kept: Array) -> Array:
    """Shares of the attention that is not on position 0, by distance bin: (copies, heads, bins)."""
    spans, _, weight = _span_weights(sums, layout, tokens, cells, kept)
    parts = [span in spans for span in SampledPositions.of(layout).spans]
    weight = _of_parts(layout, parts, spans, weight)
    mass = np.einsum("cs,hsgb,cg->chb", weight, sums.mass[:, parts].astype(np.float64), kept)
    return divided(mass, mass.sum(axis=-1, keepdims=True))


def _span_weights(
    sums: AttentionSums, layout: Layout, tokens: Array, cells: slice, kept: Array
) -> tuple[list[int], Array, Array]:
    """The spans in a window, their rows (spans, copies), and tokens per row (copies, spans)."""
    spans = [number for number, span in enumerate(layout.spans) if span.stop <= cells.stop]
    rows = np.stack([sums.rows[layout.spans[n]].sum(axis=0) for n in spans]) @ kept.T
    return spans, rows, divided(np.stack([tokens[layout.spans[n]].sum(axis=0) for n in spans]) @ kept.T, rows).T


def _of_parts(layout: Layout, parts: list[bool], spans: list[int], weight: Array) -> Array:
    """The weights of spans as those of the parts that lie in them: (copies, parts)."""
    of = SampledPositions.of(layout).spans
    return weight[:, [spans.index(span) for span, inside in zip(of, parts, strict=True) if inside]]


def _of_distance(
    sums: AttentionSums, parts: list[bool], weight: Array, kept: Array, edges: tuple[int, ...]
) -> dict[str, Array]:
    """What distance says of attention; rows count by their attention that is not on position 0.

    `distance_share` is the R² of a regression of weights on distance, with a curve for each part of the positions:
    softmax makes weights smaller where more keys are seen.
    """
    mass_of = sums.mass[:, parts].astype(np.float64)
    keys_of = sums.keys[:, parts].astype(np.float64)
    by_part = np.einsum("hsgb,cg->chsb", mass_of, kept)
    keys = np.einsum("hsgb,cg->chsb", keys_of, kept)
    square = np.einsum("cs,hsg,cg->ch", weight, sums.square[:, parts].astype(np.float64), kept)
    far = np.einsum("cs,hsg,cg->ch", weight, sums.far[:, parts].astype(np.float64), kept)
    total = by_part.sum(axis=-1)  # (copies, heads, parts)
    mean = divided(by_part, keys)
    # The squared mean weight of a bin is too large by the variance of that mean, which groups show.
    groups = kept.sum(axis=1)[:, None, None]
    squared_off = np.einsum("hsgb,hsgb,cg->chsb", mass_of, mass_of, kept)
    squared_off += mean**2 * np.einsum("hsgb,hsgb,cg->chsb", keys_of, keys_of, kept)
    squared_off -= 2 * mean * np.einsum("hsgb,hsgb,cg->chsb", mass_of, keys_of, kept)
    noise = divided(squared_off * divided(groups, groups - 1.0)[..., None], keys).sum(axis=-1)
    even = divided(total**2, keys.sum(axis=-1))
    explained = np.einsum("cs,chs->ch", weight, (mean * by_part).sum(axis=-1) - noise - even)
    even = np.einsum("cs,chs->ch", weight, even)
    mass = np.einsum("cs,chsb->chb", weight, by_part)
    varies, outside = square - even, mass.sum(axis=-1)
    return {
        "distance_mean": np.where(outside > 0, divided(far, outside), np.nan),
        "distance_50": _within(mass, 0.5, edges),
        "distance_90": _within(mass, 0.9, edges),
        "distance_share": np.where(varies > NO_VARIANCE * even, np.clip(divided(explained, varies), 0.0, 1.0), np.nan),
    }


def _within(mass: Array, share: float, edges: tuple[int, ...]) -> Array:
    """Number of most recent tokens that get a share of the attention; attention in a bin is taken as even."""
    total = mass.sum(axis=-1)
    reached = np.cumsum(mass, axis=-1) / np.where(total > 0, total, np.nan)[..., None]
    bin_of = np.minimum((reached < share).sum(axis=-1), mass.shape[-1] - 1)
    before = np.where(bin_of > 0, np.take_along_axis(reached, np.maximum(bin_of - 1, 0)[..., None], -1)[..., 0], 0.0)
    inside = np.take_along_axis(reached, bin_of[..., None], -1)[..., 0] - before
    low, high = np.asarray(edges[:-1], dtype=float)[bin_of], np.asarray(edges[1:], dtype=float)[bin_of]
    part = np.clip(divided(share - before, inside), 0.0, 1.0)
    return np.where(total > 0, low + (high - low) * part, np.nan)


def divided(numerator: Array, denominator: Array) -> Array:
    """The ratio, 0 where the denominator is 0."""
    shape = np.broadcast_shapes(np.shape(numerator), np.shape(denominator))
    return np.divide(numerator, denominator, out=np.zeros(shape), where=np.asarray(denominator) != 0)


TABLE = HeadTable("attention", COLUMNS, attention_rows, stackable=True)
TYPES = HeadTable("head_types", TYPE_COLUMNS, head_types, windows="own", stackable=True)
BUCKETS = HeadTable(
    "attention_buckets", BUCKET_COLUMNS, attention_by_bucket, across="bucket", detail=True, stackable=True
)

LENS = Lens(
    name="attention",
    title="Attention",
    question="Where do heads attend, and how far back?",
    tables=(TABLE, TYPES, BUCKETS),
    figures=(
        Figure(
            "attention",
            title="Where Heads Attend",
            chart=Trajectories(
                (
                    Panel(("distance_50", "distance_90"), "Tokens that get 50% and 90% of attention"),
                    Panel(("sink_mass", "previous_mass", "self_mass"), "Attention weight"),
                    Panel(("entropy_share", "distance_share"), "Entropy, and share explained by distance"),
                    Panel(("row_max",), "Largest logit of a row", largest=True),
                )
            ),
            caption="Attention of sampled queries: how far back it reaches (effective context), how much goes to "
            "position 0, the previous token, and the token itself, how evenly it is spread, and how much of it "
            "distance alone explains. Distances leave out position 0.",
            measures=("distance_90", "sink_mass", "previous_mass", "distance_share", "entropy_share", "max_logit"),
        ),
    ),
    views=(
        View("curve", "Effective context", ("distance_50", "distance_90"), "Means over heads.", "attention"),
        View("curve", "Attention to position 0, the previous token, and the token itself",
             ("sink_mass", "previous_mass", "self_mass"), "Means over heads.", "attention"),
        View("curve", "Entropy, and share explained by distance", ("entropy_share", "distance_share"),
             "Means over heads."),
        View("heatmap", "Effective context of every head", ("distance_90",)),
        View("heatmap", "Attention of every head to position 0", ("sink_mass",)),
        View("scatter", "Effective context against attention explained by distance, a dot per head",
             ("distance_share", "distance_90")),
    ),
)  # fmt: skip
