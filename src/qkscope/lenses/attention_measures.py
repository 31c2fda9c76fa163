"""Measures of attention from the sums over sampled rows: one number per head, with any document groups left out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from qkscope.moments.attention_rows import SCALARS, AttentionSums, SampledPositions, distance_edges
from qkscope.moments.layout import Layout

Array = NDArray[np.float64]
NO_VARIANCE = 1e-4  # of the squared mean weight: float32 sums resolve no less


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
