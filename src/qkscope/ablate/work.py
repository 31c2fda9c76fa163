"""What an ablation of a study is to do: which heads of which checkpoints, which edits, on which documents, in shards.

A shard is one document under one edit of a block of units: what a worker does in one go, and what a run that is killed
loses at most. Shards depend on the request alone, never on the machine or the number of workers. The outcomes of
finished shards lie in the results folder, by a hash of all that they depend on: a stopped ablation continues from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from pydantic import ConfigDict

from qkscope.ablate.choice import HeadChoice, Unit, units_of
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
