"""A dataset of vectors in, rows of `plasticity_sampled.csv` out: sampled estimates beside the closed form.

What queries are like in each part of the window, moments say: those of the same checkpoint where there are any, else
those of the sample itself. Layers are read, analysed and forgotten one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.plasticity.grid import Array
from qkscope.lenses.plasticity.pairs import NUMBERS, SampledVectors, Tally
from qkscope.lenses.plasticity.published import published_plasticity
from qkscope.lenses.plasticity.sampled import PUBLISHED, LayerVectors, PairRequest, sampled_plasticity
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.moments import Moments
from qkscope.vectors.errors import VectorsError
from qkscope.vectors.layout import HeadName
from qkscope.vectors.read import Reading, VectorSet, layers_from_vectors, open_vectors
from qkscope.vectors.scan import HeadScan, vector_batches

SAMPLED_FILE = "plasticity_sampled.csv"
MOST_TOKENS = 50_000  # of a head's queries or keys, as the public code of the published study has it
ERRORS = "jackknife over the keys' documents, queries fixed"
NO_ERRORS = "none: pairs of fewer than four groups of documents"


def sampled_table(
    folder: Path | str,
    *,
    model: str,
    request: PairRequest,
    moments: Moments | None = None,
    windows: Sequence[int | None] = (None,),
    skip: int = 0,
    reading: Reading = Reading(),  # noqa: B008 - frozen
) -> pd.DataFrame:
    """One row per present query head, window and estimator; `moments` are those of the same checkpoint."""
    vector_set = open_vectors(folder, reading)
    parts = []
    for of_layer, layer in _layers(vector_set, moments):
        vectors = layer_vectors(vector_set, layer, request.seed)
        for window in windows:
            sums = layer_sums(of_layer, layer, sorted(vector_set.pairs[layer]), window, skip=skip)
            tallies = {
                **sampled_plasticity(sums, vectors, request),
                PUBLISHED: published_plasticity(sums, vectors, request),
            }
            parts += [rows_of(sums, name, tally, model, vector_set.n_layers) for name, tally in tallies.items()]
    order = ["window", "estimator", "layer", "head"]
    return pd.concat(parts, ignore_index=True).sort_values(order, kind="stable", ignore_index=True)


def rows_of(sums: LayerSums, estimator: str, tally: Tally, model: str, n_layers: int) -> pd.DataFrame:
    """One layer's rows of one estimator."""
    facts, numbers, errors = sums.facts, tally.numbers(), tally.errors()
    known = bool(np.isfinite(errors["ap"]).any())
    return pd.DataFrame(
        {
            "model": model,
            "layer": facts.layer,
            "depth": facts.layer / (n_layers - 1) if n_layers > 1 else 0.0,
            "head": sums.heads,
            "kv_head": sums.kv_heads,
            "estimator": estimator,
            **{column: values for name in NUMBERS for column, values in _beside(name, numbers, errors)},
            "pairs": tally.pairs.sum(axis=(1, 2, 3)).astype(np.int64),
            "places": (tally.pairs.sum(axis=(2, 3)) > 0).sum(axis=1),
            "rotary": facts.rotary,
            "attention": facts.attention,
            "attention_window": pd.array([facts.attention_window] * len(sums.heads), dtype="Int64"),
            "window": sums.window,
            "errors": ERRORS if known else NO_ERRORS,
        }
    )


def _beside(name: str, numbers: Mapping[str, Array], errors: Mapping[str, Array]) -> list[tuple[str, Array]]:
    return [(name, numbers[name]), (error_name(name), errors[name])]


def layer_vectors(vector_set: VectorSet, layer: int, seed: int = 0) -> LayerVectors:
    """The sample of a layer's queries and keys; of more than MOST_TOKENS of a head, so many are drawn."""
    queries = {head: _read(vector_set.scans[HeadName(layer, head, "q")], seed) for head in vector_set.pairs[layer]}
    keys = {
        head: _read(vector_set.scans[HeadName(layer, head, "k")], seed)
        for head in set(vector_set.pairs[layer].values())
    }
    return LayerVectors(queries, keys)


def _read(scan: HeadScan, seed: int) -> SampledVectors:
    kept = np.ones(scan.rows, dtype=bool)
    if scan.rows > MOST_TOKENS:
        drawn = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, scan.name.layer))))
        kept[:] = False
        kept[drawn.choice(scan.rows, MOST_TOKENS, replace=False)] = True
    read, parts = 0, []
    for batch in vector_batches(scan):
        here = kept[read : read + len(batch.position)]
        parts.append((batch.example_id[here], batch.position[here], batch.vectors[here].astype(np.float64)))
        read += len(batch.position)
    return SampledVectors(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _layers(vector_set: VectorSet, moments: Moments | None) -> Iterator[tuple[Moments, int]]:
    """Moments that know a layer, layer by layer: the checkpoint's, or those of the sample."""
    if moments is not None:
        for layer, facts in vector_set.layers.items():
            known = moments.layers.get(layer)
            if known is None or (known.q_heads, known.head_dim) != (facts.q_heads, facts.head_dim):
                raise VectorsError(f"{vector_set.root}: layer {layer} is not one of the model that the moments are of")
            yield moments, layer
        return
    for facts, sums in layers_from_vectors(vector_set):
        yield Moments.from_layers(vector_set.layout, [facts], {facts.layer: sums}, {}), facts.layer
