"""What a comparison with a published study says: the card, the note of the picture, the lines for a terminal."""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from qkscope.compare import tolerance as tolerances
from qkscope.compare.judge import DIFFERS, MISSING, REPRODUCED, PublishedComparison
from qkscope.compare.lenses import LENS_MEANS
from qkscope.compare.references import PublishedReference
from qkscope.compare.words import (
    LISTED,
    on_terminal,
    one_side,
    records,
    some_names,
    spelled,
    tally_of,
    verdict_words,
    worst_lines,
    worst_section,
)
from qkscope.results.read import Results
from qkscope.text import counted
from qkscope.words.markdown import code, escape
from qkscope.words.phrases import listed, percent

_TABLES = {
    "trajectory": "means by checkpoint",
    "heatmap_rq": "mean r_q by depth",
    "heatmap_rk": "mean r_k by depth",
    "taxonomy": "heads per category",
    **{name: lens.title for name, lens in LENS_MEANS.items()},
}


@dataclass(frozen=True)
class PublishedFacts:
    """A run against a publication."""

    results: Results
    reference: PublishedReference
    found: PublishedComparison
    given: float | None

    @property
    def cells(self) -> pd.DataFrame:
        """The published numbers only."""
        return self.found.cells[~self.found.cells["model"].isin(self.found.only_results)]


def published_note(facts: PublishedFacts) -> str:
    """The line under the picture's title."""
    tally = tally_of(facts.cells)
    numbers = f"{tally[REPRODUCED]} of {len(facts.cells)} published numbers within tolerance"
    return f"{numbers}, {tally[DIFFERS]} differ, {tally[MISSING]} missing; the same {facts.reference.heads} heads"


def published_lines(facts: PublishedFacts) -> list[str]:
    """What the command line prints; the last line is the verdict."""
    lines = [
        f"compared with published:{facts.reference.name} ({facts.reference.title})",
        *_heads_said(facts, on_terminal),
    ]
    lines += _windows_said(facts, on_terminal)
    for what, name in _compared(facts).items():
        tally = tally_of(facts.cells[facts.cells["what"] == what])
        tail = "".join(f", {n} {v}" for v, n in ((DIFFERS, tally[DIFFERS]), (MISSING, tally[MISSING])) if n)
        lines.append(f"{name}: {tally[REPRODUCED]} of {sum(tally.values())} reproduced{tail}")
    lines += [*facts.found.notes, *_without_lenses(facts), *worst_lines(facts.cells)]
    lines += one_side(facts.found.only_results, facts.found.only_reference, on_terminal)
    return [*lines, verdict_words(facts.found.reproduced, tally_of(facts.cells), "published number")]


def _compared(facts: PublishedFacts) -> dict[str, str]:
    """The tables of which numbers were compared."""
    there = set(facts.cells["what"])
    return {what: name for what, name in _TABLES.items() if what not in LENS_MEANS or what in there}


def _without_lenses(facts: PublishedFacts) -> list[str]:
    """That parts of the publication were not compared, because the results lack the tables for them."""
    there = set(facts.cells["what"])
    return [
        f"{len(facts.reference.tables[name]) * len(lens.cells)} published {lens.title} are not compared: {lens.absent}."
        for name, lens in LENS_MEANS.items()
        if name in facts.reference.tables and name not in there
    ]


def _heads_said(facts: PublishedFacts, spell: Callable[[str], str]) -> list[str]:
    """Which heads are behind the numbers: the sample, out of how many, and where it is not complete."""
    shared = facts.found.coverage[facts.found.coverage["published_context"].notna()]
    complete = shared[shared["in_sample"] == shared["sample"]]
    reference, said = facts.reference, []
    sample = f"the published sample of {reference.heads} heads"
    if len(complete):
        low, high = int(complete["measured"].min()), int(complete["measured"].max())
        if high > reference.heads:
            of = f"{high:,}" if low == high else f"{low:,} to {high:,}"
            said.append(
                f"Of {of} measured heads only {sample} is compared (seed {reference.seed} over {reference.n_layers} "
                f"layers of {reference.q_heads}), so that the same heads are behind every number."
            )
        else:
            said.append(f"The measured heads are exactly {sample}.")
    partial = shared[shared["in_sample"] < shared["sample"]]
    if len(partial):
        least = int(partial["in_sample"].min())
        said.append(
            f"At {some_names(list(partial['model']), spell)} the published sample is not complete (down to {least} of "
            f"{reference.heads} heads): numbers that rest on heads which were not measured count as missing."
        )
    return said


def _windows_said(facts: PublishedFacts, spell: Callable[[str], str]) -> list[str]:
    coverage = facts.found.coverage
    known = coverage[coverage["published_context"].notna() & coverage["window"].notna()]
    other = known[known["window"] != known["published_context"]]
    said = []
    if len(other):
        places = [
            f"{spell(row['model'])} ({int(row['window']):,} tokens instead of {int(row['published_context']):,})"
            for row in records(other.head(LISTED))
        ]
        more = [f"{len(other) - LISTED} more"] if len(other) > LISTED else []
        said.append(f"Not measured at the published context: {listed([*places, *more])}; r depends on the window.")
    if bool((coverage["published_context"].notna() & coverage["window"].isna()).any()):
        said.append("Some checkpoints do not say at which window they were measured.")
    return said


def _signs_said(facts: PublishedFacts) -> list[str]:
    """What agreement in a mean of r_k leaves open."""
    shares = facts.found.coverage.loc[facts.found.coverage["published_context"].notna(), "discordant"].dropna()
    if shares.empty:
        return []
    low, high = percent(float(shares.min())), percent(float(shares.max()))
    return [
        "Means of r\\_k cancel signs, and the publication does not say how often: in this run "
        f"{low if low == high else f'{low} to {high}'} of the compared heads have r\\_k below −0.3, depending on the "
        "checkpoint, and this share is not part of the verdict."
    ]


def published_card(facts: PublishedFacts) -> str:
    """The README of the comparison."""
    reference, found = facts.reference, facts.found
    rows = []
    for what, name in _compared(facts).items():
        cells = facts.cells[facts.cells["what"] == what]
        tally, apart = tally_of(cells), cells["difference"].dropna()
        largest = spelled(what, float(apart.abs().max())) if len(apart) else "–"
        one_measure = what.startswith("heatmap")  # the mean over several would say nothing
        mean = spelled(what, float(apart.mean())) if len(apart) and one_measure else "–"
        allowed = cells["tolerance"].dropna()
        span = f"{spelled(what, allowed.min())} to {spelled(what, allowed.max())}" if len(allowed) else "–"
        rows.append(
            f"| {escape(name)} | {tally[REPRODUCED]} | {tally[DIFFERS]} | {tally[MISSING]} | {largest} | {mean} "
            f"| {span} |"
        )
    missing = one_side(found.only_results, found.only_reference, escape) + _incomplete(facts)
    lines = [
        f"# {escape(facts.results.study.title)}: compared with published:{escape(reference.name)}", "",
        f"**{verdict_words(found.reproduced, tally_of(facts.cells), 'published number')}**", "",
        "| numbers | reproduced | differ | missing | largest difference | mean difference | tolerance |",
        "|---|---|---|---|---|---|---|", *rows, "",
        "## What was compared", "",
        f"This run is {code(str(facts.results.folder))}. The reference is {escape(reference.title)}: "
        f"{escape(reference.source, 300)} It has {counted(len(reference.checkpoints), 'checkpoint')} of "
        f"{code(reference.model)}, matched by name. Differences are this run minus the publication.", "",
        " ".join(_said(facts)), "",
        "## Largest differences", "", *worst_section(facts.cells), "",
        "## What is missing", "", " ".join(missing) or "Nothing: every published number has its counterpart.", "",
        "## Tolerances", "", _published_tolerance(facts), "",
        "## Files", "",
        "`comparison.csv` has every number, `comparison.png` and `comparison.svg` show both sides.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _said(facts: PublishedFacts) -> list[str]:
    """What was compared with what, in sentences."""
    heads, windows = _heads_said(facts, escape), _windows_said(facts, escape)
    return [*heads, *windows, *_signs_said(facts), *facts.found.notes, *_without_lenses(facts)]


def _incomplete(facts: PublishedFacts) -> list[str]:
    absent = {*facts.found.only_reference}
    lost = facts.cells[(facts.cells["verdict"] == MISSING) & ~facts.cells["model"].isin(absent)]
    if lost.empty:
        return []
    models = list(dict.fromkeys(lost["model"]))
    where = some_names(models, escape)
    return [f"{counted(len(lost), 'number')} at {where}, where heads of the sample were not measured."]


def _published_tolerance(facts: PublishedFacts) -> str:
    reference = facts.reference
    if facts.given is not None:
        return (
            f"The tolerance was given: {facts.given:g} for correlations and explained variance, and that share of the "
            f"heads ({facts.given * reference.heads:g} of {reference.heads}) for numbers of heads; of slopes, biases "
            "and mean queries it is a share of the published number."
        )
    errors = reference.reading_error
    return (
        f"A tolerance is the reading error of the published number (± {errors['heatmap_rq']:g} for a cell of a "
        f"heatmap, ± {errors['trajectory']:g} for a mean, ± {errors['taxonomy']:g} head for a category) plus "
        f"{tolerances.critical_value(len(facts.cells)):.1f} standard errors of the difference between two runs of the "
        f"published protocol ({reference.tokens:,} sampled queries and keys per head). The multiple is chosen so that "
        f"a true repetition fails anywhere among {len(facts.cells)} numbers with a chance of at most "
        f"{100 * tolerances.CHANCE:g}%. Heads of a layer share their tokens and are taken to err together; for "
        "categories, only heads of this run that lie near a threshold can move. Means along the drift axis were read "
        "to the digits that their text has; the noise of slopes follows from r, that of mean queries from their "
        "spread, and a quartile is as noisy as one head. The noise of plasticity is the run's own error, for both "
        "sides. Other documents, another precision or another window are not part of it. How far other documents "
        "would move this run's own numbers is the column `error`; the bars of the picture are two of these. Means "
        "along the drift axis have one where the measured heads are exactly the published sample, quartiles have none. "
        "Those of plasticity follow from the errors of heads: heads of a layer err together, layers independently."
    )
