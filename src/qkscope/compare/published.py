"""What a comparison with a published study says: the card, the note of the picture, the lines for a terminal."""

from dataclasses import dataclass

import pandas as pd

from qkscope.compare import tolerance as tolerances
from qkscope.compare.judge import DIFFERS, MISSING, REPRODUCED, PublishedComparison
from qkscope.compare.lenses import LENS_MEANS
from qkscope.compare.references import PublishedReference
from qkscope.compare.words import (
    LISTED,
    one_side,
    records,
    some_names,
    spelled,
    tally_of,
    verdict_words,
    worst_lines,
    worst_section,
)
from qkscope.results.folder import COMPARISON_CSV, COMPARISON_PNG, COMPARISON_SVG
from qkscope.results.read import ResultsFolder
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, Block, Code, OwnWords, Run, Strong, TableBlock, heading, paragraph
from qkscope.words.phrases import PATH_CHARACTERS, listed, percent, shortened

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

    results: ResultsFolder
    reference: PublishedReference
    comparison: PublishedComparison
    tolerance: float | None

    @property
    def cells(self) -> pd.DataFrame:
        """The published numbers only."""
        return self.comparison.cells[~self.comparison.cells["model"].isin(self.comparison.only_results)]


def published_note(facts: PublishedFacts) -> str:
    """The line under the picture's title."""
    tally = tally_of(facts.cells)
    numbers = f"{tally[REPRODUCED]} of {len(facts.cells)} published numbers within tolerance"
    return f"{numbers}, {tally[DIFFERS]} differ, {tally[MISSING]} missing; the same {facts.reference.heads} heads"


def published_lines(facts: PublishedFacts) -> list[str]:
    """What the command line prints; the last line is the verdict."""
    lines = [
        f"compared with published:{facts.reference.name} ({facts.reference.title})",
        *_heads_said(facts),
    ]
    lines += _windows_said(facts)
    for what, name in _compared(facts).items():
        tally = tally_of(facts.cells[facts.cells["what"] == what])
        tail = "".join(f", {n} {v}" for v, n in ((DIFFERS, tally[DIFFERS]), (MISSING, tally[MISSING])) if n)
        lines.append(f"{name}: {tally[REPRODUCED]} of {sum(tally.values())} reproduced{tail}")
    lines += [*facts.comparison.notes, *_without_lenses(facts), *worst_lines(facts.cells)]
    lines += one_side(facts.comparison.only_results, facts.comparison.only_reference)
    return [*lines, verdict_words(facts.comparison.reproduced, tally_of(facts.cells), "published number")]


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


def _heads_said(facts: PublishedFacts) -> list[str]:
    """Which heads are behind the numbers: the sample, out of how many, and where it is not complete."""
    shared = facts.comparison.coverage[facts.comparison.coverage["published_context"].notna()]
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
            f"At {some_names(list(partial['model']))} the published sample is not complete (down to {least} of "
            f"{reference.heads} heads): numbers that rest on heads which were not measured count as missing."
        )
    return said


def _windows_said(facts: PublishedFacts) -> list[str]:
    coverage = facts.comparison.coverage
    known = coverage[coverage["published_context"].notna() & coverage["window"].notna()]
    other = known[known["window"] != known["published_context"]]
    said = []
    if len(other):
        places = [
            f"{shortened(row['model'])} ({int(row['window']):,} tokens instead of {int(row['published_context']):,})"
            for row in records(other.head(LISTED))
        ]
        more = [f"{len(other) - LISTED} more"] if len(other) > LISTED else []
        said.append(f"Not measured at the published context: {listed([*places, *more])}; r depends on the window.")
    if bool((coverage["published_context"].notna() & coverage["window"].isna()).any()):
        said.append("Some checkpoints do not say at which window they were measured.")
    return said


def _signs_said(facts: PublishedFacts) -> list[str]:
    """What agreement in a mean of r_k leaves open."""
    shares = facts.comparison.coverage.loc[
        facts.comparison.coverage["published_context"].notna(), "discordant"
    ].dropna()
    if shares.empty:
        return []
    low, high = percent(float(shares.min())), percent(float(shares.max()))
    return [
        "Means of r_k cancel signs, and the publication does not say how often: in this run "
        f"{low if low == high else f'{low} to {high}'} of the compared heads have r_k below −0.3, depending on the "
        "checkpoint, and this share is not part of the verdict."
    ]


def published_card(facts: PublishedFacts) -> list[AnyBlock]:
    """The README of the comparison."""
    reference, comparison = facts.reference, facts.comparison
    missing = one_side(comparison.only_results, comparison.only_reference) + _incomplete(facts)
    return [
        heading(1, f"{shortened(facts.results.study.title)}: compared with published:{shortened(reference.name)}"),
        paragraph(Strong(verdict_words(comparison.reproduced, tally_of(facts.cells), "published number"))),
        _tally_table(facts),
        heading(2, "What was compared"),
        paragraph(
            "This run is ",
            Code(shortened(str(facts.results.source), PATH_CHARACTERS)),
            f". The reference is {shortened(reference.title)}: {shortened(reference.source, 300)} It has "
            f"{counted(len(reference.checkpoints), 'checkpoint')} of ",
            Code(shortened(reference.model, PATH_CHARACTERS)),
            ", matched by name. Differences are this run minus the publication.",
        ),
        paragraph(*_said(facts)),
        heading(2, "Largest differences"),
        *worst_section(facts.cells),
        heading(2, "What is missing"),
        paragraph(" ".join(missing) or "Nothing: every published number has its counterpart."),
        heading(2, "Tolerances"),
        _published_tolerance(facts),
        heading(2, "Files"),
        paragraph(
            Code(COMPARISON_CSV),
            " has every number, ",
            Code(COMPARISON_PNG),
            " and ",
            Code(COMPARISON_SVG),
            " show both sides.",
        ),
    ]


def _tally_table(facts: PublishedFacts) -> TableBlock:
    rows = []
    for what, name in _compared(facts).items():
        cells = facts.cells[facts.cells["what"] == what]
        tally, apart = tally_of(cells), cells["difference"].dropna()
        largest = spelled(what, float(apart.abs().max())) if len(apart) else "–"
        one_measure = what.startswith("heatmap")  # the mean over several would say nothing
        mean = spelled(what, float(apart.mean())) if len(apart) and one_measure else "–"
        allowed = cells["tolerance"].dropna()
        span = f"{spelled(what, allowed.min())} to {spelled(what, allowed.max())}" if len(allowed) else "–"
        counts = (str(tally[verdict]) for verdict in (REPRODUCED, DIFFERS, MISSING))
        rows.append((shortened(name), *counts, largest, mean, span))
    titles = ("numbers", "reproduced", "differ", "missing", "largest difference", "mean difference", "tolerance")
    return TableBlock(titles, rows)


def _said(facts: PublishedFacts) -> list[Run]:
    """What was compared with what, in sentences."""
    about_run = [*_heads_said(facts), *_windows_said(facts), *_signs_said(facts)]
    about_lenses = " ".join([*facts.comparison.notes, *_without_lenses(facts)])
    return [" ".join(about_run), " " if about_run and about_lenses else "", OwnWords(about_lenses)]


def _incomplete(facts: PublishedFacts) -> list[str]:
    absent = {*facts.comparison.only_reference}
    lost = facts.cells[(facts.cells["verdict"] == MISSING) & ~facts.cells["model"].isin(absent)]
    if lost.empty:
        return []
    models = list(dict.fromkeys(lost["model"]))
    where = some_names(models)
    return [f"{counted(len(lost), 'number')} at {where}, where heads of the sample were not measured."]


def _published_tolerance(facts: PublishedFacts) -> Block:
    reference = facts.reference
    if facts.tolerance is not None:
        return paragraph(
            f"The tolerance was given: {facts.tolerance:g} for correlations and explained variance, and that share of "
            f"the heads ({facts.tolerance * reference.heads:g} of {reference.heads}) for numbers of heads; of slopes, "
            "biases and mean queries it is a share of the published number."
        )
    errors = reference.reading_error
    return paragraph(
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
        "would move this run's own numbers is the column ",
        Code("error"),
        "; the bars of the picture are two of these. Means "
        "along the drift axis have one where the measured heads are exactly the published sample, quartiles have none. "
        "Those of plasticity follow from the errors of heads: heads of a layer err together, layers independently.",
    )
