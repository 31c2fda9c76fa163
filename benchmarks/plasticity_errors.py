"""What standard errors of sampled plasticity leave out: other queries (`plasticity.py`)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.moments import Moments
from qkscope.stats.jackknife import jackknife_error
from qkscope.validation.layout import find_vectors
from qkscope.validation.plasticity import GROUPS, published_plasticity
from qkscope.validation.plasticity_table import layer_sample
from qkscope.validation.scan import KeptLayer

PAIRS = 1000
ERROR_LAYERS = (4, 14, 24)


def layers_of(results: Path, name: str) -> Iterator[tuple[LayerSums, KeptLayer]]:
    """Every layer's sums with the sample of its vectors."""
    moments = Moments.load(results / f"moments/{name}.safetensors")
    found = find_vectors(results / f"vectors/{name}")
    for layer in found.layers():
        heads, keys = found.heads(layer, "q"), found.heads(layer, "k")
        yield layer_sums(moments, layer, heads), layer_sample(found.root, layer, heads, keys)


def errors_with_queries(results: Path, name: str) -> list[str]:
    """Errors of the published protocol with queries recomputed, against those that keep them constant."""
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
    factors = ", ".join(
        f"{of['ratio'].mean():.2f} for `{column}`" for column, of in table.groupby("column", sort=False)
    )
    return [
        "Standard errors of sampled pairs keep queries constant. With queries recomputed, the error of a mean over the "
        f"heads of a layer is larger than the mean error of its heads by factors of {factors} (published protocol, "
        f"mean over {len(ERROR_LAYERS)} layers)."
    ]


def without(kept: KeptLayer, group: int) -> KeptLayer:
    """A sample without one group of documents."""
    return kept.take(kept.document % GROUPS != group)
