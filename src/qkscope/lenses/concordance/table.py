"""Keys that run with their queries and keys that run against them: what the mean of r_k cancels."""

import pandas as pd

from qkscope.lenses.at_window import AtWindow

# Beyond this r_k a key clearly runs with (or against) the direction in which its queries drift.
CONCORDANCE = 0.3


def with_concordance(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads with two indicators, 0 or 1."""
    return heads.assign(
        concordant=(heads["r_k"] > CONCORDANCE).astype(float),
        discordant=(heads["r_k"] < -CONCORDANCE).astype(float),
    )


def concordance(at: AtWindow) -> pd.DataFrame:
    """Per checkpoint: the shares of concordant, discordant, weak and undefined keys, mean r_k and |r_k|.

    Shares are of all heads of the checkpoint, undefined ones included.
    """
    measured = at.heads.assign(undefined=at.heads["r_k"].isna().astype(float))
    groups = measured.groupby("model", sort=False)
    columns = ["concordant", "discordant", "undefined", "r_k", "r_k_abs"]
    table = groups[columns].mean().reindex(list(at.names))
    weak = 1.0 - table["concordant"] - table["discordant"] - table["undefined"]
    table.insert(2, "weak", weak.clip(lower=0.0))
    table.insert(0, "heads", groups.size())
    return table.rename_axis("model").reset_index()
