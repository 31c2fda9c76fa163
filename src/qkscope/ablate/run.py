"""Ablate the heads of a study's checkpoints: which heads, which edits, on which documents, and one table of it all.

What a head's queries and keys are on average comes from the checkpoint's moments without the document group that the
document belongs to, so no document has a part in its own edit. Each document's outcomes are written as they come; a run
that is stopped goes on with the next document.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.ablate.choice import Head, HeadChoice, Unit, units_of
from qkscope.ablate.edits import KINDS, HeadEdit, edits_of
from qkscope.ablate.outcomes import EVERY, outcomes_of, over_documents
from qkscope.documents.tokens import group_of
from qkscope.errors import InputError, located
from qkscope.files import write_text
from qkscope.foreign import Missing, Unreadable, parse_json, read_bytes
from qkscope.lenses.ablation.table import EDITS
from qkscope.lenses.at_window import build_tables
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.lenses.taxonomy.heads import heads_at
from qkscope.moments.moments import Moments
from qkscope.results.environment import numeric_versions
from qkscope.results.folder import ablation_folder, ablation_path, moments_path
from qkscope.results.read import load_results
from qkscope.run.plan import CheckpointPlan, Plan

if TYPE_CHECKING:
    from qkscope.ablate.passes import Ablation

SCHEMA = 1
MAX_PART = 64 * 2**20  # bytes of one document's outcomes


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
    seed: int = 0  # of shuffled distances

    def __post_init__(self) -> None:
        for edit in self.edits:
            if edit not in KINDS:
                raise InputError(f"{edit!r} is no edit; there is {', '.join(KINDS)}")
        if self.documents < 1:
            raise InputError("an ablation needs at least one document")


@dataclass(frozen=True)
class CheckpointAblation:
    """One checkpoint's work."""

    plan: CheckpointPlan
    units: tuple[Unit, ...]
    documents: tuple[int, ...]
    tokens: int
    settings: AblationSettings

    @property
    def passes(self) -> int:
        """Forward passes of a document of this checkpoint, at most: those of late layers are shorter."""
        return len(self.documents) * (1 + len(self.units) * len(self.settings.edits))

    def fingerprint(self, document: int) -> str:
        """Everything that a document's outcomes depend on."""
        facts = {
            "schema": SCHEMA,
            "moments": self.plan.fingerprint(),
            "document": document,
            "tokens": self.tokens,
            "units": [[unit.name, unit.heads] for unit in self.units],
            "settings": {**asdict(self.settings), "documents": None, "heads": None, "only": None},
            "versions": numeric_versions(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def plan_ablation(plan: Plan, folder: Path, settings: AblationSettings) -> list[CheckpointAblation]:
    """The work at each checkpoint; whatever can be wrong with it is said before a model is loaded."""
    unknown = sorted(set(settings.only) - {each.checkpoint.name for each in plan.checkpoints})
    if unknown:
        raise InputError(f"there is no checkpoint {unknown[0]!r} in this study")
    heads = heads_at(build_tables(load_results(folder)).own)
    found = []
    for each in plan.checkpoints:
        name = each.checkpoint.name
        if settings.only and name not in settings.only:
            continue
        with located(f"checkpoint {name!r}"):
            rows = heads[heads["model"] == name].reset_index(drop=True)
            if rows.empty or not moments_path(folder, name).is_file():
                raise InputError(f"it has no moments and tables in {folder} yet; `qkscope run` makes them")
            documents = _spread(each, settings.documents)
            tokens = min(settings.tokens or each.context, each.context)
            if tokens < 2:
                raise InputError(f"a loss needs at least two tokens, not {tokens}")
            units = tuple(units_of(settings.heads, rows))
            found.append(CheckpointAblation(each, units, documents, tokens, settings))
    return found


def _spread(plan: CheckpointPlan, count: int) -> tuple[int, ...]:
    """The first documents of each group in turn, so that all groups have about as many."""
    groups = plan.study.groups
    by_group: dict[int, list[int]] = {}
    for document in plan.documents:
        by_group.setdefault(group_of(document, groups), []).append(document)
    turns = [
        document
        for turn in range(max(map(len, by_group.values()), default=0))
        for _, documents in sorted(by_group.items())
        for document in documents[turn : turn + 1]
    ]
    return tuple(sorted(turns[:count]))


class EditSource:
    """The edits of a checkpoint's heads, from its moments without one document group."""

    def __init__(self, moments: Moments, units: Sequence[Unit], tokens: int, seed: int) -> None:
        self._moments, self._tokens, self._seed = moments, tokens, seed
        self._heads: dict[int, set[int]] = {}
        for layer, head in (each for unit in units for each in unit.heads):
            self._heads.setdefault(layer, set()).add(head)
        # What one unit needs at once is kept; edits of long documents are large.
        self._room = max(len({layer for layer, _ in unit.heads}) for unit in units)
        self._made: dict[tuple[str, int, int], dict[int, HeadEdit]] = {}

    def of(self, edit: str, heads: Sequence[Head], group: int) -> dict[int, dict[int, HeadEdit]]:
        """By layer and head, for a document of this group."""
        found: dict[int, dict[int, HeadEdit]] = {}
        for layer, head in heads:
            found.setdefault(layer, {})[head] = self._of_layer(edit, layer, group)[head]
        return found

    def _of_layer(self, edit: str, layer: int, group: int) -> dict[int, HeadEdit]:
        key = (edit, layer, group)
        if key not in self._made:
            while len(self._made) >= self._room:
                del self._made[next(iter(self._made))]
            self._made[key] = edits_of(edit, self._without(layer, group), self._tokens, self._seed)
        return self._made[key]

    def _without(self, layer: int, group: int) -> LayerSums:
        whole = layer_sums(self._moments, layer, sorted(self._heads[layer]))
        if whole.leave_out is None:
            raise InputError(
                f"layer {layer}: an edit comes from other documents than it is measured on, but moments cannot be had "
                f"without a document group: {whole.replication.reason}; capture more documents, or more `groups`"
            )
        return whole.without(group) if group in whole.replication.groups else whole


def ablate_documents(
    work: CheckpointAblation, model: Any, moments: Moments, folder: Path, advanced: Callable[[int, float], None]
) -> None:
    """Measure what is not on disk yet, document by document; `advanced` hears of each: (document, seconds)."""
    from qkscope.ablate.passes import Ablation

    left = [document for document in work.documents if _kept(folder, work, document) is None]
    if not left:
        return
    source = EditSource(moments, work.units, work.tokens, work.settings.seed)
    # Documents of one group follow each other: their edits are the same.
    left.sort(key=lambda document: (group_of(document, work.plan.study.groups), document))
    ablation_folder(folder, work.plan.checkpoint.name).mkdir(parents=True, exist_ok=True)
    with Ablation(model) as ablation:
        for number, window in enumerate(_windows(work, left)):
            begun = time.perf_counter()
            if number == 0:
                _require_editable(ablation, work, window[1])
            rows = _measure(ablation, work, source, *window)
            part = {"fingerprint": work.fingerprint(window[0]), "document": window[0], "rows": rows}
            write_text(ablation_path(folder, work.plan.checkpoint.name, window[0]), json.dumps(part))
            advanced(window[0], time.perf_counter() - begun)


def _windows(work: CheckpointAblation, documents: Sequence[int]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    for document in documents:  # one by one: a corpus hands them out in its own order
        for window in work.plan.corpus.windows(work.plan.tokenizer, work.plan.context, [document]):
            yield window.index, np.asarray(window.ids[: work.tokens], dtype=np.int64)


def _require_editable(ablation: Ablation, work: CheckpointAblation, ids: NDArray[np.int64]) -> None:
    refused = ablation.check(ids)
    for layer in sorted({layer for unit in work.units for layer, _ in unit.heads}):
        if layer in refused:
            raise InputError(refused[layer])


def _measure(
    ablation: Ablation, work: CheckpointAblation, source: EditSource, document: int, ids: NDArray[np.int64]
) -> list[list[Any]]:
    """[edit, unit, outcome, loss, delta] of a document."""
    from qkscope.ablate.passes import repeats

    before, repeated = ablation.begin(ids), repeats(ids, work.settings.run)
    group, rows = group_of(document, work.plan.study.groups), []
    for edit in work.settings.edits:
        for unit in work.units:
            after = ablation.edited(source.of(edit, unit.heads, group))
            found = outcomes_of(before, after, repeated, work.settings.parts)
            rows += [[edit, unit.name, outcome, loss, delta] for outcome, (loss, delta) in found.items()]
    return rows


def _kept(folder: Path, work: CheckpointAblation, document: int) -> list[list[Any]] | None:
    """A document's outcomes from an earlier run, if they are of the same work."""
    try:
        part = parse_json(read_bytes(ablation_path(folder, work.plan.checkpoint.name, document), MAX_PART))
    except (Missing, Unreadable):
        return None
    rows = part.get("rows")
    return rows if part.get("fingerprint") == work.fingerprint(document) and isinstance(rows, list) else None


def document_rows(works: Sequence[CheckpointAblation], folder: Path) -> pd.DataFrame:
    """One row per checkpoint, document, edit, unit and outcome, of all documents that are done."""
    rows: list[Mapping[str, Any]] = []
    for work in works:
        units = {unit.name: unit for unit in work.units}
        for document in work.documents:
            for edit, unit, outcome, loss, delta in _kept(folder, work, document) or []:
                rows.append(
                    {
                        **_about(units[unit]),
                        "model": work.plan.checkpoint.name,
                        "document": document,
                        "edit": edit,
                        "outcome": outcome,
                        "loss": loss,
                        "delta": delta,
                    }
                )
    return pd.DataFrame(rows)


def heads_table(works: Sequence[CheckpointAblation], table: pd.DataFrame) -> pd.DataFrame | None:
    """`ablation_heads.csv`: a row per head that was edited alone, a column and its error per edit; None without any."""
    alone = table[(table["role"] == "head") & (table["outcome"] == EVERY)]
    if alone.empty:
        return None
    wide = alone.set_index(["model", "layer", "head", "edit"])[["delta", "delta_se"]].unstack("edit")  # noqa: PD010
    found = wide.index.to_frame(index=False)
    context = {work.plan.checkpoint.name: work.plan.context for work in works}
    found["window"] = found["model"].map(context)
    for edit in EDITS:
        for name, of in ((f"loss_{edit}", "delta"), (f"loss_{edit}_se", "delta_se")):
            found[name] = wide[of, edit].to_numpy(float) if (of, edit) in wide.columns else np.nan
    order = {work.plan.checkpoint.name: place for place, work in enumerate(works)}
    return found.sort_values("model", key=lambda names: names.map(order), kind="stable").reset_index(drop=True)


def _about(unit: Unit) -> dict[str, Any]:
    """Which heads a unit has; a layer and a head where it is one."""
    layer, head = unit.heads[0] if unit.role == "head" else (np.nan, np.nan)
    return {"unit": unit.name, "role": unit.role, "layer": layer, "head": head, "heads": len(unit.heads)}


def ablation_table(works: Sequence[CheckpointAblation], folder: Path) -> pd.DataFrame:
    """`ablation.csv`: means over documents with their errors."""
    table = over_documents(document_rows(works, folder))
    for name in ("layer", "head"):
        table[name] = table[name].astype("Int64")
    return table
