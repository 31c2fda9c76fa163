"""Keys that run with their queries and keys that run against them: what the mean of r_k cancels."""

from collections.abc import Sequence

import pandas as pd

from qkscope.lenses.errors import with_mean_errors
from qkscope.lenses.signs import CONCORDANCE
from qkscope.lenses.views import WindowView

# What other documents would have given otherwise; which keys are undefined does not depend on them.
ESTIMATED = ("concordant", "discordant", "weak", "r_k", "r_k_abs")


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


def concordance_at(at: WindowView) -> pd.DataFrame:
    """The shares of a study at one choice of windows, with their errors over documents."""
    return with_mean_errors(concordance(at.heads, at.names), at.panel, ESTIMATED)
