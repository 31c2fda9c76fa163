"""Which entries are spoken of and drawn one by one, and how a sentence says where it is.

A training run ends with its last checkpoint, which stands for it. In a list of seeds or models the last is no more than
that, so each is named. A checkpoint is a moment, *at* which something is so; a seed or model is a thing, *in* which it
is.
"""

from __future__ import annotations

from qkscope.results.entries import Entries, Entry
from qkscope.words.phrases import label

NAMED_AT_MOST = 6  # seeds or models that are named one by one


def named_entries(study: Entries) -> tuple[Entry, ...]:
    """The last checkpoint of a run; of seeds and models the first six."""
    return study.checkpoints[-1:] if study.one_run else study.checkpoints[:NAMED_AT_MOST]


def at_or_in(study: Entries) -> str:
    """The word before an entry, or before a number of them."""
    return "at" if study.one_run else "in"


def place(study: Entries, entry: Entry) -> str:
    """`at S1-40K` of a run, `in Gemma` of models."""
    return f"{at_or_in(study)} {label(entry)}"
