"""What errors of plasticity leave out: covariances in the closed form, queries in sampled pairs (`plasticity.py`)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.lenses.plasticity.from_vectors import layer_vectors
from qkscope.lenses.plasticity.pairs import GROUPS, SampledVectors
from qkscope.lenses.plasticity.published import published_plasticity
from qkscope.lenses.plasticity.sampled import LayerVectors, PairRequest
from qkscope.lenses.plasticity.table import plasticity
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.layout import capture_layout
from qkscope.moments.moments import Moments
from qkscope.stats.jackknife import jackknife_error
from qkscope.vectors.read import open_vectors

PAIRS = PairRequest(1000)
ERROR_LAYERS = (4, 14, 24)


def layers_of(results: Path, name: str) -> Iterator[tuple[LayerSums, LayerVectors]]:
    """Every layer's sums with the sample of its vectors."""
    moments = Moments.load(results / f"moments/{name}.safetensors")
    found = open_vectors(results / f"vectors/{name}")
    for layer in found.layers:
        yield layer_sums(moments, layer, sorted(found.pairs[layer])), layer_vectors(found, layer)


def errors_with_covariances(results: Path, name: str) -> list[str]:
    """Errors with everything replicated against those that hold covariances fixed, from the sample of vectors."""
    found = open_vectors(results / f"vectors/{name}")
    ratios: dict[str, list] = {column: [] for column in ("ap", "ap_content", "ap_drop", "ap_drop_matched")}
    for layer in ERROR_LAYERS:
        vectors, facts = layer_vectors(found, layer), found.layers[layer]
        documents = np.unique(next(iter(vectors.k.values())).document)
        kept = [documents, *(documents[documents % 8 != group] for group in range(8))]
        moments = [of_documents(vectors, facts, each, found.layout.context) for each in kept]
        whole, *exact = (layer_sums(each, layer, range(facts.q_heads)) for each in moments)
        values = [plasticity(each) for each in (whole, *whole.replicates, *exact)]
        for column, of in ratios.items():
            theta, fixed, full = values[0][column], values[1:9], values[9:]
            sizes = np.bincount(documents % 8)
            errors = [jackknife_error(theta, np.stack([v[column] for v in each]), sizes) for each in (fixed, full)]
            of.append(errors[1] / errors[0])
    told = ", ".join(f"{np.median(np.concatenate(of)):.2f} for `{column}`" for column, of in ratios.items())
    return [
        f"With covariances found anew too, errors of heads change by factors of (medians over the heads of "
        f"{len(ERROR_LAYERS)} layers of SmolLM2-135M) {told}. That is from the sample of vectors, where covariances "
        "are noisier than in the sums of all tokens."
    ]


def errors_with_queries(results: Path, name: str) -> list[str]:
    """Errors of the published protocol with queries found anew too, against those that hold them fixed."""
    ratios = []
    for sums, vectors in layers_of(results, name):
        if sums.facts.layer not in ERROR_LAYERS:
            continue
        documents = np.unique(next(iter(vectors.k.values())).document)
        groups = np.unique(documents % GROUPS)
        tally = published_plasticity(sums, vectors, PAIRS)
        fixed = {column: tally.errors()[column].mean() for column in ("ap", "ap_drop")}  # as if heads erred together
        without = [published_plasticity(sums, left(vectors, group), PAIRS).numbers() for group in groups.tolist()]
        for column, error in fixed.items():
            means = np.array([each[column].mean() for each in without])
            sizes = np.bincount(documents % GROUPS)[groups]
            full = jackknife_error(np.array(tally.numbers()[column].mean()), means, sizes)
            ratios.append({"layer": sums.facts.layer, "column": column, "ratio": float(full) / error})
    table = pd.DataFrame(ratios)
    print(table.to_string(), flush=True)
    told = ", ".join(f"{of['ratio'].mean():.2f} for `{column}`" for column, of in table.groupby("column", sort=False))
    return [
        "Errors of sampled pairs hold queries fixed. By the published protocol, the error of a mean over the heads of "
        f"a layer with queries found anew, relative to the mean error of its heads, is (mean over {len(ERROR_LAYERS)} "
        f"layers) {told}."
    ]


def left(vectors: LayerVectors, group: int) -> LayerVectors:
    """A sample without one group of documents."""

    def of(heads: Mapping[int, SampledVectors]) -> dict[int, SampledVectors]:
        return {head: kept(sample, sample.document % GROUPS != group) for head, sample in heads.items()}

    return LayerVectors(of(vectors.q), of(vectors.k))


def kept(sample: SampledVectors, which: np.ndarray) -> SampledVectors:
    return SampledVectors(sample.document[which], sample.position[which], sample.vectors[which])


def of_documents(vectors: LayerVectors, facts, documents: np.ndarray, context: int) -> Moments:
    """Moments of some documents' sampled tokens."""
    moments = Moments(capture_layout(context), [replace(facts, rotary="unknown", rotation=None)])
    first = next(iter(vectors.k.values()))
    for document in documents.tolist():
        rows = [
            np.stack([of.vectors[of.document == document] for _, of in sorted(heads.items())])[None]
            for heads in (vectors.q, vectors.k)
        ]
        positions = first.position[first.document == document]
        moments.add(facts.layer, *rows, positions=positions[None], groups=[document % 8])
    return moments
