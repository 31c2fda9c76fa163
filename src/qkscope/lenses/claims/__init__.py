"""The published account of such a study, sentence by sentence, tested on the study at hand: `tables/claims.csv`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pandas as pd

from qkscope.lenses.base import Lens, Summary
from qkscope.lenses.categories import POSITION_DOMINATED
from qkscope.lenses.claims.base import Claim, Evidence, Ruling, Unasked
from qkscope.lenses.claims.groups import (
    by_interaction,
    dominated_more,
    early_more,
    even_depth,
    nope_less,
    position_share,
    query_share,
    sign_leans,
    vary_more,
)
from qkscope.lenses.claims.steps import (
    change_more,
    deep_falls_more,
    falls_with,
    goes,
    mostly_rope,
    not_measured,
    queries_first,
    spreads,
)
from qkscope.lenses.measures import FILE as MEASURES
from qkscope.lenses.plasticity import FILE as PLASTICITY
from qkscope.lenses.rope.table import FILE as ROPE
from qkscope.lenses.rotation.table import FILE as ROTATED
from qkscope.lenses.score.table import FILE as SCORE
from qkscope.lenses.views import WindowView
from qkscope.results.entries import Entry
from qkscope.words.phrases import plus_minus

BIAS = "Position-dominated heads implement a bias by position."
FREED = "Where keys stop following position, they are freed for content."
EARLY = "Early layers carry position."
PARTING = "Long-context training strengthens position in queries and weakens it in keys."
CLOUD = "Long-context training tightens r_q over heads and widens r_k."
DYNAMIC = "Keys are more dynamic than queries."
CONTENT = "Deeper layers give the variance of their keys to content rather than position."

CLAIMS = (
    Claim("bias_of_dominated", BIAS, "the mean size of bias_effect (the bias over the window in standard deviations of "
          "a score) is larger in them", ("taxonomy", "drift"), partial(dominated_more, "bias_effect_abs"), (ROTATED,)),
    Claim("position_of_dominated", BIAS, "position is a larger share of the variance of their scores",
          ("taxonomy", "score_components"), partial(dominated_more, position_share), (SCORE,)),
    Claim("by_interaction", "They do so through α·β, the product of both drifts.", "of the mean square over queries of "
          "the slope of scores in key position, the product of both drifts, and not the mean query, makes more than "
          "half", ("taxonomy", "drift"), by_interaction, (ROTATED,)),
    Claim("sign_leans", "Keys that drift with their queries favour late keys, keys that drift against them early ones.",
          "the sign of r_k agrees with the sign of the late advantage in more heads than by chance (Cohen's kappa)",
          ("depth",), sign_leans, (SCORE,)),
    Claim("queries_stronger", PARTING, "mean r_q rises",
          ("position_signal",), partial(goes, "r_q", 1), about="training"),
    Claim("keys_weaker", PARTING, "mean r_k falls", ("position_signal",), partial(goes, "r_k", -1), about="training"),
    Claim("coupling_weaker", "A fall of mean r_k means that keys follow position less.", "mean |r_k| falls with it",
          ("position_signal", "depth"), partial(goes, "r_k_abs", -1, after_fall=True), about="training"),
    Claim("query_part_grows", FREED, "where mean r_k falls, the query part of scores grows",
          ("position_signal", "score_components"), partial(goes, query_share, 1, after_fall=True), (SCORE,),
          "training"),
    Claim("query_part_by_head", FREED, "heads whose |r_k| falls are those whose query part grows",
          ("score_components",), partial(falls_with, query_share), (SCORE,), "training"),
    Claim("plasticity_grows", FREED, "where mean r_k falls, plasticity grows", ("position_signal", "plasticity"),
          partial(goes, "ap", 1, after_fall=True), (PLASTICITY,), "training"),
    Claim("plasticity_by_head", FREED, "heads whose |r_k| falls are those whose plasticity grows", ("plasticity",),
          partial(falls_with, "ap"), (PLASTICITY,), "training"),
    Claim("consolidation", "Long-context training makes heads position-dominated.", "the share of position-dominated "
          "heads rises", ("taxonomy",), partial(goes, POSITION_DOMINATED, 1), about="training"),
    Claim("queries_first", "Queries follow position first, keys later.", "by the second checkpoint, mean r_q has made "
          "more of its rise than mean r_k", ("taxonomy",), queries_first, about="training"),
    Claim("tighter_queries", CLOUD, "the mean distance of r_q from its median falls", ("phase_portraits",),
          partial(spreads, "r_q", -1), about="training"),
    Claim("wider_keys", CLOUD, "the mean distance of r_k from its median rises", ("phase_portraits",),
          partial(spreads, "r_k", 1), about="training"),
    Claim("early_queries", EARLY, "mean r_q is larger in early than in late layers",
          ("depth",), partial(early_more, "r_q")),
    Claim("even_queries", "Position in queries does not depend on depth.", "mean r_q of early and late layers is less "
          "than 0.1 apart", ("depth",), even_depth),
    Claim("early_keys", EARLY, "mean r_k is larger in early than in late layers",
          ("depth",), partial(early_more, "r_k")),
    Claim("early_keys_size", EARLY, "mean |r_k| is larger in early than in late layers", ("depth",),
          partial(early_more, "r_k_abs")),
    Claim("early_drift", EARLY, "mean |r| of keys along a is larger in early than in late layers", ("drift",),
          partial(early_more, "r_k_a_abs"), (ROTATED,)),
    Claim("early_bias", EARLY, "the mean size of bias_effect is larger in early than in late layers", ("drift",),
          partial(early_more, "bias_effect_abs"), (ROTATED,)),
    Claim("early_scores", EARLY, "position is a larger share of the variance of scores in early than in late layers",
          ("score_depth",), partial(early_more, position_share), (SCORE,)),
    Claim("early_excess_q", EARLY, "r_q exceeds the rotated-mean prediction by more in early than in late layers",
          ("rotated_mean",), partial(early_more, "r_q_excess"), (ROPE,)),
    Claim("early_excess_k", EARLY, "r_k exceeds the rotated-mean prediction by more in early than in late layers",
          ("rotated_mean",), partial(early_more, "r_k_excess"), (ROPE,)),
    Claim("late_content", CONTENT, "the share of the variance of keys that is linear in position is smaller in late "
          "than in early layers", ("depth", "measures"), partial(early_more, "share_k"), (MEASURES,)),
    Claim("deep_fall", "The fall of r_k in long-context training is largest in deep layers.", "mean r_k falls more in "
          "late than in early layers", ("depth",), deep_falls_more, about="training"),
    Claim("keys_vary", DYNAMIC, "mean r_k varies more over layers than mean r_q", ("depth",), vary_more),
    Claim("keys_change", DYNAMIC, "mean r_k varies more over checkpoints than mean r_q", ("depth",), change_more,
          about="training"),
    Claim("bottlenecks", "Differences of r_k between layers decide which layers limit the effective context length.",
          "", ("depth",), not_measured, about="training"),
    Claim("rope_structure", "Position in queries early in training is the structure of RoPE.", "the rotated-mean "
          "prediction gives more than half of mean r_q", ("rotated_mean",), mostly_rope, (ROPE,), cited="first",
          said_elsewhere="Position in queries is the structure of RoPE."),
    Claim("nope_less", "NoPE layers have lower r_q.", "mean r_q is higher in rotary layers", ("position_signal",),
          nope_less),
)  # fmt: skip


def claims_at(at: WindowView) -> pd.DataFrame:
    """Every claim at one choice of windows: a row per entry, or one about training with the last checkpoint's name."""
    return pd.concat([claim_rows(claim, at) for claim in CLAIMS], ignore_index=True)


def claim_rows(claim: Claim, at: WindowView) -> pd.DataFrame:
    """One claim: a row per entry, or one about training."""
    rows = []
    for entry in at.study.checkpoints if claim.about == "entry" else at.study.checkpoints[-1:]:
        evidence = evidence_of(claim, at, entry)
        rows.append(
            {
                "claim": claim.name,
                "said": claim.sentence(one_run=at.study.one_run),
                "statistic": claim.statistic,
                "model": entry.name,
                "window": at.window_of(entry.name),
                "population": evidence.population,
                "value": evidence.value,
                "value_se": math.nan if evidence.documents is None else evidence.documents.size,
                "value_se_heads": evidence.heads.size,
                "verdict": evidence.ruling.value,
                "found": evidence.words,
                "why": evidence.reason,
            }
        )
    return pd.DataFrame(rows)


def evidence_of(claim: Claim, at: WindowView, entry: Entry) -> Evidence:
    """What a study says of a claim; of one about training, with what it says at the common window."""
    missing = [name for name in claim.needs if not at.has(name)]
    if missing:
        return Evidence(why=f"{missing[0]} is not among these results at this window")
    try:
        evidence = claim.test(at, entry)
    except Unasked as reason:
        return Evidence(why=str(reason))
    common = None if at.common else at.other
    if claim.about != "training" or common is None or evidence.ruling is not Ruling.SUPPORTED:
        return evidence
    there = evidence_of(claim, common, entry)  # contexts differ, so a change at own contexts may be the window's
    if there.ruling is not Ruling.CONTRADICTED:
        return evidence
    return replace(evidence, why=f"contradicted at the common window ({plus_minus(there.value, there.errors[0].size)})")


LENS = Lens(
    name="claims",
    title="Published claims",
    question="Do the published claims hold here?",
    summaries=(Summary("claims", claims_at),),
)
