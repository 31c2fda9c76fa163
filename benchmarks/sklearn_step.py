"""The step that qkscope replaces: PCA of each head's pooled vectors, and a correlation per component.

Nothing here knows qkscope; the other tools' environment runs it too.
"""

import numpy as np
from scipy.stats import pearsonr
from sklearn.decomposition import PCA

COLUMNS = ("layer", "head", "pc", "explained_variance", "r_q", "r_k")


def head_rows(layer: int, head: int, q: np.ndarray, k: np.ndarray, t: np.ndarray) -> list[tuple]:
    """Ten rows of one head; `q` and `k` are (tokens, width)."""
    pca = PCA(10).fit(np.concatenate([q, k]))
    rows = []
    for i, direction in enumerate(pca.components_):
        r_q, r_k = pearsonr(q @ direction, t)[0], pearsonr(k @ direction, t)[0]
        sign = -1 if (r_q if abs(r_q) >= 0.05 else r_k) < 0 else 1
        rows.append((layer, head, i, pca.explained_variance_ratio_[i], sign * r_q, sign * r_k))
    return rows


def layers_rows(layers: dict[int, tuple[np.ndarray, np.ndarray]], t: np.ndarray) -> list[tuple]:
    """Rows of (heads, tokens, width) queries and keys held in memory; one BLAS thread each, heads over all cores."""
    import os
    from concurrent.futures import ThreadPoolExecutor

    from threadpoolctl import threadpool_limits

    def rows_of(place):
        layer, head = place
        q, k = layers[layer]
        return head_rows(layer, head, q[head], k[head // (len(q) // len(k))], t)

    places = [(layer, head) for layer, (q, _) in sorted(layers.items()) for head in range(len(q))]
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        return [row for rows in pool.map(rows_of, places) for row in rows]
