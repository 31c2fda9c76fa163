"""Since when a head's position matters: over the entries at which the same heads were edited."""

from __future__ import annotations

import pandas as pd

from qkscope.lenses.ablation.table import FILE, freedom_of_losses, measured_edits, measured_entries
from qkscope.lenses.views import WindowView
from qkscope.stats.significance import is_significant

BEGINS = "ablation_begins"


def begins_at(at: WindowView) -> pd.DataFrame | None:
    """At each entry and edit: how many heads begin to matter there, and how many have begun so far.

    A head begins to matter at the first entry from which on its edit costs significantly, at every entry that was
    ablated. Heads that were not edited at all of them are left out. None for fewer than two entries.
    """
    if not at.has(FILE) or len(measured_entries(at)) < 2 or not at.study.one_run:
        return None
    rows = [row for edit in measured_edits(at) for row in _begins(at, edit)]
    return pd.DataFrame(rows) if rows else None


def _begins(at: WindowView, edit: str) -> list[dict[str, object]]:
    table, loss = at.table(FILE), f"loss_{edit}"
    known = table[table[loss].notna() & table[f"{loss}_se"].notna()]
    names = [name for name in at.names if name in set(known["model"])]
    if len(names) < 2:
        return []
    freedom = known["model"].map({name: freedom_of_losses(at, name, edit) for name in names})
    costly = known.assign(costs=(known[loss] > 0) & (is_significant(known[loss], known[f"{loss}_se"], freedom) == 1))
    wide = costly.pivot_table("costs", ["layer", "head"], "model", aggfunc="first").reindex(columns=names).dropna()
    values = wide.to_numpy(dtype=bool)
    rows = []
    for place, name in enumerate(names):
        since = values[:, place:].all(axis=1)
        before = values[:, place - 1 :].all(axis=1) if place else since & False
        rows.append(
            {
                "model": name,
                "edit": edit,
                "heads": len(wide),
                "begin": int((since & ~before).sum()),
                "so_far": int(since.sum()),
            }
        )
    return rows
