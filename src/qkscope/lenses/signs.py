"""Where the sign of r_k is not known, so that a flip is no difference.

A component has no direction of its own: it is turned so that r_q is positive, or r_k where r_q is weak. If another
sample of documents could have given an r_q of the other sign, the component could as well be turned the other way, and
r_q and r_k with it. Two such numbers are compared the way round in which their r_k agree in sign.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from qkscope.lenses.pca import WEAK_R_Q

# Where r_q has no error: twice what the sign rule calls weak. Errors of single heads' r_q are mostly 0.01 to 0.05.
SMALL_R_Q = 2 * WEAK_R_Q
# Beyond this r_k a key clearly runs with (or against) the direction in which its queries drift.
CONCORDANCE = 0.3


def sign_unsure(heads: pd.DataFrame) -> NDArray[np.bool_]:
    """Which heads could be turned round: r_q not significant (or small, without an error), or below 0.05."""
    size = heads["r_q"].abs().to_numpy(dtype=np.float64)
    sure = (
        heads["sign_sure"].to_numpy(dtype=np.float64) if "sign_sure" in heads.columns else np.full(len(heads), np.nan)
    )
    return np.asarray((sure == 0) | (np.isnan(sure) & (size < SMALL_R_Q)) | (size < WEAK_R_Q), dtype=bool)


def is_turned(r_k: ArrayLike, other_r_k: ArrayLike, unsure: ArrayLike) -> NDArray[np.bool_]:
    """Of heads whose sign is not known (on either side), those whose r_k have opposite signs."""
    opposite = np.asarray(r_k, dtype=np.float64) * np.asarray(other_r_k, dtype=np.float64) < 0
    return np.asarray(opposite & np.asarray(unsure, dtype=bool), dtype=bool)
