"""Sections of docs/findings.md about what position does (bias, plasticity, ablation), texts, and published claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations

import pandas as pd
from findings_numbers import Number, Place, Tables, spoken, table
from findings_position import Part, cases
from scipy import stats

from qkscope.join.published import load_published_models
from qkscope.lenses.claims.account import CLAIMS
from qkscope.text import counted
from qkscope.words.phrases import listed, significant

Pair = tuple[str, str]
MARKS = {"supported": "+", "contradicted": "−", "not decided": "0"}
# What a text can change: numbers at the own context, in the words of the page.
COMPARED = {
    "r_q": ("signal", "r_q"),
    "r_k": ("signal", "r_k"),
    "position share of scores": ("scores", "position_share"),
    "query share of scores": ("scores", "query_share"),
    "late advantage": ("scores", "late_advantage"),
    "bias effect": ("rotation", "bias_effect"),
    "plasticity": ("plasticity", "ap"),
}


# --- bias and plasticity ----------------------------------------------------------------------------


def mechanism(tables: Tables) -> Part:
    """Bias, and what plasticity loses."""
    rows = []
    for first in tables.places():
        for place in tables.with_kinds(first, "rotation"):
            rotated = [str(tables.number("rotation", c, place)) for c in ("bias_effect", "drift_cos")]
            shares = [tables.number("rotation", c, place).percent for c in ("off_axis_q", "off_axis_k")]
            plastic = [str(tables.number("plasticity", "ap", place)),
                       *(str(tables.number("drops", c, place)) for c in ("ap_drop", "ap_drop_matched")),
                       tables.number("plasticity", "loss_not_position", place).percent]  # fmt: skip
            rows.append([place.corpus, place.name, *rotated, *shares, *plastic])
    columns = ["corpus", "model", "bias effect", "cosine of drifts", "query drift off a", "key drift off a",
               "plasticity", "drop", "matched drop", "loss that is not position"]  # fmt: skip
    return Part(
        short=[sentence for sentence in (_drops(tables), _not_position(tables)) if sentence],
        text=[
            "At the own context. Bias effect: how many standard deviations of a score the mean score gains from the "
            "first position to the last. Drift off a: the share of the queries' (keys') own drift that axis a misses. "
            "Plasticity: twice the chance that two queries disagree about which of two keys wins; its drop from the "
            "first fifth of the window to the last, the same at equal distances between the two keys, and the part of "
            "what plasticity lacks to 1 that is there without position. Dashes: too few position buckets in sight.",
            table(columns, rows),
        ],
    )


def _drops(tables: Tables) -> str:
    """What is left of the drop at equal distances."""
    found = [
        (place, *(tables.number("drops", c, place) for c in ("ap_drop", "ap_drop_matched")))
        for place in tables.places()
    ]
    found = [each for each in found if each[1].known and each[2].known]
    drops = [each for each in found if each[1].sign > 0]
    if not drops:
        return f"Plasticity drops with position in none of {cases(len(found))}." if found else ""
    less = [each for each in drops if Number(each[1].value / 2, each[1].error / 2).minus(each[2]).sign > 0]
    left = [each for each in drops if each[2].sign > 0]
    place, drop, matched = max(drops, key=lambda each: each[1].value)
    title = (
        "**The drop of plasticity is mostly distance between keys.**" if len(less) == len(drops) else "**Plasticity.**"
    )
    return (
        f"{title} It drops with position by more than two errors in {len(drops)} of {cases(len(found))}. At equal "
        f"distances between keys less than half of the drop is left in {len(less)} of these, and a drop beyond two "
        f"errors in {len(left)}. The largest, in {place.said}, is {drop}, and {matched} at equal distances."
    )


def _not_position(tables: Tables) -> str:
    found = [(tables.number("plasticity", "loss_not_position", place), place) for place in tables.places()]
    found = sorted(((n, p) for n, p in found if n.known), key=lambda each: each[0].value)
    if not found:
        return ""
    more = [each for each in found if each[0].minus(Number(0.5, 0.0)).sign > 0]
    (least, low), (most, high) = found[0], found[-1]
    title = "**Low plasticity is not position alone.**" if len(more) == len(found) else "**What plasticity lacks.**"
    return (
        f"{title} More than half of what it lacks to 1 is there without position in {len(more)} of "
        f"{cases(len(found))}: from {least.percent} ({low.said}) to {most.percent} ({high.said})."
    )


# --- ablation ---------------------------------------------------------------------------------------


def ablation(tables: Tables) -> Part:
    """What the model loses without position in some heads, against other heads."""
    rows = tables.table("ablation")
    if rows.empty:
        return Part(text=["No ablation was run."])
    measured = rows[rows["outcome"] == "all"]
    every = measured[measured["shared"] < 1.0]
    cells = []
    for row in every.to_dict("records"):
        pair = [Number(_outcome(rows, row, name)["excess"], _outcome(rows, row, name)["excess_se"])
                for name in ("repeated", "new")]  # fmt: skip
        heads, excess = f"{row['group']} ({int(row['heads'])})", Number(row["excess"], row["excess_se"])
        rises = [f"{row[name]:+.3f}".replace("-", "−") for name in ("chosen", "controls")]
        where = [row["corpus"], tables.models[row["model"]], heads, f"`{row['edit']}`"]
        shared = f"{100 * row['shared']:.0f} %"
        cells.append([*where, *rises, str(excess), _interval(row), *map(str, pair), shared])
    columns = ["corpus", "model", "heads (how many)", "edit", "rise", "random heads", "difference", "95 % interval",
               "on repeated tokens", "on new tokens", "chosen among random"]  # fmt: skip
    documents, draws, tokens = (sorted(set(every[name])) for name in ("documents", "draws", "tokens"))
    return Part(
        short=_ablation_short(every),
        text=[
            "Rise of the loss in nats per token when heads are edited together, beside groups of as many other heads "
            f"in each layer ({_numbers(draws)} draws, {_numbers(documents)} documents of {_numbers(tokens)} tokens). "
            "`kernel` takes the mean score at each distance away and leaves what depends on the token; `zero` takes "
            "the head away ([ablation.md](ablation.md)). Edited are the ten heads with the largest r_q, and the first "
            "category of *position-dominated*, *Q-positional*, *K-positional*, *content-focused*, *mixed* that has at "
            "least two heads of a model and at most half of them. Where a layer has too few others, random heads are "
            "chosen ones again (last column), which makes differences smaller.",
            table(columns, cells),
            _ablation_told(tables, every),
            _alone(tables, measured),
            _missing(tables, measured),
        ],
    )


def _outcome(rows: pd.DataFrame, like: dict[str, object], name: str) -> pd.Series:
    keys = ("corpus", "model", "edit", "group")
    same = rows[(rows[list(keys)] == [like[key] for key in keys]).all(axis=1) & (rows["outcome"] == name)]
    return same.iloc[0] if len(same) else pd.Series({"excess": float("nan"), "excess_se": float("nan")})


def _numbers(values: list[float]) -> str:
    return " or ".join(str(int(value)) for value in values)


def _interval(row: dict[str, float]) -> str:
    return "none" if row["low"] != row["low"] else f"{row['low']:+.3f} to {row['high']:+.3f}".replace("-", "−")


def _ablation_short(every: pd.DataFrame) -> list[str]:
    """How many chosen groups matter more than random ones, by their intervals."""
    said = []
    for edit, rows in every.groupby("edit", sort=False):
        more, less = int((rows["low"] > 0).sum()), int((rows["high"] < 0).sum())
        largest = rows.loc[rows["excess"].abs().idxmax()]
        said.append(
            f"under `{edit}` {more} of {len(rows)} groups cost more than as many random heads of the same layers, "
            f"{less} cost less, {len(rows) - more - less} are not told apart (largest difference "
            f"{Number(largest['excess'], largest['excess_se'])} nats per token)"
        )
    return [f"**Ablation.** Of groups of chosen heads, {'; '.join(said)}."] if said else []


def _ablation_told(tables: Tables, every: pd.DataFrame) -> str:
    """Which groups these are."""
    said = []
    for edit, rows in every.groupby("edit", sort=False):
        for word, chosen in (("more", rows["low"] > 0), ("less", rows["high"] < 0)):
            names = [
                f"{row['group']} of {tables.models[row['model']]} on {spoken(row['corpus'])}"
                for row in rows[chosen].to_dict("records")
            ]
            said += [f"Under `{edit}`, {word} than random heads: {listed(names)}."] if names else []
    return " ".join(said)


def _alone(tables: Tables, measured: pd.DataFrame) -> str:
    """Groups that are all heads of their layers."""
    rows = measured[(measured["shared"] == 1.0) & (measured["edit"] == measured["edit"].iloc[0])].to_dict("records")
    names = [
        f"{row['group']} of {tables.models[row['model']]} on {spoken(row['corpus'])} ({int(row['heads'])} heads)"
        for row in rows
    ]
    return (
        f"Left out, because they are all heads of their layers and have no others beside them: {listed(names)}."
        if names
        else ""
    )


def _missing(tables: Tables, measured: pd.DataFrame) -> str:
    """Whose heads were not edited, or not by category."""
    by_r = measured["group"].str.startswith("top ")
    said = []
    for words, rows in (("No ablation was run of", measured), ("No category was edited of", measured[~by_r])):
        there = set(zip(rows["corpus"], rows["model"], strict=True))
        without = [place.said for place in tables.places() if (place.corpus, place.model) not in there]
        said += [f"{words} {listed(without)}."] if without else []
    return " ".join(said)


# --- texts ------------------------------------------------------------------------------------------


def texts(tables: Tables) -> Part:
    """What differs between corpora: each pair of them, number by number."""
    if len(tables.corpora) < 2:
        return Part(text=["Only one corpus was run."])
    pairs = list(combinations(tables.corpora, 2))
    rows: list[list[str]] = []
    asked, differ, surest = Counter[Pair](), Counter[Pair](), (0.0, "")
    for model, label in tables.models.items():
        for name, (source, column) in COMPARED.items():
            found = {c: tables.number(source, column, Place(c, model, label)) for c in tables.corpora}
            apart = []
            for pair in (pair for pair in pairs if all(found[corpus].known for corpus in pair)):
                change = found[pair[1]].minus(found[pair[0]])
                asked[pair] += 1
                differ[pair] += bool(change.sign)
                apart += [" and ".join(map(spoken, pair))] if change.sign else []
                said = f"{name} of {label}, " + " and ".join(f"{found[corpus]} on {spoken(corpus)}" for corpus in pair)
                surest = max(surest, (abs(change.value / change.error), said)) if change.sign else surest
            if any(number.known for number in found.values()):
                rows.append([label, name, *map(str, found.values()), "; ".join(apart) or "none"])
    told = _text_counts(asked, differ)
    most = f" The surest difference is in {surest[1]}." if surest[1] else ""
    return Part(
        short=[f"**What depends on the text.** {told}{most}"],
        text=[f"{told}{most}", table(["model", "number", *tables.corpora, "differ by more than two errors"], rows)],
    )


def _text_counts(asked: Counter[Pair], differ: Counter[Pair]) -> str:
    """How many numbers differ between two corpora, for each pair; how many would by chance."""
    counts = [f"{differ[pair]} of {asked[pair]} between {' and '.join(map(spoken, pair))}" for pair in asked]
    chance = 2 * stats.t.sf(2.0, 14)  # two errors of a difference between two sets of eight groups
    return (
        f"Numbers that differ by more than two errors: {listed(counts)} (by chance about "
        f"{chance * max(asked.values(), default=0):.0f} of {max(asked.values(), default=0)} would)."
    )


# --- claims -----------------------------------------------------------------------------------------


def claims(tables: Tables) -> Part:
    """Sentences of the published accounts, held against these models."""
    found = tables.table("claims")
    rows, verdicts = [], Counter[str]()
    for claim in CLAIMS:
        mine = found[found["claim"] == claim.name] if not found.empty else found
        if mine.empty:
            continue
        cells = []
        for model in tables.models:
            verdict = mine[mine["model"] == model].set_index("corpus")["verdict"]
            cells.append(" ".join(MARKS.get(verdict.get(corpus, ""), "·") for corpus in tables.corpora))
        verdicts.update(mine["verdict"])
        rows.append([claim.said, claim.statistic.replace("|", "\\|"), *cells])
    asked = sum(verdicts.values())
    there = set(found["claim"]) if asked else set()
    unasked = [claim for claim in CLAIMS if claim.name not in there]
    training = sum(claim.about == "training" for claim in unasked)
    short = (
        f"**The published claims.** Of {counted(asked, 'test')} over models and corpora, {verdicts['supported']} "
        f"support the claim, {verdicts['contradicted']} contradict it, {verdicts['not decided']} decide nothing; "
        f"{_both_ways(found)}."
    )
    text = [
        "Each sentence of the account of SmolLM3's training that can be asked of single models, with the statistic "
        "that would come out otherwise if it were wrong ([lenses/claims.md](lenses/claims.md)), on "
        f"{listed([spoken(corpus) for corpus in tables.corpora])} in this order: + supported, − contradicted, 0 "
        f"within two errors of 0 or of unknown error, · cannot be asked. {counted(training, 'claim')} about training "
        f"and {counted(len(unasked) - training, 'other')} cannot be asked of any of these models. Tests share heads "
        "and documents, so they may not be counted as independent.",
        table(["claim", "right if", *tables.models.values()], rows),
        "Claims of the analyses across models:",
        _across(tables),
        _among(tables),
    ]
    return Part(short=[short] if asked else [], text=text)


def _both_ways(found: pd.DataFrame) -> str:
    """How many claims are supported in one place and contradicted in another."""
    if found.empty:
        return "none was asked"
    by = found.groupby("claim")["verdict"].agg(set)
    both = int(sum({"supported", "contradicted"} <= each for each in by))
    return f"{counted(both, 'claim is', 'claims are')} supported in one place and contradicted in another"


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
        contrary = [place.said for place, number in known if number.sign < 0]
        named = "all of them" if len(contrary) == len(known) else listed(contrary)
        against = f"{signs[-1]} ({named})" if contrary else "0"
        rows.append([claim.replace("|", "\\|"), str(signs[1]), against, str(signs[0])])
    return table(["claim", "so in", "the contrary in", "within two errors"], rows)


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
    labels = [f"{label}, {tables.window(next(p for p in tables.places() if p.model == model)):,}"
              for model, label in tables.models.items()]  # fmt: skip
    ranked = (
        "" if (first["at_this_window"] > 0).any() else " None of these windows is a published one, so no rank is given."
    )
    published = load_published_models().table
    windows = listed([f"{int(w):,}" for w in sorted(set(published["window"]))])
    return (
        f"Where these models stand among {len(published)} published ones (`qkscope among`, {tables.corpora[0]}). "
        f"Published are lowest … median … highest, at windows of {windows} tokens; here each at its own window in "
        f"tokens.{ranked}\n\n" + table(["mean over heads of", "published", *labels], cells)
    )


SECTIONS = {"mechanism": mechanism, "ablation": ablation, "texts": texts, "claims": claims}
