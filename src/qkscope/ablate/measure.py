"""Measure edits on documents, with a model in memory: one document, one edit, some units at a time.

What a head's queries and keys are on average comes from the checkpoint's moments without the document group that the
document belongs to, so no document has a part in its own edit. An outcome is the difference between two passes of the
same document, so what makes a document easy or hard cancels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkscope.ablate.edits import HeadEdit, edits_of, needle_of, plant
from qkscope.ablate.work import AblationSettings, Head, Unit, heads_of
from qkscope.errors import InputError
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.moments import Moments

if TYPE_CHECKING:
    from qkscope.ablate.passes import Attention, EditableModel, Losses

Outcome = tuple[str, float, float]  # name, value without the edit, rise
OutcomeRows = list[list[Any]]  # [unit, outcome, before, delta]


@dataclass(frozen=True)
class AblatedText:
    """A document to measure on, or one with a needle planted."""

    document: int
    group: int
    ids: NDArray[np.int64]  # (tokens,)
    depth: float | None = None  # of the needle, from 0 to 1
    answer: int = 0  # tokens of the needle's answer, at the document's end


class EditSource:
    """The edits of heads, from moments without one document group."""

    def __init__(self, moments: Moments, tokens: int, seed: int) -> None:
        self._moments, self._tokens, self._seed = moments, tokens, seed
        self._heads: dict[int, list[int]] = {}  # by layer, of which edits are made together
        self._most_layers = 1
        self._edits: dict[tuple[str, int, int], dict[int, HeadEdit]] = {}  # (edit, layer, group): head

    def need(self, units: Sequence[Unit]) -> None:
        """Edits of these units will be asked for: those of one layer are made together."""
        heads: dict[int, list[int]] = {}
        for layer, head in heads_of(units):
            heads.setdefault(layer, []).append(head)
        if heads != self._heads:
            self._heads, self._edits = heads, {}
            # Edits of long documents are large: only as many layers are kept as one unit needs at once.
            self._most_layers = max(len({layer for layer, _ in unit.heads}) for unit in units)

    def edits(self, name: str, heads: Sequence[Head], group: int) -> dict[int, dict[int, HeadEdit]]:
        """By layer and head, for a document of this group."""
        by_layer: dict[int, dict[int, HeadEdit]] = {}
        for layer, head in heads:
            key = (name, layer, group)
            if key not in self._edits:
                while len(self._edits) >= self._most_layers:
                    del self._edits[next(iter(self._edits))]
                self._edits[key] = edits_of(name, self._sums_without(layer, group), self._tokens, self._seed)
            by_layer.setdefault(layer, {})[head] = self._edits[key][head]
        return by_layer

    def _sums_without(self, layer: int, group: int) -> LayerSums:
        whole = layer_sums(self._moments, layer, self._heads[layer])
        if whole.replication.method == "none":
            raise InputError(
                f"layer {layer}: an edit is taken from other documents than it is measured on, but these moments "
                f"cannot leave out a document group ({whole.replication.reason}); capture more documents or `groups`"
            )
        return whole.without(group) if group in whole.replication.groups else whole


class Measurer:
    """Takes one text after the other; the pass without edits is made once for all edits that follow each other."""

    def __init__(self, model: EditableModel, source: EditSource, settings: AblationSettings, tokenizer: Any) -> None:
        self._model, self._source, self._settings, self._tokenizer = model, source, settings, tokenizer
        self._begun: tuple[int, float | None, tuple[Head, ...]] | None = None  # document, depth and watched heads
        self._before: Losses = np.empty(0)
        self._attention_before: dict[Head, Attention] = {}
        self._refused: dict[int, str] | None = None  # layers that cannot be edited, once they were checked

    def measure(self, text: AblatedText, edit: str, units: Sequence[Unit]) -> OutcomeRows:
        """What the edit does to a document, unit by unit."""
        self._require_editable(text.ids, units)
        self._source.need(units)
        texts = [text]
        for depth in self._settings.needle:
            needle = needle_of(self._tokenizer, text.document, self._settings.seed)
            planted = plant(text.ids, needle, depth)
            texts.append(AblatedText(text.document, text.group, planted, depth, len(needle.answer)))
        rows = []
        for variant in texts:
            watched = self._settings.attention and variant.depth is None
            self._begin(variant, tuple(heads_of(units)) if watched else ())
            for unit in units:
                outcomes = self._outcomes(variant, edit, unit.heads, unit.heads if watched else ())
                rows += [[unit.name, *outcome] for outcome in outcomes]
        return rows

    def _begin(self, text: AblatedText, watched: tuple[Head, ...]) -> None:
        """The pass without edits, unless it was the last that was made."""
        if self._begun != (text.document, text.depth, watched):
            self._begun = None
            self._before = self._model.begin(text.ids, watched)
            self._attention_before = dict(self._model.attention)
            self._begun = (text.document, text.depth, watched)

    def _outcomes(
        self, text: AblatedText, edit: str, heads: Sequence[Head], watched: Sequence[Head]
    ) -> Iterator[Outcome]:
        after = self._model.edited(self._source.edits(edit, heads, text.group), watched)
        if text.depth is not None:
            yield needle_outcome(self._before, after, text.depth, text.answer)
            return
        yield from loss_outcomes(self._before, after, repeats(text.ids, self._settings.run), self._settings.parts)
        for name in ("entropy", "distance") if watched else ():  # means over the heads
            before = float(np.mean([getattr(self._attention_before[head], name) for head in watched]))
            now = float(np.mean([getattr(self._model.attention[head], name) for head in watched]))
            yield f"attention {name}", before, now - before

    def _require_editable(self, ids: NDArray[np.int64], units: Sequence[Unit]) -> None:
        """Refuse layers whose kernel does more than scale, mask and softmax; the first document shows all of them."""
        if self._refused is None:
            self._refused = self._model.check(ids)
        for layer, _ in heads_of(units):
            if layer in self._refused:
                raise InputError(self._refused[layer])


# -- outcomes of one document ------------------------------------------------------------------------------


def loss_outcomes(before: Losses, after: Losses, repeated: NDArray[np.bool_], parts: int = 4) -> list[Outcome]:
    """Mean losses (predicted tokens,) before, and how much they rise: of all tokens, of those that repeat, by position.

    Outcomes that no token has are left out.
    """
    delta = after - before
    places: dict[str, slice | NDArray[np.bool_]] = {"all": slice(None), "repeated": repeated, "new": ~repeated}
    places.update(position_parts(len(before) + 1, parts))
    return [
        (name, float(before[place].mean()), float(delta[place].mean()))
        for name, place in places.items()
        if len(before[place])
    ]


def position_parts(tokens: int, parts: int) -> list[tuple[str, slice]]:
    """Equal parts of a document's predicted tokens (positions 1 … tokens - 1): (name, places in an array of losses)."""
    edges = [1 + round((tokens - 1) * i / parts) for i in range(parts + 1)]
    return [
        (f"positions {left} to {right - 1}", slice(left - 1, right - 1))
        for left, right in pairwise(edges)
        if right > left
    ]


def repeats(ids: NDArray[np.int64], length: int = 3) -> NDArray[np.bool_]:
    """Which tokens, of all but the first, end a run of `length` tokens that the document has had before."""
    tokens = [int(token) for token in ids]
    seen: set[tuple[int, ...]] = set()
    repeated = np.zeros(max(len(tokens) - 1, 0), dtype=bool)
    for end in range(length - 1, len(tokens)):
        run = tuple(tokens[end - length + 1 : end + 1])
        if end > 0:
            repeated[end - 1] = run in seen
        seen.add(run)
    return repeated


def needle_outcome(before: Losses, after: Losses, depth: float, answer: int) -> Outcome:
    """-ln of the probability of the last `answer` tokens, all together, and how much it rises."""
    unedited, edited = float(before[-answer:].sum()), float(after[-answer:].sum())
    return f"needle at {100 * depth:g} %", unedited, edited - unedited
