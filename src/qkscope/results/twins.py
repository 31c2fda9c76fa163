"""Entries that are one network under two names: their projections to queries and keys are the same tensors.

A model with a vision tower, a renamed copy or an adapter that leaves attention alone has the text weights of another.
Counted as two models, they make everything look more certain than it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qkscope.results.provenance import CheckpointRecord

MANY = 0.5  # of the projections of the smaller model; less may be a layer that was never trained


def same_networks(records: Sequence[CheckpointRecord]) -> list[tuple[str, str]]:
    """The names of each pair of entries that share at least half of their projections to queries and keys."""
    return [(one, other) for one, other, _, _ in _pairs(records)]


def shared_attention(records: Sequence[CheckpointRecord]) -> list[str]:
    """A sentence for each of these pairs."""
    return [
        f"{one!r} and {other!r} share {shared} of {fewest} projections to queries and keys, number for number: "
        "they are not two independent entries, and count as one in any comparison over entries"
        for one, other, shared, fewest in _pairs(records)
    ]


def _pairs(records: Sequence[CheckpointRecord]) -> list[tuple[str, str, int, int]]:
    """Pairs by name, with the projections that both have and those of the smaller one."""
    known = [(record.name or "?", set(record.attention_hashes or ())) for record in records]
    pairs = []
    for (one, first), (other, second) in itertools.combinations([each for each in known if each[1]], 2):
        shared, fewest = len(first & second), min(len(first), len(second))
        if shared >= MANY * fewest:
            pairs.append((one, other, shared, fewest))
    return pairs
