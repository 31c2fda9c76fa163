"""Measure edits on documents, with a model in memory: one document, one edit, some units at a time.

What a head's queries and keys are on average comes from the checkpoint's moments without the document group that the
document belongs to, so no document has a part in its own edit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkscope.ablate.choice import Head, Unit
from qkscope.ablate.edits import HeadEdit, edits_of
from qkscope.ablate.needle import needle_of, plant
from qkscope.ablate.outcomes import DISTANCE, ENTROPY, needle_outcome, outcomes_of
from qkscope.ablate.work import AblationSettings, heads_of
from qkscope.errors import InputError
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.moments import Moments

if TYPE_CHECKING:
    from qkscope.ablate.passes import Ablation, Losses

OutcomeRows = list[list[Any]]  # [unit, outcome, before, delta]


class EditSource:
    """The edits of heads, from moments without one document group."""

    def __init__(self, moments: Moments, tokens: int, seed: int) -> None:
        self._moments, self._tokens, self._seed = moments, tokens, seed
        self._heads: dict[int, tuple[int, ...]] = {}
        self._room = 1
        self._made: dict[tuple[str, int, int], dict[int, HeadEdit]] = {}

    def need(self, units: Sequence[Unit]) -> None:
        """Edits of these units will be asked for: those of one layer are made together."""
        heads: dict[int, list[int]] = {}
        for layer, head in heads_of(units):
            heads.setdefault(layer, []).append(head)
        wanted = {layer: tuple(of) for layer, of in heads.items()}
        if wanted != self._heads:
            self._heads, self._made = wanted, {}
            # What one unit needs at once is kept; edits of long documents are large.
            self._room = max(len({layer for layer, _ in unit.heads}) for unit in units)

    def of(self, edit: str, heads: Sequence[Head], group: int) -> dict[int, dict[int, HeadEdit]]:
        """By layer and head, for a document of this group."""
        by_layer: dict[int, dict[int, HeadEdit]] = {}
        for layer, head in heads:
            by_layer.setdefault(layer, {})[head] = self._of_layer(edit, layer, group)[head]
        return by_layer

    def _of_layer(self, edit: str, layer: int, group: int) -> dict[int, HeadEdit]:
        key = (edit, layer, group)
        if key not in self._made:
            while len(self._made) >= self._room:
                del self._made[next(iter(self._made))]
            sums = self._without(layer, self._heads[layer], group)
            self._made[key] = edits_of(edit, sums, self._tokens, self._seed)
        return self._made[key]

    def _without(self, layer: int, heads: Sequence[int], group: int) -> LayerSums:
        whole = layer_sums(self._moments, layer, heads)
        if whole.leave_out is None:
            raise InputError(
                f"layer {layer}: an edit is taken from other documents than it is measured on, but these moments "
                f"cannot leave out a document group ({whole.replication.reason}); capture more documents or `groups`"
            )
        return whole.without(group) if group in whole.replication.groups else whole


@dataclass(frozen=True)
class AblatedText:
    """Token ids of a document (of a group), or of one with a needle at a depth whose answer has so many tokens."""

    document: int
    group: int
    ids: NDArray[np.int64]
    depth: float | None = None
    answer: int = 0


class Measurer:
    """Takes up one text after the other; the pass without edits is made once for all edits that follow each other."""

    def __init__(self, ablation: Ablation, source: EditSource, settings: AblationSettings, tokenizer: Any) -> None:
        self._ablation, self._source, self._settings = ablation, source, settings
        self._tokenizer = tokenizer
        self._open: tuple[int, float | None, tuple[Head, ...]] | None = None
        self._before: Losses = np.empty(0)
        self._looked: dict[Head, Any] = {}
        self._refused: dict[int, str] | None = None  # layers that cannot be edited, once they were looked at

    def measure(self, text: AblatedText, edit: str, units: Sequence[Unit]) -> OutcomeRows:
        """What the edit does to a document, unit by unit."""
        self._require_editable(text.ids, units)
        self._source.need(units)
        rows = []
        for variant in (text, *self._with_needles(text)):
            self._begin(variant, units)
            for unit in units:
                rows += [[unit.name, *outcome] for outcome in self._outcomes(variant, edit, unit)]
        return rows

    def _with_needles(self, text: AblatedText) -> Iterator[AblatedText]:
        for depth in self._settings.needle:
            needle = needle_of(self._tokenizer, text.document, self._settings.seed)
            yield AblatedText(text.document, text.group, plant(text.ids, needle, depth), depth, len(needle.answer))

    def _begin(self, text: AblatedText, units: Sequence[Unit]) -> None:
        watched = tuple(heads_of(units)) if self._settings.attention and text.depth is None else ()
        if self._open != (text.document, text.depth, watched):
            self._open = None
            self._before = self._ablation.begin(text.ids, watched)
            self._looked = dict(self._ablation.attention)
            self._open = (text.document, text.depth, watched)

    def _outcomes(self, text: AblatedText, edit: str, unit: Unit) -> Iterator[tuple[str, float, float]]:
        from qkscope.ablate.passes import repeats

        plain = text.depth is None
        watched = unit.heads if self._settings.attention and plain else ()
        after = self._ablation.edited(self._source.of(edit, unit.heads, text.group), watched)
        if text.depth is not None:
            yield needle_outcome(self._before, after, text.depth, text.answer)
            return
        repeated = repeats(text.ids, self._settings.run)
        outcomes = outcomes_of(self._before, after, repeated, self._settings.parts)
        yield from ((name, before, delta) for name, (before, delta) in outcomes.items())
        if watched:
            yield from self._attention(watched)

    def _attention(self, heads: Sequence[Head]) -> Iterator[tuple[str, float, float]]:
        """Means over the unit's heads."""
        for name, of in ((ENTROPY, "entropy"), (DISTANCE, "distance")):
            before = float(np.mean([getattr(self._looked[head], of) for head in heads]))
            after = float(np.mean([getattr(self._ablation.attention[head], of) for head in heads]))
            yield name, before, after - before

    def _require_editable(self, ids: NDArray[np.int64], units: Sequence[Unit]) -> None:
        """Refuse layers whose kernel does more than scale, mask and softmax; the first document shows all of them."""
        if self._refused is None:
            self._refused = self._ablation.check(ids)
        for layer in sorted({layer for layer, _ in heads_of(units)}):
            if layer in self._refused:
                raise InputError(self._refused[layer])
