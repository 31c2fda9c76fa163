"""What errors of plasticity leave out: covariances in the closed form, queries in sampled pairs (`plasticity.py`)."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from score_split import Case, from_wheel

from qkscope.capture.tap import AttentionCall, Tap
from qkscope.layers import LayerFacts
from qkscope.lenses.plasticity.table import plasticity
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.layout import capture_layout
from qkscope.moments.moments import Moments
from qkscope.stats.jackknife import jackknife_error
from qkscope.validation.kept import KeptLayer
from qkscope.validation.layout import find_vectors
from qkscope.validation.plasticity import GROUPS
from qkscope.validation.plasticity_table import layer_sample
from qkscope.validation.published import published_plasticity

PAIRS = 1000
CONTEXT = 2048
ERROR_LAYERS = (4, 14, 24)


def layers_of(results: Path, name: str) -> Iterator[tuple[LayerSums, KeptLayer]]:
    """Every layer's sums with the sample of its vectors."""
    moments = Moments.load(results / f"moments/{name}.safetensors")
    found = find_vectors(results / f"vectors/{name}")
    for layer in found.layers():
        heads, keys = found.heads(layer, "q"), found.heads(layer, "k")
        yield layer_sums(moments, layer, heads), layer_sample(found.root, layer, heads, keys)


def errors_with_covariances(count: int = GROUPS) -> list[str]:
    """Errors with everything found anew against those that hold covariances fixed, from all tokens of documents."""
    facts, documents = caught(count)
    ratios: dict[str, list] = {column: [] for column in ("ap", "ap_drop", "ap_drop_matched")}
    for layer, of_layer in facts.items():
        vectors = [document[layer] for document in documents]
        left = [[i for i in range(count) if i != out] for out in range(count)]
        whole, *exact = (
            layer_sums(summed(of_layer, vectors, chosen), layer, range(of_layer.q_heads))
            for chosen in (range(count), *left)
        )
        values = [plasticity(each) for each in (whole, *whole.replicates, *exact)]
        for column, of in ratios.items():
            theta, fixed, full = values[0][column], values[1 : count + 1], values[count + 1 :]
            errors = [
                jackknife_error(theta, np.stack([v[column] for v in each]), [1] * count) for each in (fixed, full)
            ]
            of.append(errors[1] / errors[0])
    told = ", ".join(f"{np.median(np.concatenate(of)):.2f} for `{column}`" for column, of in ratios.items())
    return [
        f"With covariances found anew too, errors of heads are larger by factors of (medians over the heads of "
        f"{len(facts)} layers of SmolLM2-135M, {count} speeches of {CONTEXT:,} tokens) {told}."
    ]


def caught(count: int) -> tuple[dict[int, LayerFacts], list[dict[int, tuple[np.ndarray, np.ndarray]]]]:
    """Facts of some layers, and of every document their queries and keys: (heads, tokens, width) each."""
    load = from_wheel("smollm2-135m")
    model, windows = load(Case("SmolLM2-135M", count, CONTEXT, load))
    documents: list[dict[int, tuple[np.ndarray, np.ndarray]]] = []

    def observe(call: AttentionCall) -> None:
        if call.layer in ERROR_LAYERS:
            documents[-1][call.layer] = (call.query[0].float().numpy(), call.key[0].float().numpy())

    with torch.inference_mode(), Tap(model, observe):
        for window in windows:
            documents.append({})
            model(input_ids=torch.tensor([window]), use_cache=False)
    facts = {
        layer: LayerFacts(layer, len(query), len(key), query.shape[2]) for layer, (query, key) in documents[0].items()
    }
    return facts, documents


def summed(facts: LayerFacts, vectors: list[tuple[np.ndarray, np.ndarray]], chosen: Iterable[int]) -> Moments:
    """Moments of some documents, each a group by itself."""
    moments = Moments(capture_layout(CONTEXT, groups=len(vectors)), [facts])
    for document in chosen:
        query, key = vectors[document]
        moments.add(facts.layer, query[None], key[None], groups=[document])
    return moments


def errors_with_queries(results: Path, name: str) -> list[str]:
    """Errors of the published protocol with queries found anew too, against those that hold them fixed."""
    ratios = []
    for sums, kept in layers_of(results, name):
        if sums.facts.layer not in ERROR_LAYERS:
            continue
        documents = np.unique(kept.document)
        groups = np.unique(documents % GROUPS)
        tally = published_plasticity(sums, kept, PAIRS)
        fixed = {column: tally.errors()[column].mean() for column in ("ap", "ap_drop")}  # as if heads erred together
        replicates = [published_plasticity(sums, without(kept, group), PAIRS).numbers() for group in groups.tolist()]
        for column, error in fixed.items():
            means = np.array([each[column].mean() for each in replicates])
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


def without(kept: KeptLayer, group: int) -> KeptLayer:
    """A sample without one group of documents."""
    return kept.take(kept.document % GROUPS != group)
