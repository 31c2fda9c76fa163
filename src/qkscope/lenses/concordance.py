"""Whether keys move with their queries along PC0 or against them, and where the sign of r_k is not known.

A component has no direction of its own: it is turned so that r_q is positive, or r_k where r_q is weak. If another
sample of documents could have given an r_q of the other sign, the component could as well be turned the other way, and
r_q and r_k with it. Two such numbers are compared the way round in which their r_k agree in sign.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from qkscope.draw.palette import AMBER
from qkscope.lenses.base import Lens, Measure
from qkscope.lenses.pca import WEAK_R_Q

SHARE = (0.0, 1.0)
# Where r_q has no error: twice what the sign rule calls weak. Errors of single heads' r_q are mostly 0.01 to 0.05.
SMALL_R_Q = 2 * WEAK_R_Q
# Beyond this r_k a key clearly runs with (or against) the direction in which its queries drift.
CONCORDANCE = 0.3


def sign_unsure(heads: pd.DataFrame) -> NDArray[np.bool_]:
    """Which heads could be turned round: r_q not significant (or small, without an error), or below 0.05."""
    size = heads["r_q"].abs().to_numpy(dtype=np.float64)
    sure = heads.get("sign_sure", pd.Series(np.nan, index=heads.index)).to_numpy(dtype=np.float64)
    return np.asarray((sure == 0) | (np.isnan(sure) & (size < SMALL_R_Q)) | (size < WEAK_R_Q), dtype=bool)


def is_turned(r_k: ArrayLike, other_r_k: ArrayLike, unsure: ArrayLike) -> NDArray[np.bool_]:
    """Of heads whose sign is not known (on either side), those whose r_k have opposite signs."""
    opposite = np.asarray(r_k, dtype=np.float64) * np.asarray(other_r_k, dtype=np.float64) < 0
    return np.asarray(opposite & np.asarray(unsure, dtype=bool), dtype=bool)


def with_concordance(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads with indicators, 0 or 1: keys with their queries, against them, neither clearly, and of unsure sign.

    A head whose r_q does not differ significantly from 0 is neither with nor against: its component could as well be
    turned the other way, and with it the sign of r_k. `sign_unsure` marks those whose r_k would count otherwise.
    """
    unsure = heads["sign_sure"] == 0 if "sign_sure" in heads.columns else pd.Series(False, index=heads.index)
    large = heads["r_k"].abs() > CONCORDANCE
    return heads.assign(
        concordant=((heads["r_k"] > CONCORDANCE) & ~unsure).astype(float),
        discordant=((heads["r_k"] < -CONCORDANCE) & ~unsure).astype(float),
        weak=(heads["r_k"].abs() <= CONCORDANCE).astype(float),
        sign_unsure=(large & unsure).astype(float),
    )


LENS = Lens(
    name="concordance",
    title="Concordance",
    question="Do keys track position in the same direction as queries?",
    derive=with_concordance,
    derived=(
        Measure("concordant", f"1 if r_k is above {CONCORDANCE} and the sign is certain, otherwise 0.", "", SHARE,
                title="concordant heads", kind="indicator"),
        Measure("discordant", f"1 if r_k is below −{CONCORDANCE} and the sign is certain, otherwise 0.", "", SHARE,
                title="discordant heads", kind="indicator", color=AMBER),
        Measure("weak", f"1 if the size of r_k is at most {CONCORDANCE}, otherwise 0.", "", SHARE,
                title="heads with weak r_k", kind="indicator"),
        Measure("sign_unsure", f"1 if r_k is beyond {CONCORDANCE} in size and its sign is uncertain, otherwise 0.", "",
                SHARE, title="heads of uncertain sign", kind="indicator"),
    ),
)  # fmt: skip
