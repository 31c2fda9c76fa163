"""What an ablation of a study is to do: which heads of which checkpoints, which edits, on which documents, in shards.

A shard is one document under one edit of a block of units: what a worker does in one go, and what a run that is killed
loses at most. Shards depend on the request alone, never on the machine or the number of workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from qkscope.ablate.choice import HeadChoice, Unit, units_of
from qkscope.ablate.edits import KINDS
from qkscope.ablate.needle import require_room
from qkscope.ablate.outcomes import FEWEST_DOCUMENTS
from qkscope.documents.tokens import group_of
from qkscope.errors import InputError, located
from qkscope.lenses.registry import registered
from qkscope.lenses.views import build_tables
from qkscope.results.environment import numeric_versions
from qkscope.results.folder import moments_path
from qkscope.results.read import load_results
from qkscope.run.plan import CheckpointPlan, Plan, Shard
from qkscope.text import counted

SCHEMA = 2
UNCHANGING = tuple(name for name, kind in KINDS.items() if kind.needs is None)  # they need no moments
UNITS = 32  # of a shard: about half a minute of one core for a small model


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
    attention: bool = False  # also measure where edited heads look

    def __post_init__(self) -> None:
        for edit in self.edits:
            if edit not in KINDS:
                raise InputError(f"{edit!r} is not an edit; the edits are {', '.join(KINDS)}")
        if not self.edits:
            raise InputError("an ablation needs at least one edit")
        if self.documents < 1:
            raise InputError("an ablation needs at least one document")
        for depth in self.needle:
            if not 0 <= depth <= 1:
                raise InputError(f"a needle's depth is from 0 (the document's start) to 1 (its end), not {depth:g}")

    @property
    def measured(self) -> dict[str, Any]:
        """What the outcomes of one document under one edit depend on, beside the edit."""
        names = ("run", "parts", "seed", "needle", "attention")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, stored: Any) -> AblationSettings:
        """The settings that a file claims; InputError, ValueError or TypeError where they are none."""
        if not isinstance(stored, Mapping) or not isinstance(stored.get("heads"), Mapping):
            raise ValueError("an ablation's settings should have heads")
        choice: dict[str, Any] = {name: _frozen(value) for name, value in stored["heads"].items()}
        plain: dict[str, Any] = {name: _frozen(value) for name, value in stored.items() if name != "heads"}
        settings = cls(**plain, heads=HeadChoice(**choice))
        if json.dumps(asdict(settings)) != json.dumps(asdict(replace(settings, **_typed(settings)))):
            raise ValueError("an ablation's settings should be numbers and words")
        return settings


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _typed(settings: AblationSettings) -> dict[str, Any]:
    """The numbers of settings as numbers; raises where they are none."""
    return {name: int(getattr(settings, name)) for name in ("documents", "run", "parts", "seed")}


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
        order = sorted(self.documents, key=lambda document: (group_of(document, groups), document))
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
        return {
            "schema": SCHEMA,
            "moments": self.plan.fingerprint(),
            "tokens": self.tokens,
            "settings": self.settings.measured,
            "versions": numeric_versions(),
        }


def known_heads(folder: Path, *, ablated: bool = True) -> pd.DataFrame:
    """All that is known of each head, from which a request chooses; without what earlier ablations found, if asked."""
    lenses = [lens for lens in registered() if ablated or lens.name != "ablation"]
    return build_tables(load_results(folder), lenses).own.heads


def plan_ablation(
    plan: Plan, folder: Path, settings: AblationSettings, heads: pd.DataFrame
) -> list[CheckpointAblation]:
    """The work at each checkpoint; whatever can be wrong with it is said before a model is loaded."""
    unknown = sorted(set(settings.only) - {each.checkpoint.name for each in plan.checkpoints})
    if unknown:
        raise InputError(f"there is no checkpoint {unknown[0]!r} in this study")
    works = []
    for each in plan.checkpoints:
        name = each.checkpoint.name
        if settings.only and name not in settings.only:
            continue
        with located(f"checkpoint {name!r}"):
            rows = heads[heads["model"] == name].reset_index(drop=True)
            if rows.empty or not moments_path(folder, name).is_file():
                raise InputError(f"it has no moments and tables in {folder} yet; `qkscope run` makes them")
            units = tuple(units_of(settings.heads, rows))
            tokens = min(settings.tokens or each.context, each.context)
            work = CheckpointAblation(each, units, spread_documents(each, settings.documents), tokens, settings)
            _require_possible(work)
            works.append(work)
    return works


def _require_possible(work: CheckpointAblation) -> None:
    """Refuse what a checkpoint's moments, documents or tokens cannot give."""
    plan, settings = work.plan, work.settings
    changing = [edit for edit in settings.edits if KINDS[edit].needs is not None]
    if plan.study.stage != "post_rope" and changing:
        raise InputError(
            f"the edit {changing[0]} needs queries and keys as the kernel gets them, but this study's are from before "
            f"rotation (stage: {plan.study.stage}); run a study without `stage`, or use {' or '.join(UNCHANGING)}"
        )
    if len(work.documents) < FEWEST_DOCUMENTS:
        raise InputError(
            f"{counted(len(work.documents), 'document')} are too few for an error: an ablation needs at least "
            f"{FEWEST_DOCUMENTS}"
        )
    if work.tokens < 2:
        raise InputError(f"a loss needs at least two tokens, not {work.tokens}")
    if settings.needle:
        require_room(plan.tokenizer, work.tokens, settings.seed)


def spread_documents(plan: CheckpointPlan, count: int) -> tuple[int, ...]:
    """The first documents of each group in turn, so that all groups have about as many."""
    by_group: dict[int, list[int]] = {}
    for document in plan.documents:
        by_group.setdefault(group_of(document, plan.layout.groups), []).append(document)
    turns = [
        document
        for turn in range(max(map(len, by_group.values()), default=0))
        for _, documents in sorted(by_group.items())
        for document in documents[turn : turn + 1]
    ]
    return tuple(sorted(turns[:count]))


def heads_of(units: Sequence[Unit]) -> list[tuple[int, int]]:
    """All heads of some units, each once, in order."""
    return sorted({head for unit in units for head in unit.heads})
