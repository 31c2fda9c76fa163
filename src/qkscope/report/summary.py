"""What a study shows in half a minute: one source for the page's first screen, the terminal, and `results.summary()`.

Five questions, each answered in one sentence: which heads encode position, when they learned it, what long-context
training changed at equal length, whether it matters, and how certain that is. Sentences cover the whole trajectory, and
nothing is concluded from a change that is not significant (`stats.significance`).
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from qkscope.lenses.ablation import last_measured, measured_edits, shown_edit
from qkscope.lenses.base import error_name
from qkscope.lenses.categories import LOW, POSITION_DOMINATED
from qkscope.lenses.kind_of_layer import EVERY_KIND, part_of
from qkscope.lenses.long_tables import paired_changes
from qkscope.lenses.rope.split import FILE as CAUSES
from qkscope.lenses.rope.split import R_Q
from qkscope.lenses.rope.steps import causes_of, outcome_of, split_rows
from qkscope.lenses.views import Results, WindowView
from qkscope.report.cards import population
from qkscope.results.entries import Entry
from qkscope.stats.changes import Change
from qkscope.stats.series import Trend
from qkscope.stats.significance import SMALLEST, Significance, is_significant
from qkscope.words.phrases import number, percent, plus_minus, share_plus_minus, shortened, shown, tokens
from qkscope.words.trends import steepest_step, trend_phrase

ALREADY = 0.75  # of its largest value at the first checkpoint: heads had formed before the study begins
MOST_HEADLINE_WORDS = 20
WIDTH = 100  # columns of the text
COUNT_NAMED = 6  # models that a sentence names


@dataclass(frozen=True)
class Line:
    """Means of a measure over the checkpoints, with standard errors over documents."""

    label: str
    measure: str
    common: bool  # at the common window
    means: tuple[float, ...]
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Bar:
    """A contribution to a change, with its standard error."""

    label: str
    value: float
    error: float


@dataclass(frozen=True)
class Answer:
    """A question, its answer in one or two sentences, a badge, and what its chart draws: lines or bars."""

    question: str
    text: str
    badge: str
    title: str  # of the chart
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    share: bool = False  # whether the lines are shares of heads
    step: tuple[str, str] | None = None  # the two entries whose difference the bars break down


@dataclass(frozen=True)
class HeadToInspect:
    """A head worth opening first, and why."""

    layer: int
    head: int
    reason: str


@dataclass(frozen=True)
class StudySummary:
    """Headline, findings in the order of the questions, heads to start with, and how certain all of it is."""

    title: str
    headline: str
    findings: tuple[Answer, ...]
    heads: tuple[HeadToInspect, ...]
    certainty: str

    def __str__(self) -> str:
        parts = [self.headline, ""]
        for finding in self.findings:
            parts += [
                finding.question,
                *textwrap.wrap(finding.text, WIDTH, initial_indent="  ", subsequent_indent="  "),
            ]
        if self.heads:
            parts += ["Start with these heads", *(f"  L{h.layer} H{h.head}: {h.reason}" for h in self.heads)]
        return "\n".join([*parts, "How certain is this?", *textwrap.wrap(self.certainty, WIDTH, initial_indent="  ",
                                                                      subsequent_indent="  ")])  # fmt: skip

    def to_page(self) -> dict[str, Any]:
        """The same as plain values for the page; numbers that do not exist are None."""
        return {
            "headline": self.headline,
            "findings": [_finding_for_page(finding) for finding in self.findings],
            "heads": [asdict(head) for head in self.heads],
            "certainty": self.certainty,
        }


def _finding_for_page(finding: Answer) -> dict[str, Any]:
    lines = [{**asdict(line), "means": _plain(line.means), "errors": _plain(line.errors)} for line in finding.lines]
    bars = [
        {"label": bar.label, **dict(zip(("value", "error"), _plain((bar.value, bar.error)), strict=True))}
        for bar in finding.bars
    ]
    return {**asdict(finding), "lines": lines, "bars": bars}


def _plain(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def summarize(tables: Results) -> StudySummary:
    """The summary of a study."""
    story = _Story(tables)
    findings = [story.which(), story.when(), story.long_context(), story.matters()]
    return StudySummary(
        title=tables.own.study.title,
        headline=story.headline(),
        findings=tuple(finding for finding in findings if finding is not None),
        heads=story.heads(),
        certainty=story.certainty(),
    )


class _Story:
    """The facts behind the sentences, about the main population: rotary heads where layers differ, else all heads."""

    def __init__(self, tables: Results) -> None:
        self.tables, self.own, self.common = tables, tables.own, tables.common
        self.study = tables.own.study
        self.kind = main_layer_type(tables.own)
        self.part = part_of(self.kind)
        self.who = population(tables.own, self.kind)
        self.names = [name for name in self.own.names if math.isfinite(self.mean(self.own, "r_q", name))]
        self.start = self.names[0] if self.names else self.own.names[0]
        self.end = self.names[-1] if self.names else self.own.names[-1]

    # --- facts ----------------------------------------------------------------------------------

    @property
    def is_run(self) -> bool:
        """Whether there is a trajectory to describe."""
        return self.study.one_run and len(self.names) > 1

    @property
    def subject(self) -> str:
        """`Rotary heads`, as the subject of a sentence."""
        return (
            "Heads"
            if self.kind == EVERY_KIND
            else f"{shortened(self.kind)[:1].upper()}{shortened(self.kind)[1:]} heads"
        )

    def label(self, name: str) -> str:
        """A checkpoint's label."""
        return shortened(self.study.labels[name])

    def mean(self, at: WindowView, measure: str, name: str) -> float:
        """The mean over the main population; NaN where it does not exist."""
        return at.panel.mean(measure, name, self.part) if name in at.names else math.nan

    def change(self, at: WindowView, measure: str, before: str, after: str) -> Change:
        """The change of that mean."""
        return at.panel.change(measure, before, after, self.part)

    @property
    def pretraining(self) -> list[str]:
        """The checkpoints before the context length or the RoPE base first changes; all where neither does."""
        settings = {name: self._setting(name) for name in self.names}
        kept = itertools.takewhile(lambda name: settings[name] == settings[self.names[0]], self.names)
        return list(kept)

    def _setting(self, name: str) -> tuple[float, str]:
        entry = next(each for each in self.study.checkpoints if each.name == name)
        return self.own.window_of(name), str(entry.record.rope_theta)

    @property
    def extended(self) -> bool:
        """Whether the run has checkpoints after its context length or base changed."""
        return self.is_run and 0 < len(self.pretraining) < len(self.names)

    def equal_length(self) -> WindowView | None:
        """The view in which all checkpoints have the same window; None where there is none."""
        if self.common is not None:
            return self.common
        return self.own if len({self.own.window_of(name) for name in self.names}) == 1 else None

    def trajectory(self) -> tuple[WindowView, list[str]] | None:
        """Checkpoints that can be compared as stages of learning, and at which windows.

        Those of pretraining over their own context; where that is one checkpoint, all of them at equal length.
        """
        if len(self.pretraining) > 1:
            return self.own, self.pretraining
        at = self.equal_length()
        return None if at is None else (at, [name for name in self.names if name in at.names])

    # --- headline -------------------------------------------------------------------------------

    def headline(self) -> str:
        """One sentence of at most 20 words."""
        if not self.names:
            return "No head has a defined correlation with position."
        if not self.is_run:
            return self._headline_apart()
        first = self._learned()
        second = self._afterwards() if self.extended and len(self.pretraining) > 1 else ""
        text = f"{first}{second}."
        return text if len(text.split()) <= MOST_HEADLINE_WORDS else f"{first}."

    def _learned(self) -> str:
        comparable = self.trajectory()
        if comparable is None:
            return "Checkpoints differ in context length, so what training changed is unknown"
        at, names = comparable
        shape = at.panel.series("r_q", names, self.part)
        when = "in pretraining" if self.extended and len(self.pretraining) > 1 else "during training"
        when += " at equal context length" if at.common else ""
        if shape.trend is Trend.LEVEL:
            much = "barely encode" if self.mean(at, "r_q", names[-1]) < LOW else "encode"
            return f"{self.subject} {much} position throughout, without a significant change"
        if shape.trend is Trend.UNDECIDED:
            return f"Whether {self.subject.lower()} learn position is unknown: standard errors are missing"
        if shape.trend is Trend.PEAKS and shape.turn is not None:
            return f"{self.subject} track position most closely at {self.label(names[shape.turn])}, then less"
        if shape.overall > 0 and shape.points[shape.first] >= ALREADY * max(shape.points):
            return f"{self.subject} encode position already at {self.label(names[0])} and strengthen it"
        if shape.overall > 0:
            return f"{self.subject} learn position {when}"
        if shape.overall < 0:
            return f"{self.subject} lose positional information {when}"
        return f"{self.subject} change how closely they track position, and end where they started"

    def _afterwards(self) -> str:
        """What the long-context phases did at equal length."""
        at, before = self.equal_length(), self.pretraining[-1]
        if at is None or before not in at.names or self.end not in at.names:
            return ""
        change = self.change(at, "r_q", before, self.end)
        base = self._cause("joint") or self._cause("base")
        weights = self._cause("joint_weights") or self._cause("weights")
        if base is not None and weights is not None and base.value < 0 < weights.value:
            outcome = {-1: "recovers only part", 0: "recovers it", 1: "more than makes up for it"}[change.direction]
            return f"; the {self._base_words()} then weakens it, and training {outcome}"
        if change.outcome is Significance.UNKNOWN:
            return ""
        verb = {1: "strengthens it", -1: "weakens it", 0: "leaves it unchanged"}[change.direction]
        return f"; long-context training {verb} at equal length"

    def _base_words(self) -> str:
        """`larger RoPE base`, as the step's bases say."""
        row = self._attribution()
        before, after = (math.nan, math.nan) if row is None else (float(row["from_base"]), float(row["to_base"]))
        if not math.isfinite(before + after) or before == after:
            return "longer context with its RoPE base"
        return "larger RoPE base" if after > before else "smaller RoPE base"

    def _cause(self, name: str) -> Bar | None:
        """One cause of the change from the end of pretraining to the last checkpoint; None if not significant."""
        return next((bar for cause, bar in self._causes() if cause == name and self._is_sure(cause)), None)

    def _headline_apart(self) -> str:
        """Of one checkpoint its level; of seeds or models whether they differ."""
        if len(self.names) == 1:
            mean = self.mean(self.own, "r_q", self.end)
            how = "closely" if mean > 0.7 else "loosely" if mean > LOW else "barely"
            return f"{self.subject} of {self.label(self.end)} {how} track position (mean r_q {number(mean)})."
        low, high = self._extremes("r_q")
        sure = self.change(self.own, "r_q", low, high).outcome is Significance.CHANGED
        differ = "differ" if sure else "do not differ significantly"
        return f"{self.study.noun.capitalize()}s {differ} in how closely {self.subject.lower()} track position."

    def _extremes(self, measure: str) -> tuple[str, str]:
        means = {name: self.mean(self.own, measure, name) for name in self.names}
        return min(means, key=means.__getitem__), max(means, key=means.__getitem__)

    # --- which ----------------------------------------------------------------------------------

    def which(self) -> Answer | None:
        """How many heads are position-dominated, at native and at equal length, and what the other layer types do."""
        if not self.names:
            return None
        if not self.study.one_run and len(self.names) > 1:
            shares = [f"{self._share(self.own, name)} in {self.label(name)}" for name in self.names[:COUNT_NAMED]]
            text = f"Position-dominated heads: {', '.join(shares)} (of {self.who})."
        else:
            window = self.own.window_of(self.end)
            length = f" at native length ({tokens(window)})" if math.isfinite(window) else ""
            share = self._share(self.own, self.end)
            text = f"At {self.label(self.end)}, {share} of {self.who} are position-dominated{length}"
            text += f"{self._share_at_equal_length()}.{self._share_peak()}"
        return Answer(
            "Which heads encode position?", f"{text}{self._others()}", "position-dominated heads",
            f"Share of {self.who} that are position-dominated", self._lines(POSITION_DOMINATED, "position-dominated"),
            share=True,
        )  # fmt: skip

    def _share(self, at: WindowView, name: str) -> str:
        mean, error = self.mean(at, POSITION_DOMINATED, name), at.panel.error(POSITION_DOMINATED, name, self.part)
        return share_plus_minus(mean, error)

    def _share_at_equal_length(self) -> str:
        if self.common is None or self.end not in self.common.names:
            return ""
        if self.common.window_of(self.end) == self.own.window_of(self.end):
            return ""
        return f", {self._share(self.common, self.end)} over the first {tokens(self.common.window_of(self.end))}"

    def _share_peak(self) -> str:
        shape = self.own.panel.series(POSITION_DOMINATED, self.names, self.part) if self.is_run else None
        if shape is None or shape.turn is None:
            return ""
        verb = "peaks at" if shape.trend is Trend.PEAKS else "dips to"
        return f" The share {verb} {percent(shape.points[shape.turn])} ({self.label(self.names[shape.turn])})."

    def _others(self) -> str:
        """The layer types that the main population leaves out, at the last checkpoint."""
        said = []
        for kind in self.own.layer_types:
            if kind in (self.kind, EVERY_KIND) or not self.study.one_run:
                continue
            mean = self.own.panel.mean("r_q", self.end, part_of(kind))
            if math.isfinite(mean):
                error = self.own.panel.error("r_q", self.end, part_of(kind))
                said.append(f" {population(self.own, kind)} have r_q {plus_minus(mean, error)}.")
        return "".join(said)

    # --- when -----------------------------------------------------------------------------------

    def when(self) -> Answer | None:
        """The trajectory of mean r_q and r_k at native length, or the range over seeds and models."""
        if not self.names:
            return None
        if not self.is_run:
            return self._levels()
        comparable = self.trajectory()
        if comparable is None:
            return self._levels()
        at, names = comparable
        sentences = [self._course(at, names, measure) for measure in ("r_q", "r_k")]
        return Answer(
            "When did they learn it?", " ".join(sentences),
            "equal context length" if at.common else "native context length",
            f"Mean r_q and r_k of {self.who}", (*self._lines("r_q", "r_q"), *self._lines("r_k", "r_k")),
        )  # fmt: skip

    def _course(self, at: WindowView, names: Sequence[str], measure: str) -> str:
        """`In pretraining, mean r_q of 48 rotary heads rises from …`; the second sentence is shorter."""
        shape = at.panel.series(measure, names, self.part)
        labels = [self.label(name) for name in names]
        step = steepest_step(at.panel, [self._entry(name) for name in names], measure, self.part, shape)
        subject = f"mean {measure} of {self.who}" if measure == "r_q" else f"mean {measure}"
        if measure == "r_q" and self.extended and len(self.pretraining) > 1:
            subject = f"in pretraining, {subject}"
        text = f"{subject[:1].upper()}{subject[1:]} {trend_phrase(shape, labels, number)}"
        return f"{text}{f'; steepest step {step}' if step else ''}."

    def _entry(self, name: str) -> Entry:
        return next(each for each in self.study.checkpoints if each.name == name)

    def _levels(self) -> Answer:
        """Without a trajectory: what each seed, model, or the only checkpoint has."""
        pairs = []
        for name in self.names[:COUNT_NAMED]:
            values = [
                plus_minus(self.mean(self.own, m, name), self.own.panel.error(m, name, self.part))
                for m in ("r_q", "r_k")
            ]
            pairs.append(f"{self.label(name)}: r_q {values[0]}, r_k {values[1]}")
        return Answer(
            "How closely do queries and keys track position?", f"Means over {self.who}. {'; '.join(pairs)}.",
            "native context length", f"Mean r_q and r_k of {self.who}",
            (*self._lines("r_q", "r_q"), *self._lines("r_k", "r_k")),
        )  # fmt: skip

    # --- long context ---------------------------------------------------------------------------

    def long_context(self) -> Answer | None:
        """What changed at equal length after pretraining, and by which cause; None where nothing was extended."""
        if not self.extended:
            return None
        at, before = self.equal_length(), self.pretraining[-1]
        if at is None or before not in at.names or self.end not in at.names:
            return None
        row = self._attribution()
        until = self.end if row is None else str(row["to_model"])
        sentences = [f"Over the same {tokens(at.window_of(until))}, {self._step(at, before, until)}."]
        if until != self.end:
            later = self.mean(at, "r_q", self.end)
            sentences[0] = f"{sentences[0][:-1]}, and is {number(later)} at {self.label(self.end)}."
        bars = tuple(bar for _, bar in self._causes() if bar.value or math.isfinite(bar.error))
        if bars:
            causes = ", ".join(f"{bar.label} {plus_minus(bar.value, bar.error, signed=True)}" for bar in bars)
            step = f" of the step to {self.label(until)}" if until != self.end else ""
            sentences.append(f"Causes{step}: {causes}.")
        return Answer(
            "What did long-context training change?", " ".join(sentences), "equal context length",
            f"Contributions to the change of mean r_q, {self.label(before)} → {self.label(until)}",
            () if bars else self._lines("r_q", "r_q"), bars, step=(before, until) if bars else None,
        )  # fmt: skip

    def _step(self, at: WindowView, before: str, after: str) -> str:
        """`mean r_q of 48 rotary heads falls from 0.59 (A) to 0.51 (B)`."""
        change = self.change(at, "r_q", before, after)
        start, stop = shown(number, change.before, change.after)
        verb = {1: "rises from", -1: "falls from", 0: "does not change significantly:"}[change.direction]
        verb = "has no known standard error:" if change.outcome is Significance.UNKNOWN else verb
        return f"mean r_q of {self.who} {verb} {start} ({self.label(before)}) to {stop} ({self.label(after)})"

    def _causes(self) -> list[tuple[str, Bar]]:
        """The causes of the change from the end of pretraining to the end, by column of the attribution."""
        row = self._attribution()
        if row is None:
            return []
        return [
            (name, Bar(words, float(row[name]), float(row[error_name(name)])))
            for name, words in causes_of(row).items()
            if row[name] != 0.0  # a cause that the two checkpoints have in common
        ]

    def _is_sure(self, cause: str) -> bool:
        row = self._attribution()
        return row is not None and outcome_of(row, cause) is Significance.CHANGED

    def _attribution(self) -> pd.Series | None:
        """The attribution's row of that change at equal length; None where there is none."""
        at = self.equal_length()
        if at is None or not at.has(CAUSES) or not self.extended:
            return None
        rows = split_rows(at)
        pairs = (rows["from_model"] == self.pretraining[-1]) & (rows["quantity"] == R_Q)
        for end in (self.end, self.names[len(self.pretraining)]):
            here = rows[pairs & (rows["to_model"] == end)]
            if len(here):
                return here.iloc[0]
        return None

    # --- matters --------------------------------------------------------------------------------

    def matters(self) -> Answer | None:
        """What the model loses without positional scores of single heads; None without an ablation."""
        if not measured_edits(self.own):
            return None
        edit, model = shown_edit(self.own), last_measured(self.own)
        heads = self.own.of_entry(model).dropna(subset=[f"loss_{edit}"])
        loss, error = heads[f"loss_{edit}"].to_numpy(float), heads[f"loss_{edit}_se"].to_numpy(float)
        known = np.isfinite(loss)
        if not known.any():
            return None
        costly = (is_significant(loss, error, self.own.freedom(model)) == 1) & (loss > 0)
        most = f", at most {plus_minus(float(loss[costly].max()), math.nan)} nats per token" if costly.any() else ""
        text = (
            f"At {self.label(model)}, removing one head's average distance preference raises the loss significantly "
            f"for {int(costly.sum())} of {int(known.sum())} heads{most}."
        )
        bars = tuple(
            Bar(f"L{heads['layer'].iloc[i]} H{heads['head'].iloc[i]}", float(loss[i]), float(error[i]))
            for i in np.argsort(-np.where(known, loss, -np.inf))[:5]
        )
        return Answer("Does it matter?", text, "ablation", "Loss increase of the five costliest heads", (), bars)

    # --- heads ----------------------------------------------------------------------------------

    def heads(self) -> tuple[HeadToInspect, ...]:
        """The strongest head, the one that long-context training (or training) changed most, and the costliest one."""
        if not self.names or (not self.study.one_run and len(self.names) > 1):
            return ()
        picked: list[HeadToInspect] = []
        last = self.own.of_entry(self.end).dropna(subset=["r_q", "r_k"])
        if len(last):
            r_q, r_k = (last[name].to_numpy(float) for name in ("r_q", "r_k"))
            best = int(np.minimum(np.abs(r_q), np.abs(r_k)).argmax())
            reason = f"strongest at {self.label(self.end)}: r_q {number(r_q[best])}, r_k {number(r_k[best])}"
            picked.append(_head(last, best, reason))
        for find in (self._most_changed, self._costliest):
            head = find()
            if head is not None and (head.layer, head.head) not in {(h.layer, h.head) for h in picked}:
                picked.append(head)
        return tuple(picked)

    def _most_changed(self) -> HeadToInspect | None:
        at, before = self.equal_length(), self.pretraining[-1] if self.extended else self.start
        if at is None or not self.is_run or before not in at.names or self.end not in at.names or before == self.end:
            return None
        rows = at.replicates if self.study.same_documents else None
        changes = None if rows is None else paired_changes(at.heads, rows, [(before, self.end)])
        if changes is None:  # without standard errors no head can be called changed
            return None
        significant = changes[(changes["r_q_changed"] == 1) & (changes["r_q_change"].abs() > SMALLEST)]
        both = (
            at.of_entry(before)[["layer", "head", "r_q"]]
            .merge(
                at.of_entry(self.end)[["layer", "head", "r_q"]], on=["layer", "head"], suffixes=("_before", "_after")
            )
            .dropna()
        )
        both = both.merge(significant[["layer", "head"]], on=["layer", "head"])
        if both.empty:
            return None
        start, stop = (both[f"r_q_{end}"].to_numpy(float) for end in ("before", "after"))
        most = int(np.abs(stop - start).argmax())
        ends = " → ".join(shown(number, start[most], stop[most]))
        length = " at equal length" if self.common is not None else ""
        steps = f"{self.label(before)} → {self.label(self.end)}"
        return _head(both, most, f"changed most{length}: r_q {ends} ({steps})")

    def _costliest(self) -> HeadToInspect | None:
        if not measured_edits(self.own):
            return None
        edit, model = shown_edit(self.own), last_measured(self.own)
        heads = self.own.of_entry(model).dropna(subset=[f"loss_{edit}"])
        if heads.empty:
            return None
        loss, error = heads[f"loss_{edit}"].to_numpy(float), heads[f"loss_{edit}_se"].to_numpy(float)
        worst = int(loss.argmax())
        size = plus_minus(loss[worst], error[worst], signed=True)
        return _head(heads, worst, f"costliest to edit: {size} nats per token")

    # --- certainty ------------------------------------------------------------------------------

    def certainty(self) -> str:
        """Documents, what standard errors cover, and what could not be decided."""
        documents = [c.record.documents for c in self.study.checkpoints if c.record.documents is not None]
        read = f"{min(documents):,} documents" if documents else "An unrecorded number of documents"
        parts = [f"{read} per {self.study.noun}."]
        if math.isfinite(self.own.panel.error("r_q", self.end, self.part)):
            parts.append(
                "± is one standard error over documents; significant means p < 0.05 (Student's t over groups)."
            )
        else:
            parts.append("Standard errors over documents are unknown, so no change is called significant by them.")
        missing = [self.label(name) for name in self.own.names if name not in self.names]
        if missing:
            parts.append(f"No values at {', '.join(missing)}.")
        if self.is_run and self.common is None and self.extended:
            parts.append("There is no common window, so changes of context length are not separated from training.")
        return " ".join(parts)

    def _lines(self, measure: str, label: str) -> tuple[Line, ...]:
        lines = []
        for at in self.tables.views():
            means = tuple(self.mean(at, measure, name) for name in self.own.names)
            errors = tuple(
                at.panel.error(measure, name, self.part) if name in at.names else math.nan for name in self.own.names
            )
            lines.append(Line(label, measure, at.common, means, errors))
        return tuple(lines)


def main_layer_type(at: WindowView) -> str:
    """The layer type that sentences are about: rotary where layers differ and one type rotates, else all heads."""
    rotary = [kind for kind in at.layer_types if kind.startswith("rotary")]
    everywhere = [kind for kind in rotary if all((at.of_entry(name)["layer_kind"] == kind).any() for name in at.names)]
    return everywhere[0] if len(at.layer_types) > 1 and len(everywhere) == 1 else EVERY_KIND


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _head(rows: pd.DataFrame, place: int, reason: str) -> HeadToInspect:
    return HeadToInspect(int(rows["layer"].iloc[place]), int(rows["head"].iloc[place]), reason)
