"""A needle in a document: a sentence with a random number, planted somewhere and asked for at the end.

The document is shortened so that everything together has as many tokens as the document had. The sentence that is
planted and the one that asks have the same token ids, whatever the tokenizer, so that a model which finds the first can
copy its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import InputError

THINGS = ("harbour", "orchard", "library", "windmill", "lighthouse", "bakery", "station", "garden")
LEAST_ROOM = 2  # a document has at least so many times the tokens of its needle


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
