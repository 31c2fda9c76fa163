"""Compare two runs head by head, number by number.

Runs over the same documents differ by rounding only, so any difference beyond it counts. Runs over other documents
differ by chance too: there a number differs only beyond so many standard errors of both sides that at most one in
twenty of those called different is expected to be so by chance. Where the sign of a head is not known on either side,
a flip is no difference: the reference is flipped, and such heads are counted.
"""

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd

from qkscope.compare.judge import DIFFERS, JudgedNumbers, judge, listed_names, quoted_names, window_note
from qkscope.compare.numbers import MEASURES
from qkscope.compare.tolerance import discovery_multiple
from qkscope.errors import InputError
from qkscope.lenses.base import error_name
from qkscope.lenses.categories import with_category
from qkscope.lenses.concordance import is_turned, sign_unsure
from qkscope.lenses.draws import KEY, replicate_groups
from qkscope.results.read import ResultsFolder
from qkscope.results.schema import REPLICATES
from qkscope.stats import significance
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.text import counted

CHANGED_COLUMNS = (
    "model", "layer", "head", "category", "reference_category",
    "r_q", "reference_r_q", "r_k", "reference_r_k", "explained_variance", "reference_explained_variance",
    "sign_unknown", "unstable",
)  # fmt: skip
# Two runs over the same tokens differ by rounding only; correlations of one table are exact to about 1e-7.
STRICT = 1e-6


def compare_folders(mine: ResultsFolder, other: ResultsFolder, wanted: float | None) -> JudgedNumbers:
    """Compare two results folders at native contexts; `other` is the reference."""
    return compare_heads(
        mine.heads,
        mine.study.names,
        other.heads,
        other.study.names,
        wanted,
        other_documents=_other_documents(mine, other),
        groups=min(_document_groups(run) for run in (mine, other)),
    )


def _document_groups(run: ResultsFolder) -> int:
    """The groups of documents behind a run's errors: those of its replicates, else those of its study."""
    replicates = run.table(REPLICATES)
    if replicates is not None and (groups := replicate_groups(replicates)):
        return len(groups)
    study = run.provenance.study
    return max(FEWEST_GROUPS, 0 if study is None else study.groups or 0)


def _other_documents(mine: ResultsFolder, other: ResultsFolder) -> list[str]:
    """The checkpoints of both that are known to have read other documents."""
    read = [
        {
            c.name: (c.record.corpus.fingerprint if c.record.corpus else None, c.record.documents)
            for c in run.study.checkpoints
        }
        for run in (mine, other)
    ]
    shared = [name for name in read[0] if name in read[1] and None not in (*read[0][name], *read[1][name])]
    return [name for name in shared if read[0][name] != read[1][name]]


def compare_heads(
    heads: pd.DataFrame,
    names: Sequence[str],
    other: pd.DataFrame,
    other_names: Sequence[str],
    wanted: float | None = None,
    *,
    other_documents: Collection[str] = (),
    groups: int = FEWEST_GROUPS,
) -> JudgedNumbers:
    """Compare two tables of component 0; `other` is the reference. Raises InputError when they share no head.

    `wanted` replaces every tolerance. `other_documents` are checkpoints that are known to have read other documents,
    dealt into `groups`.
    """
    both = _side_by_side(heads, other, list(dict.fromkeys([*names, *other_names])))
    pairs = both[both["on_both"]].reset_index(drop=True)
    if pairs.empty:
        raise InputError(
            "nothing in common: heads are matched by checkpoint name, layer and head; the results have the "
            f"checkpoints {quoted_names(names)}, the reference has {quoted_names(other_names)}"
        )
    allowed = STRICT if wanted is None else wanted
    cells = pd.concat([_cells(both, measure, allowed) for measure in MEASURES], ignore_index=True)
    note = f"A number is reproduced when it differs by at most {allowed:g}."
    by_errors = (cells["model"].isin(list(other_documents)) & cells["error"].notna() & (wanted is None)).to_numpy()
    if by_errors.any():
        ratios = (cells["value"] - cells["reference"]).abs() / cells["error"]
        multiple = discovery_multiple(ratios.to_numpy()[by_errors], groups)
        cells["tolerance"] = np.where(by_errors, np.fmax(multiple * cells["error"], allowed), allowed)
        by_documents = set(cells.loc[by_errors, "model"])
        note += (
            f" At {listed_names([name for name in names if name in by_documents])} both sides read other documents: "
            f"there it may differ by {multiple:.1f} standard errors over documents, so that at most "
            f"{100 * significance.LEVEL:g}% of the numbers beyond are expected to be there by chance (Benjamini and "
            "Hochberg)."
        )
    judged = judge(cells)
    changed = pairs[pairs["category"] != pairs["reference_category"]].rename(columns={"turned": "sign_unknown"})
    return JudgedNumbers(
        cells=judged,
        only_results=tuple(name for name in names if name not in set(other_names)),
        only_reference=tuple(name for name in other_names if name not in set(names)),
        noun="number",
        tolerance_note=f"{note} Categories follow from the correlations and do not enter the verdict.",
        notes=tuple(_notes(pairs, len(changed), judged, groups)),
        changed=changed[list(CHANGED_COLUMNS)].reset_index(drop=True),
    )


def _side_by_side(heads: pd.DataFrame, other: pd.DataFrame, order: Sequence[str]) -> pd.DataFrame:
    """The heads of both tables, those of `other` with the prefix reference_, in the order of the checkpoints.

    `turned` says that the sign is not known and the reference has to be flipped, `unstable` that the component is
    unstable on either side.
    """
    columns = [*KEY, *MEASURES, *map(error_name, MEASURES), "category", "window", "unstable"]
    one, two = (
        with_category(table).reindex(columns=columns).assign(unsure=sign_unsure(table)) for table in (heads, other)
    )
    renamed = {name: f"reference_{name}" for name in one.columns if name not in KEY}
    both = one.merge(two.rename(columns=renamed), on=KEY, how="outer", indicator="side")
    places = {name: i for i, name in enumerate(order)}
    both = both.sort_values(KEY, key=lambda column: column.map(places) if column.name == "model" else column)
    unsure = both["unsure"].eq(True) | both["reference_unsure"].eq(True)
    return both.assign(
        on_both=both["side"] == "both",
        turned=is_turned(both["r_k"], both["reference_r_k"], unsure),
        unstable=both["unstable"].eq(1) | both["reference_unstable"].eq(1),
    )


def _cells(both: pd.DataFrame, measure: str, allowed: float) -> pd.DataFrame:
    errors = [both[f"{side}{error_name(measure)}"].to_numpy(dtype=float) for side in ("", "reference_")]
    flipped = both["turned"] & (measure in ("r_q", "r_k"))
    reference = both[f"reference_{measure}"].to_numpy(dtype=float)
    return pd.DataFrame(
        {
            "what": measure,
            "model": both["model"],
            "cell": "layer " + both["layer"].astype(str) + " head " + both["head"].astype(str),
            "value": both[measure],
            "reference": np.where(flipped, -reference, reference),
            "error": np.hypot(*errors),
            "tolerance": allowed,
            "on_both": both["on_both"],
            "sign_unknown": flipped,
            "unstable": both["unstable"],
        }
    )


def _notes(pairs: pd.DataFrame, changed: int, cells: pd.DataFrame, groups: int) -> list[str]:
    """Which heads were compared, and what makes their differences uncertain."""
    heads, checkpoints = counted(len(pairs), "head"), counted(pairs["model"].nunique(), "checkpoint")
    turned, unstable = int(pairs["turned"].sum()), int(pairs["unstable"].sum())
    windows, others = (pairs.groupby("model", sort=False)[name].max() for name in ("window", "reference_window"))
    notes = [
        f"{heads} at {checkpoints}, matched by layer and head; {changed:,} changed category.",
        *window_note(windows, others),
    ]
    if turned:
        notes.append(
            f"{counted(turned, 'head')} of {len(pairs):,} have r_k of opposite signs but an r_q so close to 0 that the "
            "sign is not known: the reference is flipped there."
        )
    if unstable:
        notes.append(f"{counted(unstable, 'head')} of {len(pairs):,} have an unstable component on either side.")
    known = cells[(cells["verdict"] == DIFFERS) & cells["error"].notna()]
    if len(known):
        beyond = significance.is_significant(known["difference"], known["error"], groups - 1) == 1
        notes.append(
            f"{int(beyond.sum()):,} of {counted(len(known), 'different number')} with errors differ significantly "
            "(standard errors over documents)."
        )
    return notes
