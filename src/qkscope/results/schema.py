"""The columns that every table with rows per head shares, and those of `qk.csv`.

`qk.csv` has one row per checkpoint, layer, query head and principal component. `qk_common.csv` is the same
table at the study's common window, `qk_windows.csv` has component 0 at several prefix windows.
"""

import numpy as np
import numpy.typing as npt

# The files of these tables, for whoever speaks about them.
from qkscope.results.folder import LAYER_MEANS_CSV as LAYER_MEANS_CSV
from qkscope.results.folder import PROVENANCE_JSON as PROVENANCE_JSON
from qkscope.results.folder import QK_COMMON_CSV as QK_COMMON_CSV
from qkscope.results.folder import QK_CSV as QK_CSV
from qkscope.results.folder import QK_WINDOWS_CSV as QK_WINDOWS_CSV
from qkscope.results.folder import REPLICATES_CSV as REPLICATES_CSV

QK_FILES = (QK_CSV, QK_COMMON_CSV, QK_WINDOWS_CSV)

# Who: `model` is the checkpoint's name, `depth` is layer / (number of layers - 1).
IDENTITY_COLUMNS = ("model", "layer", "depth", "head", "kv_head", "pc")
# What method section 2 defines; a correlation that does not exist is empty in the file (NaN), never 0.
STATISTIC_COLUMNS = ("explained_variance", "r_q", "r_k", "n_q", "n_k")
# Least-squares lines v.q = mu_q + alpha t and v.k = mu_k + beta t, t in tokens.
LINE_COLUMNS = ("mu_q", "mu_k", "alpha", "beta")
# What the layer was: `rotary` is rotary | nope | unknown, `attention` is full | sliding | chunked (with its
# width in `attention_window`, empty for full), `window` the number of leading positions that were analysed, `documents`
# the number of documents that reach its end (empty where that was not counted), `errors` how the errors in `*_se` were
# found, or why there are none.
LAYER_COLUMNS = ("rotary", "rotary_dims", "head_dim", "attention", "attention_window", "window", "documents", "errors")

# How sure a component, a sign and a category are, from the errors in `<column>_se`.
JUDGED_COLUMNS = ("gap", "unstable", "sign_sure", "category_share")

QK_COLUMNS = IDENTITY_COLUMNS + STATISTIC_COLUMNS + LINE_COLUMNS + LAYER_COLUMNS

# The least a table from elsewhere must have for taxonomy, depth and figures.
REQUIRED_COLUMNS = ("model", "layer", "head", "pc", "explained_variance", "r_q", "r_k")

ROTARY, NOPE, UNKNOWN = "rotary", "nope", "unknown"
FULL, SLIDING, CHUNKED = "full", "sliding", "chunked"


def depth_of_layers(layer: npt.ArrayLike, last_layer: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """layer / last layer, in [0, 1]; the only layer of a one-layer model has depth 0."""
    layers = np.asarray(layer, dtype=np.float64)
    last = np.asarray(last_layer, dtype=np.float64)
    return np.divide(layers, last, out=np.zeros(np.broadcast(layers, last).shape), where=last > 0)
