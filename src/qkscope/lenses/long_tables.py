"""`means.csv` and `changes.csv`: every measure of every lens over the heads of each checkpoint, a number to a row.

One computation for all measures. A row is about a checkpoint over a window (or two checkpoints), and about all its
heads or those of one layer type. Codes and constants are not averaged; an indicator's mean is a share of heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd

from qkscope.lenses.concordance import is_turned, sign_unsure
from qkscope.lenses.draws import KEY, replicate_groups, replicated
from qkscope.lenses.kind_of_layer import part_of, rows_by_kind
from qkscope.lenses.views import Results, WindowView
from qkscope.results.mapped import NO_ROWS, SpillingTable, drop_page_cache, rows_of_entries
from qkscope.stats import significance
from qkscope.stats.jackknife import false_discoveries, jackknife_error, p_values
from qkscope.stats.means import over_heads
from qkscope.stats.significance import Significance

MEANS_COLUMNS = (
    "model", "window", "windows", "layer_type", "measure", "heads", "mean", "sd", "se", "se_heads", "p25", "median",
    "p75",
)  # fmt: skip
CHANGES_COLUMNS = (
    "from_model", "to_model", "windows", "from_window", "to_window", "layer_type", "measure", "heads", "before",
    "after", "change", "se", "se_heads", "p", "significant",
)  # fmt: skip
# Of a change, where a lens knows them: the part that window and RoPE base explain, and the weights; what is left.
ATTRIBUTION = ("window_and_base", "window_and_base_se", "weights", "weights_se", "unexplained", "unexplained_se")
MEASURED = ("r_q", "r_k")  # whose changes are judged head by head
HEAD_CHANGES = [
    "from_model", "to_model", "layer", "head", "turned",
    *(f"{name}{part}" for name in MEASURED for part in ("_change", "_change_se", "_changed")),
]  # fmt: skip
SIGNIFICANT = {Significance.CHANGED: 1.0, Significance.UNCHANGED: 0.0, Significance.UNKNOWN: math.nan}


def means_table(results: Results, measures: Sequence[str] | None = None) -> pd.DataFrame:
    """Means over heads at every window, of these measures or of all."""
    pieces = [piece() for piece in means_pieces(results, measures)]
    return pd.concat(pieces, ignore_index=True) if pieces else pd.DataFrame(columns=list(MEANS_COLUMNS))


def means_pieces(results: Results, measures: Sequence[str] | None = None) -> list[Callable[[], pd.DataFrame]]:
    """What makes the rows of each checkpoint, in order."""
    return [partial(_checkpoint_means, results, name, measures) for name in results.own.names]


def _checkpoint_means(results: Results, name: str, measures: Sequence[str] | None) -> pd.DataFrame:
    drop_page_cache()  # of the checkpoint before
    own, common = results.own, results.common
    views = {"own": own} | ({"common": common} if common is not None and name in common.names else {})
    if common is None or len({view.window_of(name) for view in views.values()}) < len(views):
        views = {"own+common": own}
    # Where numbers are, what the place is called there, the window, what it is to the checkpoint, and what is known.
    places = [(at.panel, name, at.window_of(name), role, at.mean_measures) for role, at in views.items()]
    doublings = [each for each in own.windows_of_entry(name) if each not in {window for _, _, window, *_ in places}]
    if doublings:
        panel = own.window_panel(name)
        places += [(panel, str(int(each)), each, "doubling", own.redrawn_measures) for each in doublings]
    rows: list[tuple[object, ...]] = []
    for panel, place, window, role, known in places:
        wanted = known if measures is None else [each for each in measures if role != "doubling" or each in known]
        for kind in rows_by_kind(own.of_entry(name)["layer_kind"]):
            part = part_of(kind)
            numbers = over_heads([panel.values(measure, place, part) for measure in wanted])
            for measure, (heads, mean, spread, *quartiles) in zip(wanted, numbers.tolist(), strict=True):
                if heads:
                    errors = panel.error(measure, place, part), panel.head_error(measure, place, part).size
                    rows.append((name, window, role, kind, measure, int(heads), mean, spread, *errors, *quartiles))
    return pd.DataFrame(rows, columns=list(MEANS_COLUMNS))


def changes_table(results: Results, measures: Sequence[str] | None = None) -> pd.DataFrame | None:
    """Changes of means from each checkpoint of a run to the next, and from the first to the last; else None."""
    pieces = [piece() for piece in changes_pieces(results, measures)]
    return pd.concat(pieces, ignore_index=True) if pieces else None


def changes_pieces(results: Results, measures: Sequence[str] | None = None) -> list[Callable[[], pd.DataFrame]]:
    """What makes the rows of each step at each choice of windows."""
    if not results.own.study.one_run:
        return []
    pieces: list[Callable[[], pd.DataFrame]] = []
    for view in results.views():
        names = view.names
        ends = [(names[0], names[-1])] if len(names) > 2 else []
        pieces += [partial(_step_changes, view, *step, measures) for step in (*itertools.pairwise(names), *ends)]
    return pieces


def _step_changes(view: WindowView, before: str, after: str, measures: Sequence[str] | None) -> pd.DataFrame:
    drop_page_cache()  # of the step before
    ends = [list(rows_by_kind(view.of_entry(name)["layer_kind"])) for name in (before, after)]
    where = before, after, "common" if view.common else "own", view.window_of(before), view.window_of(after)
    known, parts = view.mean_measures if measures is None else measures, view.attribution(before, after)
    rows = []
    for kind in (kind for kind in ends[0] if kind in ends[1]):
        part = part_of(kind)
        for measure in known:
            change = view.panel.change(measure, before, after, part)
            if not math.isfinite(change.difference):
                continue
            heads = int(np.isfinite(view.panel.values(measure, after, part)).sum())
            errors = change.over_documents.size, change.over_heads.size, change.p_value
            numbers = change.before, change.after, change.difference, *errors, SIGNIFICANT[change.outcome]
            attributed = parts.get((measure, kind), {})
            rows.append(
                (*where, kind, measure, heads, *numbers, *(attributed.get(each, math.nan) for each in ATTRIBUTION))
            )
    return pd.DataFrame(rows, columns=[*CHANGES_COLUMNS, *ATTRIBUTION])


def head_changes(results: Results) -> Iterator[pd.DataFrame]:
    """Which heads changed from each checkpoint to the next, paired by document group, at each choice of windows."""
    for view in results.views():
        rows = view.replicates
        if rows is None or not (view.study.one_run and view.study.same_documents) or len(view.names) < 2:
            continue
        changes = paired_changes(view.heads, rows, list(itertools.pairwise(view.names)))
        if changes is not None:
            yield changes.assign(windows="common" if view.common else "own")


def paired_changes(
    heads: pd.DataFrame, replicates: pd.DataFrame, pairs: Sequence[tuple[str, str]]
) -> pd.DataFrame | None:
    """Which heads changed between the checkpoints of each pair; None where there are too few groups for errors.

    Differences are taken head by head and without each group of documents, so what documents do to both checkpoints
    cancels. Among hundreds of heads some look changed by chance: those that are called changed are chosen so that at
    most one in twenty of them is expected to be (Benjamini and Hochberg). Where the sign of a head is not known, a flip
    is no change: the earlier numbers are turned round (`turned`).
    """
    groups = replicate_groups(replicates)
    if not groups or not pairs:
        return None
    own = heads[[*KEY, *MEASURED]].assign(unsure=sign_unsure(heads))
    without = replicates.drop(columns=list(MEASURED))
    of_heads, of_replicates = rows_of_entries(own["model"]), rows_of_entries(without["model"])

    def entry(model: str) -> pd.DataFrame:
        one, other = own.iloc[of_heads.get(model, NO_ROWS)], without.iloc[of_replicates.get(model, NO_ROWS)]
        return one.merge(other, on=KEY, validate="one_to_one").set_index(["layer", "head"])

    changes, last = SpillingTable(), (pairs[0][0], entry(pairs[0][0]))
    for before, after in pairs:
        one, last = last[1] if last[0] == before else entry(before), (after, entry(after))
        shared = one.index.intersection(last[1].index)
        one, two = one.loc[shared], last[1].loc[shared]
        turned = is_turned(one["r_k"], two["r_k"], one["unsure"] | two["unsure"])
        way = np.where(turned, -1.0, 1.0)
        table = shared.to_frame(index=False).assign(from_model=before, to_model=after, turned=turned.astype(float))
        sizes = [float((one["n_q"] - one[f"n_q_without_{group}"]).sum()) for group in groups]
        for name in MEASURED:
            difference = two[name].to_numpy(float) - way * one[name].to_numpy(float)
            left_out = replicated(two, name, groups) - way * replicated(one, name, groups)
            error = jackknife_error(difference, left_out, sizes)
            p = p_values(difference, error, len(groups))
            changed = np.where(np.isfinite(p), false_discoveries(p, significance.LEVEL), np.nan)
            numbers = {f"{name}_change": difference, f"{name}_change_se": error, f"{name}_changed": changed}
            table = table.assign(**numbers)
        changes.add(table[HEAD_CHANGES])
    return changes.table()
