"""Which heads are edited together, and which others show what any heads would have done.

A unit is one head, or a group of heads that are edited at the same time. Controls are groups of other heads, drawn at
random, so that "these heads matter more" is a comparison: with as many heads in each layer as the chosen ones, or with
the same dose, which is how much the edit `kernel` removes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import numpy as np
import pandas as pd

from qkscope.errors import InputError

Head = tuple[int, int]  # layer, query head
NAME = re.compile(r"L(\d{1,5})H(\d{1,5})")
ALL = "all"
MOST_NAMED = 4  # heads that a label lists
NEAREST = 4  # heads of about a chosen head's dose, of which a control is drawn: fewer and all draws are alike


@dataclass(frozen=True)
class Unit:
    """Heads that are edited at the same time."""

    name: str
    role: Literal["head", "chosen", "control"]
    heads: tuple[Head, ...]
    group: str = ""  # of chosen heads and their controls: what the choice is called


@dataclass(frozen=True)
class HeadChoice:
    """What the user asks for: names, a category, or the top n by a column; alone or together."""

    names: tuple[str, ...] = ()  # L5H3, …, a category, or `all`
    top: int | None = None
    by: str = "r_q"  # a column of heads.csv
    together: bool = False  # edit them as one group, against controls
    controls: int = 4  # groups drawn at random
    seed: int = 0
    match_dose: bool = False  # controls have the chosen heads' dose; otherwise as many heads in each layer

    @property
    def label(self) -> str:
        """The choice in words, short enough for a table."""
        top = "" if self.top is None else f"top {self.top} by {self.by}"
        names = " ".join(self.names) if len(self.names) <= MOST_NAMED else f"{len(self.names)} heads"
        label = " of ".join(part for part in (top, names) if part) or ALL
        return f"{label}, dose-matched" if self.match_dose else label


def head_name(head: Head) -> str:
    """`L5H3`."""
    return f"L{head[0]}H{head[1]}"


def units_of(choice: HeadChoice, heads: pd.DataFrame, doses: Mapping[Head, float] | None = None) -> list[Unit]:
    """The units of one checkpoint, from its rows of heads.csv; `doses` are of all heads that can be matched by them."""
    chosen = resolve_heads(choice, heads)
    if not choice.together:
        return [Unit(head_name(head), "head", (head,)) for head in chosen]
    if choice.match_dose:
        drawn = dose_matched_controls(chosen, doses or {}, choice.controls, choice.seed)
    else:
        drawn = matched_controls(chosen, _listed(heads), choice.controls, choice.seed)
    label = choice.label
    controls = [Unit(f"{label}: control {number}", "control", of, label) for number, of in enumerate(drawn, start=1)]
    return [Unit(label, "chosen", tuple(chosen), label), *controls]


def resolve_heads(choice: HeadChoice, heads: pd.DataFrame) -> list[Head]:
    """The heads that are asked for, by layer and head; an unknown one is refused with what there is."""
    named = {head for name in choice.names or (ALL,) for head in _named(name, heads)}
    if choice.top is not None:
        by, rows = choice.by, heads[[head in named for head in _listed(heads)]]
        if by not in rows.columns or not pd.api.types.is_numeric_dtype(rows[by].dtype):
            near = get_close_matches(by, [str(name) for name in rows.columns], 3)
            meant = f"; is it {' or '.join(near)}?" if near else ""
            raise InputError(f"heads.csv has no numeric column {by!r}{meant}")
        largest = rows[by].abs().dropna().sort_values(ascending=False, kind="stable").index[: choice.top]
        named = set(_listed(rows.loc[largest]))
    if not named:
        raise InputError(f"no head is {' or '.join(choice.names)}: there is nothing to edit")
    return sorted(named)


def _listed(heads: pd.DataFrame) -> list[Head]:
    """Layer and head of each row."""
    return [(int(layer), int(head)) for layer, head in zip(heads["layer"], heads["head"], strict=True)]


def _named(name: str, heads: pd.DataFrame) -> list[Head]:
    """The heads that one name stands for."""
    everyone = _listed(heads)
    if name == ALL:
        return everyone
    if written := NAME.fullmatch(name):
        head = (int(written[1]), int(written[2]))
        if head not in everyone:
            first, last = head_name(min(everyone)), head_name(max(everyone))
            raise InputError(f"there is no head {name}; heads go from {first} to {last}")
        return [head]
    categories = sorted(set(heads["category"].dropna())) if "category" in heads.columns else []
    if name not in categories:
        raise InputError(
            f"{name!r} is neither a head (L5H3), nor `all`, nor a category that occurs here: {', '.join(categories)}"
        )
    return _listed(heads[heads["category"] == name])


def matched_controls(chosen: Sequence[Head], everyone: Sequence[Head], draws: int, seed: int) -> list[tuple[Head, ...]]:
    """Groups of other heads with as many in each layer; where a layer has too few others, the rest is of its own.

    The same seed gives the same groups, whatever else is asked for.
    """
    others = sorted(set(everyone) - set(chosen))
    groups = []
    for draw in range(draws):
        group: list[Head] = []
        for layer, count in sorted(Counter(layer for layer, _ in chosen).items()):
            rng = np.random.default_rng([seed, draw, layer])
            order: list[Head] = []
            for pool in (others, sorted(chosen)):
                there = [head for head in pool if head[0] == layer]
                order += [there[i] for i in rng.permutation(len(there))]
            group += order[:count]
        groups.append(tuple(sorted(group)))
    return groups


def dose_matched_controls(
    chosen: Sequence[Head], doses: Mapping[Head, float], draws: int, seed: int
) -> list[tuple[Head, ...]]:
    """Groups of other heads of any layer, one for each chosen head: drawn from the NEAREST in dose that are left.

    Heads with large doses have few others like them, so they are matched first. How well a group is matched is in the
    tables (`chosen_dose`, `controls_dose`).
    """
    without = [head for head in chosen if head not in doses]
    others = sorted(set(doses) - set(chosen))
    if without:
        raise InputError(
            f"the dose of {head_name(without[0])} is not known, because there are no sums from before its rotation; "
            "choose other heads, or leave out --match-dose"
        )
    if len(others) < len(chosen):
        raise InputError(
            f"{len(chosen)} heads cannot be compared with as many others: only {len(others)} others have a known dose; "
            "choose fewer, or leave out --match-dose"
        )
    groups = []
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        left, group = list(others), []
        for head in sorted(chosen, key=lambda each: (-doses[each], each)):
            near = sorted(left, key=lambda each: (abs(doses[each] - doses[head]), each))[:NEAREST]
            group.append(near[int(rng.integers(len(near)))])
            left.remove(group[-1])
        groups.append(tuple(sorted(group)))
    return groups
