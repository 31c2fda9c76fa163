"""Cards of the profile and of the map."""

from __future__ import annotations

import math

import numpy as np

from qkscope.lenses.card import Card, Subject, opening
from qkscope.lenses.plasticity.shown import MOST_MAPS, mean_map, mean_profile, shown_entries
from qkscope.lenses.plasticity.table import MAP_FILE, PROFILE_FILE
from qkscope.lenses.plasticity.words import ESTIMATOR, MEANING, held_fixed, too_few_buckets
from qkscope.results.read import Entry
from qkscope.stats.significance import is_significant
from qkscope.text import counted
from qkscope.words.blocks import Block, bullet
from qkscope.words.phrases import label, listed, number, tokens


def profile_card(subject: Subject) -> Card:
    """Plasticity against the position of the query."""
    chosen = _chosen(subject, shown_entries(subject.at))
    shows: list[Block | str] = [
        opening(
            subject,
            f"{MEANING} Across: the position of the query. Thin lines are heads; thick lines their means, for each "
            "kind of layer where there are several, with a band of ± 1 standard deviation over heads, for "
            f"{counted(len(chosen), subject.noun)} of {len(subject.checkpoints)}. Thin bars are the most that the "
            "standard error over documents of a mean can be: the mean of its heads' errors.",
        ),
        *(bullet(f"{label(entry)}: {_course(subject, entry.name)}") for entry in chosen),
        too_few_buckets(subject, "ap"),
        "Queries of the first bucket have no earlier bucket, so lines begin behind it. A profile may fall only because "
        "later queries have keys before them that lie further apart; the figure of drops tells the two apart.",
        held_fixed(subject),
    ]
    named = chosen[-1:] if subject.study.one_run else chosen
    takeaway = [f"{label(entry)}: {_course(subject, entry.name)}" for entry in named]
    headline = "Plasticity by Query Position"
    steps = [("Selection", f"{listed([label(entry) for entry in chosen])}."), ESTIMATOR]
    return Card(headline, shows, PROFILE_FILE, steps, takeaway)


def _chosen(subject: Subject, models: list[str]) -> list[Entry]:
    return [entry for entry in subject.checkpoints if entry.name in models]


def _course(subject: Subject, model: str) -> str:
    """The ends of an entry's mean profile, and how far heads are apart."""
    table = subject.at.table(PROFILE_FILE)
    mean = mean_profile(table[table["model"] == model])
    first, last = mean.iloc[0], mean.iloc[-1]
    apart, error = last["ap"] - first["ap"], float(first["ap_se"] + last["ap_se"])  # at most
    ends = " and ".join(f"{number(each['ap'])} at position {each['position']:,.0f}" for each in (first, last))
    if math.isnan(error):
        verdict = "no error is known"
    elif is_significant(apart, error, subject.at.freedom(model)) == 0:
        verdict = "that is no difference beyond what its error can be"
    else:
        verdict = "it falls" if apart < 0 else "it rises"
    return f"mean plasticity is {ends}: {verdict}. Heads spread by ± {number(last['ap_std'])} at the end."


def map_card(subject: Subject) -> Card:
    """Plasticity against the distance between keys and to the query."""
    chosen = _chosen(subject, shown_entries(subject.at, MOST_MAPS))
    shows: list[Block | str] = [
        opening(
            subject,
            f"{MEANING} Across: the distance between the two keys; up: the distance from the point midway between "
            "them to the query. Colour is the mean over heads, on one scale from 0 to 1 in all panels. Keys that are "
            "far apart have their middle far behind the query, so a triangle stays empty. Hatched cells hold less than "
            "0.03% of all pairs, as those with position 0 do; they have no colour.",
        ),
        *(bullet(f"{label(entry)}: {_ends(subject, entry.name)}") for entry in chosen),
        too_few_buckets(subject, "ap"),
        "Every cell of every layer has its error over documents in the table; the sentences above carry none.",
    ]
    named = chosen[-1:] if subject.study.one_run else chosen
    takeaway = [f"{label(entry)}: {_ends(subject, entry.name)}" for entry in named]
    headline = "Plasticity by Distance of Keys and Query"
    steps = [("Selection", f"{listed([label(entry) for entry in chosen])}."), ESTIMATOR]
    return Card(headline, shows, MAP_FILE, steps, takeaway, "cells of a sixteenth of the window")


def _ends(subject: Subject, model: str) -> str:
    """Near keys at both ends of their column, and keys that are half a window apart."""
    table = subject.at.table(MAP_FILE)
    cells = mean_map(table[table["model"] == model]).dropna(subset="ap")
    near = cells[cells["key_distance"] == 0.0].sort_values("query_distance")
    half = subject.at.window_of(model) / 2
    far = cells[(cells["key_distance"] >= half) & (cells["weight"] > 0)]
    said = (
        f"between keys of one bucket mean plasticity is {number(near['ap'].iloc[0])} next to the query and "
        f"{number(near['ap'].iloc[-1])} at {tokens(near['query_distance'].iloc[-1])} from it"
    )
    if len(far):
        average = float(np.average(far["ap"], weights=far["weight"]))
        said += f"; between keys half a window apart or more it is {number(average)}"
    return f"{said}."
