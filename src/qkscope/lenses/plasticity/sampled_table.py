"""`plasticity_sampled.csv`: plasticity from pairs of real keys, where a run kept vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.lenses.base import SampledTable
from qkscope.lenses.kept_sample import KeptSample
from qkscope.lenses.plasticity.from_vectors import SAMPLED_FILE, sampled_table
from qkscope.lenses.plasticity.sampled import KEY_PAIRS, PairRequest
from qkscope.results.folder import stored_table
from qkscope.results.schema import HEADS


def sampled_rows(kept: KeptSample, pairs: int) -> pd.DataFrame:
    """One checkpoint's rows."""
    return sampled_table(
        kept.folder,
        model=kept.model,
        request=PairRequest(pairs),
        moments=kept.moments,
        windows=kept.windows,
        skip=kept.skip,
    )


def beside_closed_form(sampled: pd.DataFrame, folder: Path) -> str | None:
    """How far the closed form is from the pairs, over the heads that both have; None where there are none."""
    closed = stored_table(folder, HEADS)
    if closed is None:
        return None
    key = ["model", "layer", "head", "window"]
    read = pd.read_csv if closed.suffix == ".csv" else pd.read_parquet
    heads = read(closed)[[*key, "ap"]]
    pairs = sampled[sampled["estimator"] == KEY_PAIRS]
    both = pairs.merge(heads, on=key, suffixes=("", "_closed"))
    apart = (both["ap_closed"] - both["ap"]).dropna().to_numpy()
    if not len(apart):
        return None
    size = float(np.sqrt(np.mean(apart**2)))
    heads = f"closed form minus {KEY_PAIRS}, ap of {len(apart)} heads"
    return f"{heads}: mean {apart.mean():+.3f}, root mean square {size:.3f}"


SAMPLED = SampledTable(SAMPLED_FILE, sampled_rows, beside_closed_form)
