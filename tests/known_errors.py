"""A results folder whose errors can be computed by hand: four groups of documents move every number up, down, up, down.

On its own scale (Fisher's for correlations) a number without a group is STEP above or below the whole, so another
sample of documents, by the jackknife, is sqrt(4 - 1) STEP away.
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.draw import style
from qkscope.results.read import load_results
from written import put

STEP = 0.02
FAR = np.sqrt(3) * STEP  # how far another sample is
WAYS = (1, -1, 1, -1)  # of the four groups
MODELS = ("early", "late")
# (layer, head): r_q, r_k, explained variance, and which way this head moves with the documents
HEADS = {
    (0, 0): (0.71, 0.9, 0.5, 1),  # position-dominated in half of the samples, else mixed
    (0, 1): (0.5, -0.5, 0.3, 1),
    (1, 0): (0.1, 0.1, 0.4, 1),
    (1, 1): (0.2, -0.1, 0.2, -1),
}


def moved(r, by):
    """A correlation so far away on Fisher's scale."""
    return np.tanh(np.arctanh(r) + by)


def _rows(model, errors):
    for (layer, head), (r_q, r_k, share, _) in HEADS.items():
        row = {
            "model": model, "layer": layer, "head": head, "kv_head": head, "pc": 0, "depth": float(layer),
            "explained_variance": share, "r_q": r_q, "r_k": r_k, "n_q": 400, "n_k": 400, "window": 64,
            "rotary": "nope" if layer else "rotary",
        }  # fmt: skip
        if errors:
            se = {"explained_variance_se": FAR, "r_q_se": (1 - r_q**2) * FAR, "r_k_se": (1 - r_k**2) * FAR}
            row |= se | {"unstable": float((layer, head) == (0, 1)), "sign_sure": 1.0, "category_share": 1.0}
            row["category_share"] = 0.5 if (layer, head) == (0, 0) else 1.0
        yield row


def _replicates(model):
    for (layer, head), (r_q, r_k, share, way) in HEADS.items():
        row = {"model": model, "layer": layer, "head": head, "window": 64}
        row |= {"n_q": 400, "r_q": r_q, "r_k": r_k, "explained_variance": share}
        for group, up in enumerate(WAYS):
            by = STEP * way * up
            row[f"n_q_without_{group}"] = 300
            row |= {f"r_q_without_{group}": moved(r_q, by), f"r_k_without_{group}": moved(r_k, by)}
            row[f"explained_variance_without_{group}"] = share + by
        yield row


def write_known(folder: Path, *, errors: bool = True, windows: bool = False):
    """The folder, with or without its errors; returns its results."""
    table = pd.DataFrame([row for model in MODELS for row in _rows(model, errors)])
    table.to_csv(folder / "qk.csv", index=False)
    if errors:
        rows = [row for model in MODELS for row in _replicates(model)]
        put(folder, "replicates", pd.DataFrame(rows))
    if windows:
        shorter = table.assign(window=32, r_q=table["r_q"] / 2)
        put(folder, "heads", pd.concat([shorter, table]))
    entries = [{"name": model, "label": model.title()} for model in MODELS]
    (folder / "provenance.json").write_text(json.dumps({"study": {"title": "Known"}, "checkpoints": entries}))
    return load_results(folder)


def write_layer_means(folder: Path, tables, names, step: float = 0.01):
    """`layer_means.csv`: means of columns of lenses' tables (by the stem of their file) over the heads of each layer.

    Four groups of documents move them up, down, up, down by `step`: the error of a mean over heads is sqrt(3) steps.
    """
    rows = []
    for table in tables.values():
        for (model, layer, window), heads in table.groupby(["model", "layer", "window"]):
            who = {"model": model, "window": window, "layer": layer}
            tokens = {"measure": "tokens", "heads_of": "all", "heads": len(heads), "mean": 400}
            rows.append({**who, **tokens, **{f"without_{group}": 300 for group in range(4)}})
            for name in names:
                mean, known = heads[name].mean(), int(heads[name].notna().sum())
                without = {f"without_{group}": mean + way * step for group, way in enumerate(WAYS)}
                rows.append({**who, "measure": name, "heads_of": "all", "heads": known, "mean": mean, **without})
    put(folder, "layer_means", pd.DataFrame(rows))


def legend_leaves_room(figure) -> bool:
    """Whether a legend in the header does not cover the longest note that there is."""
    longest = "native context length: 65,536–131,072 tokens; common window: 4,096 tokens"
    return figure.legends[0].get_window_extent().x0 > 0.12 * style.DPI + style.text_size(figure, longest, 8.5)[0]
