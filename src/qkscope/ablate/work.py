"""What an ablation of a study is to do: which heads of which checkpoints, which edits, on which documents, in shards.

A unit is one head, or a group of heads that are edited at the same time. Controls are groups of other heads, drawn at
random, so that "these heads matter more" is a comparison: with as many heads in each layer as the chosen ones, or with
the same dose, which is how much the edit `kernel` removes.

A shard is one document under one edit of a block of units: what a worker does in one go, and what a run that is killed
loses at most. Shards depend on the request alone, never on the machine or the number of workers. The outcomes of
finished shards lie in the results folder, by a hash of all that they depend on: a stopped ablation continues from them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from pydantic import ConfigDict

from qkscope.ablate.edits import WITHOUT_MOMENTS, kernel_spreads, maker_of, needle_of
from qkscope.errors import InputError, located
from qkscope.files import write_text
from qkscope.foreign import Missing, Unreadable, is_finite, parse_json, read_bytes
from qkscope.moments.moments import Moments
from qkscope.results.folder import ablation_path, moments_path
from qkscope.results.provenance import numeric_versions
from qkscope.run.checkpoint_plan import CheckpointPlan, Shard
from qkscope.run.plan import Plan
from qkscope.text import counted

SCHEMA = 2
UNITS = 32  # of a shard: about half a minute of one core for a small model
FEWEST_DOCUMENTS = 4  # with fewer, an error is a guess
MAX_OUTCOMES = 64 * 2**20  # bytes of one shard's outcomes

Head = tuple[int, int]  # layer, query head
NAME = re.compile(r"L(\d{1,5})H(\d{1,5})")
ALL = "all"
MOST_NAMED = 4  # heads that a label lists
NEAREST = 4  # heads of about a chosen head's dose, of which a control is drawn: fewer and all draws are alike


@dataclass(frozen=True)
class Unit:
    """Heads that are edited at the same time."""

    name: str
    role: Literal["head", "chosen", "control"]
    heads: tuple[Head, ...]
    group: str = ""  # of chosen heads and their controls: what the choice is called


@dataclass(frozen=True)
class HeadChoice:
    """What the user asks for: names, a category, or the top n by a column; alone or together."""

    names: tuple[str, ...] = ()  # L5H3, …, a category, or `all`
    top: int | None = None
    by: str = "r_q"  # a column of heads.csv
    together: bool = False  # edit them as one group, against controls
    controls: int = 4  # groups drawn at random
    seed: int = 0
    match_dose: bool = False  # controls have the chosen heads' dose; otherwise as many heads in each layer

    @property
    def label(self) -> str:
        """The choice in words, short enough for a table."""
        top = "" if self.top is None else f"top {self.top} by {self.by}"
        names = " ".join(self.names) if len(self.names) <= MOST_NAMED else f"{len(self.names)} heads"
        label = " of ".join(part for part in (top, names) if part) or ALL
        return f"{label}, dose-matched" if self.match_dose else label


@dataclass(frozen=True)
class AblationSettings:
    """What is edited, and on what it is measured."""

    edits: tuple[str, ...] = ("kernel", "zero")
    heads: HeadChoice = field(default_factory=HeadChoice)
    documents: int = 16
    tokens: int | None = None  # of each document; the checkpoint's context by default
    only: tuple[str, ...] = ()  # names of checkpoints; all by default
    run: int = 3  # tokens that end a run of so many which the document had before count as repeated
    parts: int = 4  # of a document, for the loss by position
    seed: int = 0  # of shuffled distances and needles
    needle: tuple[float, ...] = ()  # depths, from 0 to 1, at which a sentence is planted; none by default
    attention: bool = False  # also measure where edited heads attend

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where a file's settings are read

    def __post_init__(self) -> None:
        for edit in self.edits:
            maker_of(edit)  # refuses an unknown one
        if not self.edits:
            raise InputError("an ablation needs at least one edit")
        if self.documents < 1:
            raise InputError("an ablation needs at least one document")
        for depth in self.needle:
            if not 0 <= depth <= 1:
                raise InputError(f"a needle's depth is from 0 (the document's start) to 1 (its end), not {depth:g}")


@dataclass(frozen=True)
class AblationShard(Shard):
    """One document under one edit of a block of units."""

    edit: str = ""
    units: tuple[Unit, ...] = ()


@dataclass(frozen=True)
class CheckpointAblation:
    """One checkpoint's work."""

    plan: CheckpointPlan
    units: tuple[Unit, ...]
    documents: tuple[int, ...]
    tokens: int
    settings: AblationSettings

    @property
    def name(self) -> str:
        """The checkpoint's."""
        return self.plan.checkpoint.name

    @property
    def variants(self) -> int:
        """How many texts are made of a document: itself, and one with a needle at each depth."""
        return 1 + len(self.settings.needle)

    @property
    def passes(self) -> int:
        """Forward passes of a document of this checkpoint, at most: those of late layers are shorter."""
        return len(self.documents) * self.variants * (1 + len(self.units) * len(self.settings.edits))

    @cached_property
    def shards(self) -> tuple[AblationShard, ...]:
        """All of it, in order: documents of one group follow each other, because their edits are the same."""
        groups = self.plan.layout.groups
        order = sorted(self.documents, key=lambda document: (document % groups, document))
        blocks = [self.units[start : start + UNITS] for start in range(0, len(self.units), UNITS)]
        pieces = [(d, edit, block) for d in order for edit in self.settings.edits for block in blocks]
        return tuple(AblationShard(number, (d,), edit, block) for number, (d, edit, block) in enumerate(pieces))

    def fingerprint(self, shard: AblationShard) -> str:
        """A hash of everything that a shard's outcomes depend on."""
        facts = {
            **self._common,
            "document": shard.documents[0],
            "edit": shard.edit,
            "units": [[unit.name, unit.heads] for unit in shard.units],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    @cached_property
    def _common(self) -> dict[str, Any]:
        measured = ("run", "parts", "seed", "needle", "attention")
        return {
            "schema": SCHEMA,
            "moments": self.plan.fingerprint(),
            "tokens": self.tokens,
            "settings": {name: getattr(self.settings, name) for name in measured},
            "versions": numeric_versions(),
        }

    # -- outcomes on disk ------------------------------------------------------------------------------------

    def write_outcomes(self, folder: Path, shard: AblationShard, rows: list[list[Any]]) -> None:
        """Write a shard's rows [unit, outcome, before, delta]."""
        path = ablation_path(folder, self.name, self.fingerprint(shard))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"document": shard.documents[0], "edit": shard.edit, "rows": rows}) + "\n")

    def read_outcomes(self, folder: Path, shard: AblationShard) -> list[list[Any]] | None:
        """A shard's rows from an earlier run of the same work; None where there are none that can be read."""
        try:
            stored = parse_json(read_bytes(ablation_path(folder, self.name, self.fingerprint(shard)), MAX_OUTCOMES))
        except (Missing, Unreadable):
            return None
        rows, names = stored.get("rows"), {unit.name for unit in shard.units}
        sound = (
            isinstance(rows, list)
            and rows
            and all(
                isinstance(row, list)
                and len(row) == 4
                and row[0] in names
                and isinstance(row[1], str)
                and is_finite(row[2])
                and is_finite(row[3])
                for row in rows
            )
        )
        return rows if sound else None

    def missing_shards(self, folder: Path) -> list[AblationShard]:
        """The shards whose outcomes are not on disk yet."""
        return [shard for shard in self.shards if self.read_outcomes(folder, shard) is None]


def plan_ablation(
    plan: Plan, folder: Path, settings: AblationSettings, heads: pd.DataFrame
) -> list[CheckpointAblation]:
    """The work at each checkpoint; whatever can be wrong with it is refused before a model is loaded."""
    unknown = sorted(set(settings.only) - {each.checkpoint.name for each in plan.checkpoints})
    if unknown:
        raise InputError(f"there is no checkpoint {unknown[0]!r} in this study")
    ablations = []
    for each in plan.checkpoints:
        name = each.checkpoint.name
        if settings.only and name not in settings.only:
            continue
        with located(f"checkpoint {name!r}"):
            rows = heads[heads["model"] == name].reset_index(drop=True)
            if rows.empty or not moments_path(folder, name).is_file():
                raise InputError(f"it has no moments and tables in {folder} yet; `qkscope run` makes them")
            tokens = min(settings.tokens or each.context, each.context)
            doses = None
            if settings.heads.match_dose:  # how much the edit `kernel` removes from each head
                everyone = list(zip(rows["layer"].astype(int), rows["head"].astype(int), strict=True))
                doses = kernel_spreads(Moments.load(moments_path(folder, name)), everyone, tokens)
            units = tuple(units_of(settings.heads, rows, doses))
            ablation = CheckpointAblation(each, units, spread_documents(each, settings.documents), tokens, settings)
            _require_possible(ablation)
            ablations.append(ablation)
    return ablations


def _require_possible(ablation: CheckpointAblation) -> None:
    """Refuse what a checkpoint's moments, documents or tokens cannot give."""
    plan, settings, documents = ablation.plan, ablation.settings, len(ablation.documents)
    with_moments = [edit for edit in settings.edits if edit not in WITHOUT_MOMENTS]
    if plan.study.stage != "post_rope" and with_moments:
        raise InputError(
            f"the edit {with_moments[0]} needs queries and keys as the kernel gets them, but this study's are from "
            f"before rotation (stage: {plan.study.stage}); run a study without `stage`, or use "
            f"{' or '.join(WITHOUT_MOMENTS)}"
        )
    if documents < FEWEST_DOCUMENTS:
        raise InputError(
            f"{counted(documents, 'document')} are too few for an error: an ablation needs at least {FEWEST_DOCUMENTS}"
        )
    if ablation.tokens < 2:
        raise InputError(f"a loss needs at least two tokens, not {ablation.tokens}")
    if settings.needle:
        needle_of(plan.tokenizer, 0, settings.seed).require_room(ablation.tokens)


def spread_documents(plan: CheckpointPlan, count: int) -> tuple[int, ...]:
    """The first documents of each group in turn, so that all groups have about as many."""
    numbers: dict[int, int] = {}  # by group, of its documents so far
    rounds = []
    for document in plan.documents:
        group = document % plan.layout.groups
        numbers[group] = numbers.get(group, 0) + 1
        rounds.append((numbers[group], group, document))
    return tuple(sorted(document for _, _, document in sorted(rounds)[:count]))


def heads_of(units: Sequence[Unit]) -> list[tuple[int, int]]:
    """All heads of some units, each once, in order."""
    return sorted({head for unit in units for head in unit.heads})


# -- which heads ---------------------------------------------------------------------------------------------


def head_name(head: Head) -> str:
    """`L5H3`."""
    return f"L{head[0]}H{head[1]}"


def units_of(choice: HeadChoice, heads: pd.DataFrame, doses: Mapping[Head, float] | None = None) -> list[Unit]:
    """The units of one checkpoint, from its rows of heads.csv; `doses` are of all heads that can be matched by them."""
    chosen = resolve_heads(choice, heads)
    if not choice.together:
        return [Unit(head_name(head), "head", (head,)) for head in chosen]
    if choice.match_dose:
        drawn = dose_matched_controls(chosen, doses or {}, choice.controls, choice.seed)
    else:
        drawn = matched_controls(chosen, _listed(heads), choice.controls, choice.seed)
    label = choice.label
    controls = [Unit(f"{label}: control {number}", "control", of, label) for number, of in enumerate(drawn, start=1)]
    return [Unit(label, "chosen", tuple(chosen), label), *controls]


def resolve_heads(choice: HeadChoice, heads: pd.DataFrame) -> list[Head]:
    """The heads that are asked for, by layer and head; an unknown one is refused with what there is."""
    named = {head for name in choice.names or (ALL,) for head in _named(name, heads)}
    if choice.top is not None:
        by, rows = choice.by, heads[[head in named for head in _listed(heads)]]
        if by not in rows.columns or not pd.api.types.is_numeric_dtype(rows[by].dtype):
            near = get_close_matches(by, [str(name) for name in rows.columns], 3)
            meant = f"; is it {' or '.join(near)}?" if near else ""
            raise InputError(f"heads.csv has no numeric column {by!r}{meant}")
        largest = rows[by].abs().dropna().sort_values(ascending=False, kind="stable").index[: choice.top]
        named = set(_listed(rows.loc[largest]))
    if not named:
        raise InputError(f"no head is {' or '.join(choice.names)}: there is nothing to edit")
    return sorted(named)


def _listed(heads: pd.DataFrame) -> list[Head]:
    """Layer and head of each row."""
    return [(int(layer), int(head)) for layer, head in zip(heads["layer"], heads["head"], strict=True)]


def _named(name: str, heads: pd.DataFrame) -> list[Head]:
    """The heads that one name stands for."""
    everyone = _listed(heads)
    if name == ALL:
        return everyone
    if written := NAME.fullmatch(name):
        head = (int(written[1]), int(written[2]))
        if head not in everyone:
            first, last = head_name(min(everyone)), head_name(max(everyone))
            raise InputError(f"there is no head {name}; heads go from {first} to {last}")
        return [head]
    categories = sorted(set(heads["category"].dropna())) if "category" in heads.columns else []
    if name not in categories:
        raise InputError(
            f"{name!r} is neither a head (L5H3), nor `all`, nor a category that occurs here: {', '.join(categories)}"
        )
    return _listed(heads[heads["category"] == name])


def matched_controls(chosen: Sequence[Head], everyone: Sequence[Head], draws: int, seed: int) -> list[tuple[Head, ...]]:
    """Groups of other heads with as many in each layer; where a layer has too few others, the rest is of its own.

    The same seed gives the same groups, whatever else is asked for.
    """
    others = sorted(set(everyone) - set(chosen))
    groups = []
    for draw in range(draws):
        group: list[Head] = []
        for layer, count in sorted(Counter(layer for layer, _ in chosen).items()):
            rng = np.random.default_rng([seed, draw, layer])
            order: list[Head] = []
            for pool in (others, sorted(chosen)):
                there = [head for head in pool if head[0] == layer]
                order += [there[i] for i in rng.permutation(len(there))]
            group += order[:count]
        groups.append(tuple(sorted(group)))
    return groups


def dose_matched_controls(
    chosen: Sequence[Head], doses: Mapping[Head, float], draws: int, seed: int
) -> list[tuple[Head, ...]]:
    """Groups of other heads of any layer, one for each chosen head: drawn from the NEAREST in dose that are left.

    Heads with large doses have few others like them, so they are matched first. How well a group is matched is in the
    tables (`chosen_dose`, `controls_dose`).
    """
    without = [head for head in chosen if head not in doses]
    others = sorted(set(doses) - set(chosen))
    if without:
        raise InputError(
            f"the dose of {head_name(without[0])} is not known, because there are no sums from before its rotation; "
            "choose other heads, or leave out --match-dose"
        )
    if len(others) < len(chosen):
        raise InputError(
            f"{len(chosen)} heads cannot be compared with as many others: only {len(others)} others have a known dose; "
            "choose fewer, or leave out --match-dose"
        )
    groups = []
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        left, group = list(others), []
        for head in sorted(chosen, key=lambda each: (-doses[each], each)):
            near = sorted(left, key=lambda each: (abs(doses[each] - doses[head]), each))[:NEAREST]
            group.append(near[int(rng.integers(len(near)))])
            left.remove(group[-1])
        groups.append(tuple(sorted(group)))
    return groups
