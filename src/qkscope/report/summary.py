"""The summary of a study: one source for the page's first screen, the terminal, and `results.summary()`.

It answers five questions: which heads encode position, when they learned it, what long-context training changed at
equal length, whether it matters, and how certain that is. Sentences cover the whole trajectory, and nothing is
concluded from a change that is not significant (`stats.significance`).
"""

from __future__ import annotations

import itertools
import math
import textwrap
from dataclasses import asdict, dataclass
from functools import partial
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
from qkscope.stats.changes import Change
from qkscope.stats.series import Trend
from qkscope.stats.significance import SMALLEST, Significance, is_significant
from qkscope.text import counted
from qkscope.words.phrases import describe_trend, number, percent, plus_minus, shortened, shown, value_with_error

ALREADY = 0.75  # of its largest value at the first checkpoint: heads had formed before the study begins
MOST_HEADLINE_WORDS = 20
WIDTH = 100  # columns of the text
COUNT_NAMED = 6  # models that a sentence names
FROM_TO = ("from", "to")
CORRELATION = "mean correlation"
Found = tuple[pd.DataFrame, int, str]  # heads, the row of one of them, and the reason to inspect it


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
    axis: str  # its values, with their unit
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
        for title, text in [*((each.question, each.text) for each in self.findings), ("", self.certainty)]:
            if not title and self.heads:
                parts += ["Start with these heads", *(f"  L{h.layer} H{h.head}: {h.reason}" for h in self.heads)]
            lines = textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
            parts += [title or "How certain is this?", *lines]
        return "\n".join(parts)

    def to_page(self) -> dict[str, Any]:
        """The same as plain values for the page; numbers that do not exist are None."""
        fields = {name: value for name, value in asdict(self).items() if name != "title"}
        for finding in fields["findings"]:
            for line in finding["lines"]:
                line |= {name: [_plain(value) for value in line[name]] for name in ("means", "errors")}
            for bar in finding["bars"]:
                bar |= {name: _plain(bar[name]) for name in ("value", "error")}
        return fields


def _plain(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def summarize(tables: Results) -> StudySummary:
    """The summary of a study."""
    story = _Story(tables)
    findings = [
        story.which() if story.names else None,
        story.when() if story.names else None,
        story.long_context() if story.extended else None,
        story.matters(story.edit) if story.edit else None,
    ]
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
        self.tables, self.own, self.common, self.study = tables, tables.own, tables.common, tables.own.study
        own, entries = self.own, {entry.name: entry for entry in self.study.checkpoints}
        self.entries, self.labels = entries, {name: shortened(entry.label) for name, entry in entries.items()}
        rotary = [kind for kind in own.layer_types if kind.startswith("rotary")]
        everywhere = [k for k in rotary if all((own.of_entry(name)["layer_kind"] == k).any() for name in own.names)]
        self.kind = everywhere[0] if len(own.layer_types) > 1 and len(everywhere) == 1 else EVERY_KIND
        self.part, self.who = part_of(self.kind), population(own, self.kind)
        kind = "" if self.kind == EVERY_KIND else shortened(self.kind)
        self.subject = f"{kind[:1].upper()}{kind[1:]} heads" if kind else "Heads"  # of a sentence
        self.names = [name for name in own.names if math.isfinite(self.mean(own, "r_q", name))]
        self.start, self.end = (self.names or own.names)[0], (self.names or own.names)[-1]
        self.is_run = self.study.one_run and len(self.names) > 1  # there is a trajectory to describe
        # The checkpoints before the context length or the RoPE base first changes; all where neither does.
        settings = {name: (own.window_of(name), str(entry.record.rope_theta)) for name, entry in entries.items()}
        unchanged = itertools.takewhile(lambda name: settings[name] == settings[self.names[0]], self.names)
        self.pretraining = list(unchanged)
        self.extended = self.is_run and len(self.pretraining) < len(self.names)
        # The view in which all checkpoints have the same window.
        same = len({own.window_of(name) for name in self.names}) == 1
        self.equal = self.common if self.common is not None else own if same else None
        # Stages of learning that can be compared: pretraining at native length, or all checkpoints at equal length.
        self.stages: tuple[WindowView, list[str]] | None = None
        if len(self.pretraining) > 1:
            self.stages = own, self.pretraining
        elif self.equal is not None:
            self.stages = self.equal, [name for name in self.names if name in self.equal.names]
        self.edit = shown_edit(own) if measured_edits(own) else None
        self.row = self._attribution() if self.extended else None  # of the change from pretraining to the end
        self.causes = {} if self.row is None else causes_of(self.row)

    def mean(self, at: WindowView, measure: str, name: str) -> float:
        """The mean over the main population; NaN where it does not exist."""
        return at.panel.mean(measure, name, self.part) if name in at.names else math.nan

    def change(self, at: WindowView, measure: str, before: str, after: str) -> Change:
        """The change of that mean."""
        return at.panel.change(measure, before, after, self.part)

    # --- headline -------------------------------------------------------------------------------

    def headline(self) -> str:
        """One sentence of at most 20 words."""
        if not self.names:
            return "No head has a defined correlation with position."
        if not self.is_run:
            return self._headline_of_models()
        first = self._learned()
        second = self._afterwards() if self.extended and len(self.pretraining) > 1 else ""
        text = f"{first}{second}."
        return text if len(text.split()) <= MOST_HEADLINE_WORDS else f"{first}."

    def _learned(self) -> str:
        if self.stages is None:
            return "Checkpoints differ in context length, so what training changed is unknown"
        at, names = self.stages
        shape = at.panel.series("r_q", names, self.part)
        when = "in pretraining" if self.extended and len(self.pretraining) > 1 else "during training"
        when += " at equal context length" if at.common else ""
        if shape.trend is Trend.LEVEL:
            much = "barely encode" if self.mean(at, "r_q", names[-1]) < LOW else "encode"
            return f"{self.subject} {much} position throughout, without a significant change"
        if shape.trend is Trend.UNDECIDED:
            return f"Whether {self.subject.lower()} learn position is unknown: standard errors are missing"
        if shape.trend is Trend.PEAKS and shape.turn is not None:
            return f"{self.subject} track position most closely at {self.labels[names[shape.turn]]}, then less"
        if shape.overall > 0 and shape.points[shape.first] >= ALREADY * max(shape.points):
            return f"{self.subject} encode position already at {self.labels[names[0]]} and strengthen it"
        if shape.overall:
            return f"{self.subject} {'learn position' if shape.overall > 0 else 'lose positional information'} {when}"
        return f"{self.subject} change how closely they track position, and end where they started"

    def _afterwards(self) -> str:
        """What the long-context phases did at equal length."""
        at, before = self.equal, self.pretraining[-1]
        if at is None or before not in at.names or self.end not in at.names:
            return ""
        change = self.change(at, "r_q", before, self.end)
        base, weights = self._effect("joint", "base"), self._effect("joint_weights", "weights")
        if base < 0 < weights:
            outcome = {-1: "recovers only part", 0: "recovers it", 1: "more than makes up for it"}[change.direction]
            return f"; the {self._base_words()} then weakens it, and training {outcome}"
        if change.outcome is Significance.UNKNOWN:
            return ""
        verb = {1: "strengthens it", -1: "weakens it", 0: "leaves it unchanged"}[change.direction]
        return f"; long-context training {verb} at equal length"

    def _effect(self, *causes: str) -> float:
        """The contribution of the first of these causes that is significant; 0 if none is."""
        row = self.row
        if row is None:
            return 0.0
        known = [c for c in causes if c in self.causes and row[c] and outcome_of(row, c) is Significance.CHANGED]
        return float(row[known[0]]) if known else 0.0

    def _base_words(self) -> str:
        """`larger RoPE base`, by the bases before and after."""
        before, after = (math.nan, math.nan) if self.row is None else (float(self.row[f"{e}_base"]) for e in FROM_TO)
        if not math.isfinite(before + after) or before == after:
            return "longer context with its RoPE base"
        return "larger RoPE base" if after > before else "smaller RoPE base"

    def _headline_of_models(self) -> str:
        """Of one checkpoint its level; of seeds or models whether they differ."""
        if len(self.names) == 1:
            mean = self.mean(self.own, "r_q", self.end)
            how = "closely" if mean > 0.7 else "loosely" if mean > LOW else "barely"
            return f"{self.subject} of {self.labels[self.end]} {how} track position (mean r_q {number(mean)})."
        means = {name: self.mean(self.own, "r_q", name) for name in self.names}
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        sure = self.change(self.own, "r_q", low, high).outcome is Significance.CHANGED
        differ = "differ" if sure else "do not differ significantly"
        return f"{self.study.noun.capitalize()}s {differ} in how closely {self.subject.lower()} track position."

    # --- which ----------------------------------------------------------------------------------

    def which(self) -> Answer:
        """How many heads are position-dominated, at native and at equal length, and what the other layer types do."""
        own, common, end = self.own, self.common, self.end
        heads = partial(value_with_error, measure=POSITION_DOMINATED, kind="indicator", part=self.part)
        if not self.study.one_run and len(self.names) > 1:
            shares = [f"{heads(own.panel, model=name)} in {self.labels[name]}" for name in self.names[:COUNT_NAMED]]
            text = f"Position-dominated heads: {', '.join(shares)} (of {self.who})."
        else:
            window, share = own.window_of(end), heads(own.panel, model=end)
            text = f"At {self.labels[end]}, {share} of {self.who} are position-dominated"
            text += f" at native length ({counted(int(window), 'token')})" if math.isfinite(window) else ""
            if common is not None and end in common.names and common.window_of(end) != window:
                length = counted(int(common.window_of(end)), "token")
                text += f", {heads(common.panel, model=end)} over the first {length}"
            text += "."
        shape = own.panel.series(POSITION_DOMINATED, self.names, self.part) if self.is_run else None
        if shape is not None and shape.turn is not None:
            verb, peak = "peaks at" if shape.trend is Trend.PEAKS else "dips to", shape.points[shape.turn]
            text += f" The share {verb} {percent(peak)} ({self.labels[self.names[shape.turn]]})."
        others = [k for k in own.layer_types if k not in (self.kind, EVERY_KIND)] if self.study.one_run else []
        for kind in others:  # the layer types that the main population leaves out
            r_q = value_with_error(own.panel, "r_q", end, "number", part_of(kind))
            text += f" {population(own, kind)} have r_q {r_q}." if r_q != "–" else ""
        return Answer(
            "Which heads encode position?", text, "position-dominated heads",
            f"Share of {self.who} that are position-dominated", "share of heads",
            self._lines(**{POSITION_DOMINATED: "position-dominated"}), share=True,
        )  # fmt: skip

    # --- when -----------------------------------------------------------------------------------

    def when(self) -> Answer:
        """The trajectory of mean r_q and r_k at native length; without one, the level of each model."""
        lines, title = self._lines(r_q="r_q", r_k="r_k"), f"Mean r_q and r_k of {self.who}"
        if not self.is_run or self.stages is None:
            levels = []
            for name in self.names[:COUNT_NAMED]:
                r = [value_with_error(self.own.panel, m, name, "number", self.part) for m in ("r_q", "r_k")]
                levels.append(f"{self.labels[name]}: r_q {r[0]}, r_k {r[1]}")
            text = f"Means over {self.who}. {'; '.join(levels)}."
            question = "How closely do queries and keys track position?"
            return Answer(question, text, "native context length", title, CORRELATION, lines)
        at, names = self.stages
        entries = [self.entries[name] for name in names]
        where = "in pretraining, " if self.extended and len(self.pretraining) > 1 else ""
        subjects = {"r_q": f"{where}mean r_q of {self.who}", "r_k": "mean r_k"}
        courses = [describe_trend(at.panel, entries, m, who, number, self.part) for m, who in subjects.items()]
        badge = "equal context length" if at.common else "native context length"
        return Answer("When did they learn it?", " ".join(courses), badge, title, CORRELATION, lines)

    # --- long context ---------------------------------------------------------------------------

    def long_context(self) -> Answer | None:
        """What changed at equal length after pretraining, and by which cause; None where that is unknown."""
        at, before, row = self.equal, self.pretraining[-1], self.row
        if at is None or before not in at.names or self.end not in at.names:
            return None
        until = self.end if row is None else str(row["to_model"])
        change = self.change(at, "r_q", before, until)
        start, stop = shown(number, change.before, change.after)
        verb = {1: "rises from", -1: "falls from", 0: "does not change significantly:"}[change.direction]
        verb = "has no known standard error:" if change.outcome is Significance.UNKNOWN else verb
        text = f"Over the same {counted(int(at.window_of(until)), 'token')}, mean r_q of {self.who} {verb} "
        text += f"{start} ({self.labels[before]}) to {stop} ({self.labels[until]})"
        if until != self.end:
            text += f", and is {number(self.mean(at, 'r_q', self.end))} at {self.labels[self.end]}"
        bars = () if row is None else tuple(
            Bar(words, float(row[name]), float(row[error_name(name)]))
            for name, words in self.causes.items()
            if row[name] != 0.0  # a cause that the two checkpoints have in common
        )  # fmt: skip
        text += "."
        if bars:
            causes = ", ".join(f"{bar.label} {plus_minus(bar.value, bar.error, signed=True)}" for bar in bars)
            step = f" of the step to {self.labels[until]}" if until != self.end else ""
            text += f" Causes{step}: {causes}."
        return Answer(
            "What did long-context training change?", text, "equal context length",
            f"Contributions to the change of mean r_q, {self.labels[before]} → {self.labels[until]}",
            "change of mean r_q" if bars else CORRELATION,
            () if bars else self._lines(r_q="r_q"), bars, step=(before, until) if bars else None,
        )  # fmt: skip

    def _attribution(self) -> pd.Series | None:
        """The row that attributes the change from pretraining to the end at equal length; None where there is none."""
        if self.equal is None or not self.equal.has(CAUSES):
            return None
        rows = split_rows(self.equal)
        pairs = (rows["from_model"] == self.pretraining[-1]) & (rows["quantity"] == R_Q)
        for end in (self.end, self.names[len(self.pretraining)]):
            here = rows[pairs & (rows["to_model"] == end)]
            if len(here):
                return here.iloc[0]
        return None

    # --- matters --------------------------------------------------------------------------------

    def matters(self, edit: str) -> Answer | None:
        """What the model loses without positional scores of single heads."""
        model = last_measured(self.own)
        heads = self.own.of_entry(model).dropna(subset=[f"loss_{edit}"])
        if heads.empty:
            return None
        loss, error = heads[f"loss_{edit}"].to_numpy(float), heads[f"loss_{edit}_se"].to_numpy(float)
        costly = (is_significant(loss, error, self.own.freedom(model)) == 1) & (loss > 0)
        most = f", at most {plus_minus(float(loss[costly].max()), math.nan)} nats per token" if costly.any() else ""
        text = (
            f"At {self.labels[model]}, removing one head's average distance preference raises the loss significantly "
            f"for {int(costly.sum())} of {len(loss)} heads{most}."
        )
        bars = tuple(
            Bar(f"L{heads['layer'].iloc[i]} H{heads['head'].iloc[i]}", float(loss[i]), float(error[i]))
            for i in np.argsort(-loss)[:5]
        )
        title = "Loss increase of the five costliest heads"
        return Answer("Does it matter?", text, "ablation", title, "loss increase (nats per token)", (), bars)

    # --- heads ----------------------------------------------------------------------------------

    def heads(self) -> tuple[HeadToInspect, ...]:
        """The strongest head, the one that long-context training (or training) changed most, and the costliest one."""
        if not self.names or (not self.study.one_run and len(self.names) > 1):
            return ()
        heads: list[Found | None] = []
        last = self.own.of_entry(self.end).dropna(subset=["r_q", "r_k"])
        if len(last):
            r_q, r_k = (last[name].to_numpy(float) for name in ("r_q", "r_k"))
            best = int(np.minimum(np.abs(r_q), np.abs(r_k)).argmax())
            strongest = f"strongest at {self.labels[self.end]}: r_q {number(r_q[best])}, r_k {number(r_k[best])}"
            heads.append((last, best, strongest))
        heads += [self._most_changed() if self.is_run else None, self._costliest(self.edit) if self.edit else None]
        picked: dict[tuple[int, int], HeadToInspect] = {}
        for rows, place, reason in (each for each in heads if each is not None):
            layer, head = int(rows["layer"].iloc[place]), int(rows["head"].iloc[place])
            picked.setdefault((layer, head), HeadToInspect(layer, head, reason))
        return tuple(picked.values())

    def _most_changed(self) -> Found | None:
        at, before = self.equal, self.pretraining[-1] if self.extended else self.start
        if at is None or before not in at.names or self.end not in at.names or before == self.end:
            return None
        rows = at.replicates if self.study.same_documents else None
        changes = None if rows is None else paired_changes(at.heads, rows, [(before, self.end)])
        if changes is None:  # without standard errors no head can be called changed
            return None
        significant = changes[(changes["r_q_changed"] == 1) & (changes["r_q_change"].abs() > SMALLEST)]
        key = ["layer", "head"]
        first, last = (at.of_entry(name)[[*key, "r_q"]] for name in (before, self.end))
        both = first.merge(last, on=key, suffixes=("_before", "_after")).dropna().merge(significant[key], on=key)
        if both.empty:
            return None
        start, stop = (both[f"r_q_{end}"].to_numpy(float) for end in ("before", "after"))
        most = int(np.abs(stop - start).argmax())
        ends = " → ".join(shown(number, start[most], stop[most]))
        length = " at equal length" if self.common is not None else ""
        return both, most, f"changed most{length}: r_q {ends} ({self.labels[before]} → {self.labels[self.end]})"

    def _costliest(self, edit: str) -> Found | None:
        heads = self.own.of_entry(last_measured(self.own)).dropna(subset=[f"loss_{edit}"])
        if heads.empty:
            return None
        loss, error = heads[f"loss_{edit}"].to_numpy(float), heads[f"loss_{edit}_se"].to_numpy(float)
        worst = int(loss.argmax())
        size = plus_minus(loss[worst], error[worst], signed=True)
        return heads, worst, f"costliest to edit: {size} nats per token"

    # --- certainty ------------------------------------------------------------------------------

    def certainty(self) -> str:
        """Documents, what standard errors cover, and what could not be decided."""
        documents = [c.record.documents for c in self.study.checkpoints if c.record.documents is not None]
        read = f"{min(documents):,} documents" if documents else "An unrecorded number of documents"
        if math.isfinite(self.own.panel.error("r_q", self.end, self.part)):
            errors = "± is one standard error over documents; significant means p < 0.05 (Student's t over groups)."
        else:
            errors = "Standard errors over documents are unknown, so no change is called significant by them."
        parts = [f"{read} per {self.study.noun}.", errors]
        missing = [self.labels[name] for name in self.own.names if name not in self.names]
        if missing:
            parts.append(f"No values at {', '.join(missing)}.")
        if self.is_run and self.common is None and self.extended:
            parts.append("There is no common window, so changes of context length are not separated from training.")
        return " ".join(parts)

    def _lines(self, **measures: str) -> tuple[Line, ...]:
        """Means of measures (with their labels) at each choice of windows, as a chart draws them."""
        lines = []
        for measure, label in measures.items():
            for at in self.tables.views():
                means = tuple(self.mean(at, measure, n) for n in self.own.names)
                known = ((n, n in at.names) for n in self.own.names)
                errors = tuple(at.panel.error(measure, n, self.part) if there else math.nan for n, there in known)
                lines.append(Line(label, measure, at.common, means, errors))
        return tuple(lines)
