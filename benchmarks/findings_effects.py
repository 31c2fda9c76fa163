"""Sections of docs/findings.md about what position does (bias and plasticity), and about texts."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from findings_numbers import Part, Place, Tables, cases, spoken, table

from qkscope.stats.significance import LEVEL
from qkscope.words.phrases import listed

Pair = tuple[str, str]
# What a text can change: numbers at the longest window, in the words of the page.
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
            shares = [tables.number("rotation", c, place).percent for c in ("off_axis_k",)]
            plastic = [str(tables.number("plasticity", "ap", place)),
                       *(str(tables.number("drops", c, place)) for c in ("ap_drop", "ap_drop_matched"))]  # fmt: skip
            rows.append([place.corpus, place.name, *rotated, *shares, *plastic])
    columns = ["corpus", "model", "bias effect", "cosine of drifts", "key drift off a",
               "plasticity", "drop", "matched drop"]  # fmt: skip
    return Part(
        short=[sentence for sentence in (_drops(tables),) if sentence],
        compared=3 * len(list(tables.places())),  # drop, matched drop, half of the drop
        text=[
            "At the longest window. Bias effect: increase of the mean score from the first to the last key, in "
            "standard deviations. Drift off a: share of the keys' drift that axis a misses. Plasticity: twice the "
            "probability that two queries disagree about which of two keys scores higher. Drop: first minus last "
            "fifth of the window; matched: at equal distances between the keys.",
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
        return f"**Plasticity does not drop with position** in any of {cases(len(found))}." if found else ""
    less = [each for each in drops if each[1].half.minus(each[2]).sign > 0]
    left = [each for each in found if each[2].sign > 0]
    rises = [each[0] for each in found if each[2].sign < 0]
    place, drop, matched = max(drops, key=lambda each: each[1].value)
    which = f" ({tables.grouped(rises)})" if rises else ""
    return (
        f"**Plasticity drops with position in {len(drops)} of {cases(len(found))}, mostly because keys are farther "
        f"apart.** At equal distances between keys, less than half of the drop remains in {len(less)} of these; it is "
        f"significant in {len(left)} of all cases, and plasticity rises in {len(rises)}{which}. Largest drop: "
        f"{place.said}, {drop}, at equal distances {matched}."
    )


# --- texts ------------------------------------------------------------------------------------------


def texts(tables: Tables) -> Part:
    """What differs between corpora: each pair of them, number by number."""
    if len(tables.corpora) < 2:
        return Part(text=["Only one corpus was run."])
    pairs = list(combinations(tables.corpora, 2))
    rows: list[list[str]] = []
    asked, differ, surest = Counter[Pair](), Counter[Pair](), (0.0, "")
    for model, label in tables.models.items():
        cells = []
        for name, (source, column) in _compared(tables).items():
            found = {c: tables.number(source, column, Place(c, model, label)) for c in tables.corpora}
            apart = []
            for pair in (pair for pair in pairs if all(found[corpus].known for corpus in pair)):
                change = found[pair[1]].minus(found[pair[0]])
                asked[pair] += 1
                differ[pair] += bool(change.sign)
                apart += ["–".join(corpus[0].upper() for corpus in pair)] if change.sign else []
                said = f"{name} of {label}, " + " and ".join(f"{found[corpus]} on {spoken(corpus)}" for corpus in pair)
                surest = max(surest, (abs(change.value / change.error), said)) if change.sign else surest
            known = sum(number.known for number in found.values()) > 1
            cells.append((", ".join(apart) or "none") if known else "–")
        rows.append([label, *cells])
    letters = listed([f"{corpus} ({corpus[0].upper()})" for corpus in tables.corpora])
    told = _text_counts(asked, differ)
    most = f" Largest relative to its error: {surest[1]}." if surest[1] else ""
    return Part(
        short=[
            f"**{'Most measures depend' if _most(asked, differ) else 'Few measures depend'} on the text.** {told}{most}"
        ],
        text=[
            f"Significant differences at the longest window between {letters}; the values are in the tables above.",
            table(["model", *_compared(tables)], rows),
        ],
        compared=asked.total(),
    )


def _text_counts(asked: Counter[Pair], differ: Counter[Pair]) -> str:
    """How many numbers differ between two corpora, for each pair; how many would by chance."""
    counts = [f"{differ[pair]} of {asked[pair]} between {' and '.join(map(spoken, pair))}" for pair in asked]
    chance = LEVEL * asked.total()
    return f"Significant differences: {listed(counts)}; about {chance:.0f} of {asked.total()} would be by chance."


def _most(asked: Counter[Pair], differ: Counter[Pair]) -> bool:
    return differ.total() > asked.total() / 2


def _compared(tables: Tables) -> dict[str, tuple[str, str]]:
    """What is compared; without score components of version 0.2, which were others."""
    return {name: of for name, of in COMPARED.items() if not (tables.old_components and of[1].endswith("_share"))}


SECTIONS = {"mechanism": mechanism, "texts": texts}
