"""What is done to a head's scores, and to documents: each edit takes one thing away and leaves the rest.

A head's score of key j for query i is q_i.k_j. What the head's queries and keys are on average at each position comes
from moments of other documents than those an edit is measured on. `lenses/ablation.py` says in words what each
edit takes away.

A needle is a sentence with a random number, planted somewhere in a document and asked for at its end. The document is
shortened so that everything together has as many tokens as before. The planted and the asking sentence have the same
token ids, whatever the tokenizer, so that a model which finds the first can copy its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import InputError
from qkscope.lenses.rotated_moments import rotated_mean
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.moments import Moments
from qkscope.moments.second_moments import Statistics

Array = NDArray[np.float64]
THINGS = ("harbour", "orchard", "library", "windmill", "lighthouse", "bakery", "station", "garden")
LEAST_ROOM = 2  # a document has at least so many times the tokens of its needle


@dataclass(frozen=True)
class HeadEdit:
    """A change of one head's scores, for positions 0 … tokens - 1. An edit with nothing in it changes nothing.

    Scores become (q_i - query_shift_i).(k_j - key_shift_j) - mean_query_i.mean_key_j + by_distance[i - j].
    """

    query_shift: Array | None = None  # (tokens, d)
    key_shift: Array | None = None  # (tokens, d)
    mean_pair: tuple[Array, Array] | None = None  # (tokens, d) each
    by_distance: Array | None = None  # (tokens,)
    zero_output: bool = False  # the head puts out zeros


def edits_of(name: str, sums: LayerSums, tokens: int, seed: int = 0) -> dict[int, HeadEdit]:
    """The edit of that name for each head of `sums`; InputError where the sums do not carry it."""
    return dict(zip(sums.heads, maker_of(name)(sums, tokens, seed), strict=True))


# -- mean queries and keys at every position ----------------------------------------------------------------


def rotated_means(sums: LayerSums, tokens: int) -> tuple[list[Array], list[Array]]:
    """What RoPE makes of each query head's mean query and mean key: (tokens, d) for each head."""
    facts = sums.facts
    if sums.q_before is None or sums.k_before is None or (facts.rotary != "nope" and facts.rotation is None):
        raise InputError(
            f"layer {facts.layer}: these moments have no sums from before rotation (it could not be measured, "
            "or the file is of an earlier version); capture again, or use the edit kernel_measured"
        )
    rotation = facts.rotation if facts.rotary != "nope" else None
    queries = [rotated_mean(mean, rotation, tokens) for mean in sums.q_before.mean]
    keys = [rotated_mean(mean, rotation, tokens) for mean in sums.k_before.mean]
    return queries, [keys[which] for which in sums.distinct_keys[1]]


def measured_means(of: Statistics, edges: tuple[int, ...], tokens: int) -> Array:
    """(heads, tokens, d): each position's mean as its bucket's line has it; beyond the last bucket, that one's."""
    t = np.arange(tokens)
    bucket = np.clip(np.searchsorted(edges, t, side="right") - 1, 0, len(edges) - 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = np.where(of.var_t[..., None] > 0, of.cov_xt / of.var_t[..., None], 0.0)
    return np.asarray(of.mean_x[:, bucket] + (t - of.mean_t[:, bucket])[..., None] * slope[:, bucket])


def head_kernels(sums: LayerSums, tokens: int) -> list[Array]:
    """Each head's mean score by distance, 0 … tokens - 1: its mean query at a position with its mean key at 0.

    RoPE makes it a function of the distance alone.
    """
    return [np.asarray(query @ key[0]) for query, key in zip(*rotated_means(sums, tokens), strict=True)]


def kernel_spreads(moments: Moments, heads: Sequence[tuple[int, int]], tokens: int) -> dict[tuple[int, int], float]:
    """By (layer, head): the standard deviation of the scaled kernel over the distances of a document.

    That is what the edit `kernel` takes away: its dose. Heads without sums from before rotation are left out.
    """
    spreads: dict[tuple[int, int], float] = {}
    for layer in sorted({layer for layer, _ in heads}):
        sums = layer_sums(moments, layer, [head for of, head in heads if of == layer])
        try:
            kernels = head_kernels(sums, tokens)
        except InputError:
            continue
        if sums.facts.score_scale is not None:
            for head, kernel in zip(sums.heads, kernels, strict=True):
                spreads[layer, head] = float(sums.facts.score_scale * kernel.std())
    return spreads


# -- the edits: (sums of a layer, tokens, seed) -> one edit for each of sums.heads -----------------------------


def _kernel_measured(sums: LayerSums, tokens: int, _seed: int) -> list[HeadEdit]:
    queries, keys = (measured_means(of, sums.edges, tokens) for of in (sums.q_buckets, sums.k_buckets))
    return [HeadEdit(mean_pair=(q, keys[which])) for q, which in zip(queries, sums.distinct_keys[1], strict=True)]


def _shuffle(sums: LayerSums, tokens: int, seed: int) -> list[HeadEdit]:
    """Every head has its own order of distances, which does not depend on what other heads are edited."""
    edits = []
    for head, kernel in zip(sums.heads, head_kernels(sums, tokens), strict=True):
        order = np.random.default_rng([seed, sums.facts.layer, head]).permutation(tokens)
        edits.append(HeadEdit(by_distance=kernel[order] - kernel))
    return edits


def _flatten(sums: LayerSums, tokens: int, _seed: int) -> list[HeadEdit]:
    """Along axis a, the direction of the joint drift of queries and keys with position (docs/lenses/rotation.md)."""
    share = (sums.q.n / (sums.q.n + sums.k.n))[:, None]
    between = share * (1 - share) * (sums.q.mean_t - sums.k.mean_t)[:, None] * (sums.q.mean_x - sums.k.mean_x)
    drift = share * sums.q.cov_xt + (1 - share) * sums.k.cov_xt + between
    with np.errstate(invalid="ignore", divide="ignore"):
        axis = drift / np.linalg.norm(drift, axis=1, keepdims=True)
    return _without_drift(sums, axis, tokens)


def _without_drift(sums: LayerSums, axes: Array, tokens: int) -> list[HeadEdit]:
    """Subtract the line of queries and keys over position along each head's axis: axes (heads, d)."""
    t = np.arange(tokens)
    shifts = []
    for of in (sums.q, sums.k):
        slope = np.einsum("hd,hd->h", axes, of.cov_xt) / of.var_t
        line = (t - of.mean_t[:, None]) * slope[:, None]  # (heads, tokens)
        shifts.append(np.nan_to_num(line[..., None] * axes[:, None]))
    return [HeadEdit(query_shift=q, key_shift=k) for q, k in zip(*shifts, strict=True)]


EditMaker = Callable[[LayerSums, int, int], list[HeadEdit]]
EDIT_MAKERS: Mapping[str, EditMaker] = {
    "kernel": lambda sums, tokens, _: [HeadEdit(by_distance=-kernel) for kernel in head_kernels(sums, tokens)],
    "kernel_measured": _kernel_measured,
    "key_mean": lambda sums, tokens, _: [HeadEdit(key_shift=mean) for mean in rotated_means(sums, tokens)[1]],
    "query_mean": lambda sums, tokens, _: [HeadEdit(query_shift=mean) for mean in rotated_means(sums, tokens)[0]],
    "flatten": _flatten,
    "flatten_pc0": lambda sums, tokens, _: _without_drift(sums, sums.principal.directions[:, :, 0], tokens),
    "shuffle": _shuffle,
    "zero": lambda sums, _tokens, _: [HeadEdit(zero_output=True)] * len(sums.heads),
    "nothing": lambda sums, _tokens, _: [HeadEdit()] * len(sums.heads),
}
WITHOUT_MOMENTS = ("zero", "nothing")  # the edits that are made of no sums


def maker_of(name: str) -> EditMaker:
    """What makes the edit of that name."""
    if name not in EDIT_MAKERS:
        raise InputError(f"{name!r} is not an edit; the edits are {', '.join(EDIT_MAKERS)}")
    return EDIT_MAKERS[name]


# -- a needle in a document ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needle:
    """The sentence that is planted, as token ids: statement, answer, end."""

    gap: tuple[int, ...]  # between the document and a sentence
    statement: tuple[int, ...]
    answer: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def planted(self) -> tuple[int, ...]:
        """What goes into the document."""
        return (*self.gap, *self.statement, *self.answer, *self.end, *self.gap)

    @property
    def asked(self) -> tuple[int, ...]:
        """What comes after the document, with the answer."""
        return (*self.gap, *self.statement, *self.answer)

    def require_room(self, tokens: int) -> None:
        """Refuse documents of so many tokens that they are too short for both sentences."""
        needed = len(self.planted) + len(self.asked)
        if tokens < LEAST_ROOM * needed:
            raise InputError(
                f"a needle and its question take {needed} tokens of this tokenizer, so documents need at least "
                f"{LEAST_ROOM * needed}, not {tokens}; give more tokens, or leave the needle out"
            )


def needle_of(tokenizer: Any, document: int, seed: int) -> Needle:
    """The needle of a document: the same for every edit, head and depth."""
    rng = np.random.default_rng([seed, document])
    thing, number = THINGS[int(rng.integers(len(THINGS)))], int(rng.integers(10_000, 100_000))

    def ids(text: str) -> tuple[int, ...]:
        return tuple(int(each) for each in tokenizer(text, add_special_tokens=False)["input_ids"])

    return Needle(ids("\n\n"), ids(f"The secret number of the {thing} is"), ids(f" {number}"), ids("."))


def plant(ids: NDArray[np.int64], needle: Needle, depth: float) -> NDArray[np.int64]:
    """A document (tokens,) with the needle at a depth (0: after the first token; 1: at its end) and the question."""
    needle.require_room(len(ids))
    room = len(ids) - len(needle.planted) - len(needle.asked)
    place = max(1, round(depth * room))
    parts = [ids[:place], needle.planted, ids[place:room], needle.asked]
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
