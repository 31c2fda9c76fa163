"""Cards of the profile and of the map."""

from __future__ import annotations

import numpy as np

from qkscope.lenses.card import Card, CardInput, opening
from qkscope.lenses.plasticity.profile_figure import MOST_MAPS, mean_map, mean_profile, shown_entries
from qkscope.lenses.plasticity.table import MAP_FILE, PROFILE_FILE
from qkscope.lenses.plasticity.words import ESTIMATOR, HELD_FIXED, MEANING, needs_for, too_few_buckets
from qkscope.text import counted
from qkscope.words.blocks import Block, bullet
from qkscope.words.phrases import label, listed, number, tokens


def profile_card(given: CardInput) -> Card:
    """Plasticity against the position of the query."""
    models = shown_entries(given.at)
    chosen = [entry for entry in given.checkpoints if entry.name in models]
    shows: list[Block | str] = [
        opening(
            given,
            f"{MEANING} Across: the position of the query. Thin lines are heads; thick lines their means, for each kind "
            f"of layer where there are several, with a band of ± 1 standard deviation over heads, for "
            f"{counted(len(chosen), given.noun)} of {len(given.checkpoints)}. Thin bars are the most that the standard "
            "error over documents of a mean can be (the mean of the heads' errors).",
        ),
        *(bullet(f"{label(entry)}: {_course(given, entry.name)}") for entry in chosen),
        too_few_buckets(given, "ap", needs_for("ap")),
        "The first points lack: queries of the first bucket have no earlier bucket. A profile that falls may do so "
        "because later queries have keys further apart before them: the figure on drops tells the two apart.",
        HELD_FIXED,
    ]
    takeaway = [f"{label(chosen[-1])}: {_course(given, chosen[-1].name)}"] if chosen else []
    headline = "Plasticity by Query Position" + (" at a Common Window" if given.at.common else "")
    steps = [("Selection", f"{listed([label(entry) for entry in chosen])}."), ESTIMATOR]
    return Card(headline, shows, PROFILE_FILE, steps, takeaway)


def _course(given: CardInput, model: str) -> str:
    """The ends of an entry's mean profile, and whether heads agree."""
    table = given.at.table(PROFILE_FILE)
    mean = mean_profile(table[table["model"] == model])
    first, last = mean.iloc[0], mean.iloc[-1]
    apart = last["ap"] - first["ap"]
    ends = (
        f"{number(first['ap'])} at position {first['position']:,.0f}, {number(last['ap'])} at {last['position']:,.0f}"
    )
    error = float(first["ap_se"] + last["ap_se"])  # at most
    if not abs(apart) > max(2 * error, 0.001):
        verdict = "no difference that surely exceeds its error" if error == error else "no error is known"
    else:
        verdict = "it falls" if apart < 0 else "it rises"
    spread = f"heads spread by ± {number(last['ap_std'])} at the end"
    return f"mean plasticity is {ends}: {verdict}; {spread}."


def map_card(given: CardInput) -> Card:
    """Plasticity against the distance between keys and to the query."""
    models = shown_entries(given.at, MOST_MAPS)
    chosen = [entry for entry in given.checkpoints if entry.name in models]
    shows: list[Block | str] = [
        opening(
            given,
            f"{MEANING} Across: the distance between the two keys; up: the distance from the point midway between them "
            "to the query. Colour is the mean over heads, on one scale from 0 to 1 in all panels. Keys that are far apart "
            "have their middle far behind the query, so a triangle stays empty. Hatched cells hold less than 0.03% of "
            "all pairs.",
        ),
        *(bullet(f"{label(entry)}: {_ends(given, entry.name)}") for entry in chosen),
        too_few_buckets(given, "ap", needs_for("ap")),
        "Each cell of each layer has its error over documents in the table; sentences here carry none.",
    ]
    takeaway = [f"{label(chosen[-1])}: {_ends(given, chosen[-1].name)}"] if chosen else []
    headline = "Plasticity by Distance of Keys and Query" + (" at a Common Window" if given.at.common else "")
    steps = [("Selection", f"{listed([label(entry) for entry in chosen])}."), ESTIMATOR]
    return Card(headline, shows, MAP_FILE, steps, takeaway, "cells of a sixteenth of the window")


def _ends(given: CardInput, model: str) -> str:
    """Near keys at both ends of their column, and keys half a window apart."""
    table = given.at.table(MAP_FILE)
    cells = mean_map(table[table["model"] == model]).dropna(subset="ap")
    near = cells[cells["key_distance"] == 0.0].sort_values("query_distance")
    half = given.at.window_of(model) / 2
    far = cells[(cells["key_distance"] >= half) & (cells["weight"] > 0)]
    said = (
        f"between keys of one bucket mean plasticity is {number(near['ap'].iloc[0])} next to the query and "
        f"{number(near['ap'].iloc[-1])} {tokens(near['query_distance'].iloc[-1])} away"
    )
    if len(far):
        average = float(np.average(far["ap"], weights=far["weight"]))
        said += f"; between keys at least {tokens(half)} apart it is {number(average)}"
    return f"{said}."
