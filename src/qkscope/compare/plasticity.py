"""Published means of plasticity: the same of a run, by the published protocol, and how far a repetition may be off.

The closed form in `heads.csv` is another estimator: sixteen query buckets in place of about 150, the query's own
left out, and normal, independent keys in place of pairs that were drawn. It is not held against published numbers; the
rows of `plasticity_sampled.csv` whose estimator is `published` are.
"""

import math

import numpy as np
import pandas as pd

from qkscope.compare.lens_means import LensMeans, Noise
from qkscope.compare.references import PLASTICITY
from qkscope.lenses.base import error_name
from qkscope.lenses.plasticity.from_vectors import SAMPLED_FILE
from qkscope.lenses.plasticity.published import BUCKETS, MISSING
from qkscope.lenses.plasticity.sampled import PUBLISHED
from qkscope.results.read import ResultsFolder, read_study_table

WORDS = {
    "ap": "mean plasticity",
    "ap_first": "mean plasticity, first fifth",
    "ap_last": "mean plasticity, last fifth",
    "ap_drop": "mean drop of plasticity",
}
ERRORS = [error_name(name) for name in WORDS]
# Errors in the table are over the keys' documents, with queries held fixed. With both found anew, the error of a mean
# over heads of one layer was 0.8 to 1.4 times the mean of theirs in SmolLM2-135M (docs/lenses/plasticity.md).
WITH_QUERIES = 1.3
_KEY = ("model", "layer", "head", "window", "estimator")
_TEXTS = ("model", "estimator", "rotary", "attention", "errors")


def sampled_heads(results: ResultsFolder) -> pd.DataFrame | None:
    """The heads' rows by the published protocol at each checkpoint's own context; None where no pairs were drawn."""
    table = read_study_table(results, SAMPLED_FILE, [*WORDS, *ERRORS, "places"], _KEY, _TEXTS)
    if table is None:
        return None
    windows = results.heads.groupby("model")["window"].max()
    here = (table["window"] == table["model"].map(windows)) & (table["estimator"] == PUBLISHED)
    return table[here].reset_index(drop=True)


def plasticity_means(heads: pd.DataFrame) -> pd.DataFrame:
    """Plain means over heads."""
    return heads.groupby("model")[list(WORDS)].mean()


def plasticity_noise(heads: pd.DataFrame, published: pd.DataFrame, tokens: int, factor: float) -> Noise:
    """Standard error of the difference between two runs of the published protocol, by checkpoint and number.

    The run's own errors over documents, as if the published ones were as large: what plasticity's noise is follows from
    no published number. Heads of one layer are measured on the same tokens and err together, layers independently.
    """
    own = plasticity_errors(heads)
    cells = [(str(model), name) for model in published["model"] for name in WORDS]
    return {cell: math.sqrt(2.0) * own.get(cell, math.nan) for cell in cells}


def plasticity_errors(heads: pd.DataFrame, means: pd.DataFrame | None = None) -> Noise:
    """Errors of the run's own means, from those of heads: no replicates of sampled pairs are kept."""
    errors: Noise = {}
    for model, own in heads.groupby("model"):
        for name in WORDS:
            by_layer = own.groupby("layer")[error_name(name)].sum(min_count=1).to_numpy(dtype=float)
            errors[str(model), name] = WITH_QUERIES * math.sqrt(float(np.sum(by_layer**2))) / len(own)
    return errors


def said_of_buckets(heads: pd.DataFrame) -> str:
    """How many query buckets the run's sample could fill; with fewer, the protocol is not quite the published one."""
    known = heads.loc[heads["known"], "places"]
    if known.empty:
        return ""
    low, high = int(known.min()), int(known.max())
    span = str(low) if low == high else f"{low} to {high}"
    return (
        f"Plasticity is by the published protocol, which had about {BUCKETS - MISSING} query buckets; the vectors of "
        f"this run fill {span}."
    )


PLASTICITY_MEANS = LensMeans(
    name=PLASTICITY,
    title="means of plasticity",
    words=WORDS,
    shares=frozenset(WORDS),
    read=sampled_heads,
    aggregate=plasticity_means,
    noise=plasticity_noise,
    errors=plasticity_errors,
    absent=(
        f"these results have no {SAMPLED_FILE}, and the closed form in heads.csv is another estimator; keep "
        "vectors (qkscope run STUDY --vectors) and draw pairs (qkscope analyze RESULTS --plasticity-pairs 1000)"
    ),
    needs=("ap", *ERRORS),
    note=said_of_buckets,
)
