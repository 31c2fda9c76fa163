"""Entries that are one network under two names: their projections to queries and keys are the same tensors.

A model with a vision tower, a renamed copy or an adapter that leaves attention alone has the text weights of another.
Counted as two models, they make everything look more certain than it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qkscope.results.provenance import CheckpointRecord

MANY = 0.5  # of the projections of the smaller model; less may be a layer that was never trained


def shared_attention(records: Sequence[CheckpointRecord]) -> list[str]:
    """A sentence for each pair of entries that share at least half of their projections to queries and keys."""
    known = [(record.name or "?", set(record.attention_hashes or ())) for record in records]
    said = []
    for (one, first), (other, second) in itertools.combinations([each for each in known if each[1]], 2):
        shared, fewest = len(first & second), min(len(first), len(second))
        if shared >= MANY * fewest:
            said.append(
                f"{one!r} and {other!r} share {shared} of {fewest} projections to queries and keys, number for number: "
                "they are not two independent entries, and count as one in any comparison over entries"
            )
    return said
