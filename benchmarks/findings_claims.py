"""The section of docs/findings.md about published claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pandas as pd
from findings_numbers import Number, Part, Place, Tables, spoken, table

from qkscope.join.inputs import load_published_models
from qkscope.lenses.claims import CLAIMS
from qkscope.lenses.claims.base import Claim
from qkscope.stats.significance import SMALLEST, is_significant
from qkscope.text import are, counted
from qkscope.words.phrases import listed, significant

MARKS = {"supported": "+", "contradicted": "−", "not significant": "0"}
CAUTION = "Cases share heads and documents, and claims share statistics: counts of them are no evidence."
# Claims whose statistic was another in version 0.2: agreement by chance was not accounted for, and RoPE's rotation of
# means within a bucket was not part of the position component.
CHANGED = ("sign_leans", "position_of_dominated", "early_scores")


def claims(tables: Tables) -> Part:
    """Sentences of the published accounts, held against these models."""
    found = judged(tables)
    asked = [
        claim for claim in CLAIMS if of_finished(claim) and not found.empty and (found["claim"] == claim.name).any()
    ]
    found = found[found["claim"].isin([claim.name for claim in asked])] if asked else pd.DataFrame()
    rows = []
    for claim in asked:
        mine = found[found["claim"] == claim.name]
        cells = []
        for model in tables.models:
            verdict = mine[mine["model"] == model].set_index("corpus")["verdict"]
            cells.append(" ".join(MARKS.get(verdict.get(corpus, ""), "·") for corpus in tables.corpora))
        statistic = claim.statistic.replace("|", "\\|")
        rows.append([f"`{claim.name}`: {statistic}", *cells])
    training = sum(not of_finished(claim) for claim in CLAIMS)
    others = len(CLAIMS) - training - len(asked)
    text = [
        "Statements of the account of SmolLM3's training that apply to finished models "
        "([lenses/claims.md](lenses/claims.md)), on "
        f"{listed([spoken(corpus) for corpus in tables.corpora])} (in this order): + supported, − contradicted, 0 "
        "not significant, · undecided. Verdicts pass errors over documents and over KV heads. "
        f"Left out: {counted(training, 'claim')} about training, {others} that these models cannot decide or whose "
        f"statistic has changed since. {CAUTION}",
        table(["claim holds if", *tables.models.values()], rows),
        "Statements of the published cross-model analyses:",
        _across(tables),
        _among(tables),
    ]
    compared = len(found) + len(ACROSS) * len(list(tables.places()))
    return Part(open=[_claims_short(found)] if asked else [], text=text, compared=compared)


def judged(tables: Tables) -> pd.DataFrame:
    """The claims with verdicts by both errors; without those whose statistic was another when the table was made."""
    found = tables.table("claims")
    if found.empty or "population" in found:
        return found
    found = found[~found["claim"].isin(CHANGED)]
    layers = found.merge(tables.entries, on=["corpus", "model"], how="left")["layers"].to_numpy()  # clusters at least
    freedom = [tables.freedom(Place(row.corpus, row.model, "")) for row in found.itertuples()]
    both = [(found["value_se"], freedom), (found["value_se_heads"], layers - 1)]
    beyond = [is_significant(found["value"], error, free, SMALLEST) for error, free in both]
    passed = (beyond[0] == 1) & (beyond[1] == 1)
    missed = (beyond[0] == 0) | (beyond[1] == 0)
    verdict = np.where(passed, np.where(found["value"] > 0, "supported", "contradicted"), "undecided")
    return found.assign(verdict=np.where(missed, "not significant", verdict))


def of_finished(claim: Claim) -> bool:
    """Whether a claim is about any model, not about what training does or how it begins."""
    return claim.about == "entry" and "training" not in claim.said


def _claims_short(found: pd.DataFrame) -> str:
    """How many claims come out alike in all cases."""
    by = found.groupby("claim")["verdict"].agg(set)
    alike = [int(sum(each == {verdict} for each in by)) for verdict in ("supported", "contradicted")]
    both = int(sum({"supported", "contradicted"} <= each for each in by))
    return (
        f"whether {len(by) - sum(alike)} of the {len(by)} published claims that apply to finished models hold: "
        f"{alike[0]} {are(alike[0])} supported in every case, {alike[1]} contradicted in every case, and {both} "
        "supported in one case and contradicted in another"
    )


ACROSS: tuple[tuple[str, Callable[[Tables, Place], Number]], ...] = (
    ("Keys encode position more than queries: |r_k| − |r_q| along axis a is above 0",
     lambda t, p: t.number("rotation", "r_k_a_abs", p).minus(t.number("rotation", "r_q_a_abs", p))),
    ("The same, each along its own drift",
     lambda t, p: t.number("rotation", "r_k_own", p).minus(t.number("rotation", "r_q_own", p))),
    ("Later keys score higher along axis a: bias per 1,000 tokens is above 0",
     lambda t, p: t.number("rotation", "bias_per_1000", p)),
    ("The same in full, with no axis chosen", lambda t, p: t.number("rotation", "bias_total_per_1000", p)),
    ("Plasticity drops with position", lambda t, p: t.number("drops", "ap_drop", p)),
    ("It drops at equal distances between keys", lambda t, p: t.number("drops", "ap_drop_matched", p)),
    ("Axis a carries all linear position: less than a tenth of the keys' drift is off it",
     lambda t, p: Number(0.1, 0.0).minus(t.number("rotation", "off_axis_k", p))),
    ("Axis a is free of query and key identity: less than a tenth of their offset is on it",
     lambda t, p: Number(0.1, 0.0).minus(t.number("rotation", "offset_on_a", p))),
)  # fmt: skip


def _across(tables: Tables) -> str:
    rows = []
    for claim, find in ACROSS:
        known = [(place, find(tables, place)) for place in tables.places()]
        known = [(place, number) for place, number in known if number.known]
        signs = Counter(number.sign for _, number in known)
        contrary = [place for place, number in known if number.sign < 0]
        named = "all of them" if len(contrary) == len(known) else tables.grouped(contrary)
        against = f"{signs[-1]}: {named}" if contrary else "0"
        rows.append([claim.replace("|", "\\|"), str(signs[1]), against, str(signs[0])])
    return table(["statement", "significant in", "opposite in", "not significant"], rows)


FULL = " (full-attention layers only)"


def _among(tables: Tables) -> str:
    """The published ranges beside these models; ranks only at the published window."""
    rows = tables.table("among")
    if rows.empty:
        return ""
    first = rows[rows["corpus"] == tables.corpora[0]]
    cells = []
    for measure, of in first.groupby("measure", sort=False):
        span = " … ".join(significant(of.iloc[0][f"published_{part}"]) for part in ("low", "median", "high"))
        mine = {row["model"]: str(Number(row["value"], row["value_se"])) for row in of.to_dict("records")}
        cells.append([f"`{measure}`", span, *(mine.get(model, "–") for model in tables.models)])
    labels = [f"{label}{FULL if _kinds(tables, model) > 1 else ''}, "
              f"{tables.window(next(p for p in tables.places() if p.model == model)):,}"
              for model, label in tables.models.items()]  # fmt: skip
    ranked = "" if (first["at_this_window"] > 0).any() else " Windows differ, so there are no ranks."
    published = load_published_models().table
    windows = listed([f"{int(w):,}" for w in sorted(set(published["window"]))])
    return (
        f"Next to {len(published)} published models (`qkscope among`, {tables.corpora[0]}): lowest … median … highest, "
        f"over full-attention heads at windows of {windows} tokens; here at the window stated.{ranked}\n\n"
        + table(["mean of", "published", *labels], cells)
    )


def _kinds(tables: Tables, model: str) -> int:
    """How many kinds of layers a model has."""
    kinds = tables.table("kinds")
    return 1 if kinds.empty else int(kinds.loc[kinds["model"] == model, "layer_kind"].nunique())


SECTIONS = {"claims": claims}
