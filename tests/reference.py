"""The method on raw vectors, as a person would write it with sklearn and scipy: what qkscope is compared with."""

import numpy as np
import pandas as pd
from scipy.stats import linregress, pearsonr


def reference_rows(q, k, t_q, t_k, components=10, lines=True):
    """One head's components from its (n, d) queries and keys; `lines` are the straight lines through projections."""
    from sklearn.decomposition import PCA  # here: not every process that reads this file needs it

    pool = np.vstack([q, k])
    pca = PCA(components, svd_solver="full").fit(pool)
    rows = []
    for i, direction in enumerate(pca.components_):
        r_q, r_k = pearsonr(q @ direction, t_q)[0], pearsonr(k @ direction, t_k)[0]
        if (r_q if abs(r_q) >= 0.05 else r_k) < 0:
            direction, r_q, r_k = -direction, -r_q, -r_k
        rows.append({"pc": i, "explained_variance": pca.explained_variance_ratio_[i], "r_q": r_q, "r_k": r_k})
        if lines:
            on_q, on_k = linregress(t_q, q @ direction), linregress(t_k, k @ direction)
            rows[-1] |= {"mu_q": on_q.intercept, "mu_k": on_k.intercept, "alpha": on_q.slope, "beta": on_k.slope}
    return pd.DataFrame(rows)
