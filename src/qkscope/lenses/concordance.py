"""Concordance: whether keys move with their queries along PC0 or against them, which cancel in a mean of r_k."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from qkscope.draw.palette import AMBER
from qkscope.lenses.base import Lens, Measure
from qkscope.lenses.signs import CONCORDANCE

SHARE = (0.0, 1.0)


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


def concordance(heads: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Per checkpoint: the shares of concordant, discordant, weak, unsure and undefined keys, mean r_k and |r_k|.

    Shares are of all heads of the checkpoint, undefined ones and those of unsure sign included.
    """
    measured = with_concordance(heads).assign(undefined=heads["r_k"].isna().astype(float), r_k_abs=heads["r_k"].abs())
    groups = measured.groupby("model", sort=False)
    columns = ["concordant", "discordant", "weak", "sign_unsure", "undefined", "r_k", "r_k_abs"]
    table = groups[columns].mean().reindex(list(models))
    table.insert(0, "heads", groups.size())
    return table.rename_axis("model").reset_index()


LENS = Lens(
    name="concordance",
    title="Concordance",
    question="Do keys move with their queries or against them?",
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
