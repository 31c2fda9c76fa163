"""Figures and cards of profiles and scores: what they draw and say against the tables, for every kind of study."""

import json
from copy import copy

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import shared
from published_table import invented
from qkscope import Moments
from qkscope.layers import LayerFacts
from qkscope.lenses.profile.card import wrong_shape
from qkscope.lenses.profile.choice import profiles_of
from qkscope.lenses.score.map_choice import maps_of
from qkscope.lenses.score.phrases import lean
from qkscope.lenses.score.table import LINE_SHARES, SHARES, TABLE
from qkscope.lenses.views import build_tables
from qkscope.moments.layout import capture_layout
from qkscope.results.read import load_results
from qkscope.run.events import Events
from qkscope.stats.means import Part
from qkscope.tables.from_moments import analyze_files
from qkscope.words.phrases import plus_minus, share_plus_minus, signed, span
from reports import EVERY_FIGURE, card_text, drawing
from written import put

NAMES = ("score_split", "score_depth", "score_heads", "score_map", "profile")
LOOKS = ("position", "query-position", "preference", "query")
WIDTH, DOCUMENTS = 6, 8


def moments_of(step, length, groups):
    """Two rotary layers that follow position more from step to step, and a NoPE layer that does not."""
    facts = [
        LayerFacts(layer, 4, 2, WIDTH, rotary="nope" if layer == 1 else "rotary", score_scale=0.4) for layer in range(3)
    ]
    moments = Moments(capture_layout(length, buckets=8, groups=groups, common=32), facts, {"n_layers": 3})
    rng, t = np.random.default_rng(step), np.arange(length)
    for layer, size in ((0, 2.0), (1, 0.0), (2, 4.0)):
        for document in range(DOCUMENTS):
            q, k = (rng.normal(size=(1, count, length, WIDTH)) for count in (4, 2))
            q[..., 0] += 1.5
            k[..., 0] += size * (1 + step) * t / length * [[[1.0], [-1.0]]]  # heads 2 and 3 prefer early keys
            moments.add(layer, q, k, groups=document % groups)
    return moments


def study_of(folder, lengths=(32, 32, 64), groups=8):
    """Results of three checkpoints, the last one over a longer context."""
    files = []
    for step, length in enumerate(lengths):
        path = folder / f"step-{step}.safetensors"
        moments_of(step, length, groups).save(path)
        files.append(path)
    return analyze_files(files, Events(), "test", out=folder / "results", components=2, common_window=32)


@pytest.fixture(scope="module")
def folder():
    return shared.once("score shown", study_of) / "results"


@pytest.fixture(scope="module")
def tables(folder):
    return build_tables(load_results(folder))


def heights(axes, name):
    (bars,) = [container for container in axes.containers if container.get_label() == name]
    return [bar.get_height() for bar in bars.patches]


# --- words ------------------------------------------------------------------------------------------


def test_a_lean_is_claimed_beyond_two_errors_only():
    assert lean(1.3, 0.1, 7) == "late keys win by 1.30 ± 0.10 standard deviations of scores"
    assert lean(-0.42, 0.15, 7) == "early keys win by 0.42 ± 0.15 standard deviations of scores"
    assert lean(0.23, 0.1, 7).startswith("neither late nor early keys win significantly (0.23 ± 0.10")
    assert lean(-0.5, np.nan, 7) == "early keys win by 0.50 standard deviations of scores (no error is known)"
    assert lean(np.nan, np.nan, 7) == "it is undefined whether late or early keys win"


def test_numbers_have_the_digits_that_their_errors_need():
    assert plus_minus(0.7312, 0.0004) == "0.7312 ± 0.0004"
    assert plus_minus(0.7312, 0.013) == "0.731 ± 0.013"
    assert plus_minus(-0.7312, 0.02) == "−0.73 ± 0.02"
    assert plus_minus(0.7312, 0.02, signed=True) == "+0.73 ± 0.02"
    assert plus_minus(-0.0001, 0.02) == "0.00 ± 0.02"
    assert plus_minus(713.2, 24.0) == "713 ± 24"
    assert plus_minus(0.7312, np.nan) == "0.731"
    assert share_plus_minus(0.247, 0.03) == "25 ± 3%"
    assert share_plus_minus(0.247, 0.002) == "24.7 ± 0.2%"
    assert share_plus_minus(0.0031, 0.0002) == "0.31 ± 0.02%"
    assert share_plus_minus(0.247, np.nan) == "25%"


def test_an_interval_shows_on_which_side_of_zero_its_ends_are():
    assert span(-0.0247, 0.1415) == "−0.02 to +0.14"
    assert span(0.0012, 0.1418) == "+0.001 to +0.142"
    assert span(0.0, 0.1415) == "0.00 to +0.14"
    assert signed(-0.001) == "0.00"


def test_a_line_is_the_wrong_shape_where_there_is_much_position_and_it_is_bent():
    bends = pd.DataFrame(
        {"between_q": [0.9, 0.9, 0.1, np.nan], "bend_q": [0.8, 0.2, 0.9, np.nan], "between_k": 0.0, "bend_k": np.nan}
    )
    assert wrong_shape(bends).startswith("Of 3 heads, the queries of 1 and the keys of 0 follow position")
    assert "No head has the 3 buckets" in wrong_shape(bends.assign(bend_q=np.nan))


# --- figures ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bars_are_means_over_the_heads_of_each_kind_and_stack_to_one(tables):
    figure = drawing(tables, "score_split")
    heads = tables.own.table(TABLE.name)
    for axes, rotary in zip(figure.axes[:2], ("rotary", "nope"), strict=True):
        means = heads[heads["rotary"] == rotary].groupby("model", sort=False)[list(SHARES)].mean()
        for name, share in zip(LOOKS, SHARES, strict=True):
            np.testing.assert_allclose(heights(axes, name), means[share])
        np.testing.assert_allclose(np.sum([heights(axes, name) for name in LOOKS], axis=0), 1.0)
        assert [c for c in axes.collections if (c.get_gid() or "").endswith("error")]
    late = [line for line in figure.axes[2].lines if line.get_gid() == "late_advantage"]
    means = heads[heads["rotary"] == "rotary"].groupby("model", sort=False)["late_advantage"].mean()
    np.testing.assert_allclose(late[0].get_ydata(), means)


@pytest.mark.slow
def test_at_the_common_window_entries_with_other_buckets_are_compared_by_one_line(tables):
    assert set(tables.common.table("score_shares")["buckets"]) == {9, 5}
    figure = drawing(tables, "score_split", common=True)
    heads = tables.common.table(TABLE.name)
    means = heads[heads["rotary"] == "rotary"].groupby("model", sort=False)[list(LINE_SHARES)].mean()
    for name, share in zip(LOOKS, LINE_SHARES, strict=True):
        np.testing.assert_allclose(heights(figure.axes[0], name), means[share])
    text = card_text(tables, "score_split", common=True)
    assert "checkpoints have from 5 to 9 position buckets" in text
    assert "window counts as one bucket" in text
    assert "position buckets, and finer" not in card_text(tables, "score_split")


def test_depth_has_a_bar_for_each_layer_of_the_first_and_the_last_checkpoint(tables):
    figure = drawing(tables, "score_depth")
    heads = tables.own.table(TABLE.name)
    for axes, model in zip(figure.axes, ("step-0", "step-2"), strict=True):
        means = heads[heads["model"] == model].groupby("layer")["position_share"].mean()
        np.testing.assert_allclose(heights(axes, "position"), means)
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "1\nNoPE", "2"]


def test_every_head_has_its_bar_and_those_with_most_position_come_first(tables):
    figure = drawing(tables, "score_heads")
    heads = tables.own.table(TABLE.name)
    last = heads[(heads["model"] == "step-2") & (heads["rotary"] == "rotary")]
    order = last.sort_values("position_share", ascending=False)
    np.testing.assert_allclose(heights(figure.axes[0], "position"), order["position_share"])
    named = [tick.get_text() for tick in figure.axes[1].get_xticklabels()]
    assert named == [f"L{row.layer} H{row.head}" for row in order.itertuples()]


def test_maps_are_of_the_heads_that_have_most_of_each_part(tables):
    heads = tables.own.table(TABLE.name)
    last = heads[heads["model"] == "step-2"]
    maps = maps_of(tables.own)
    most = last.loc[last["position_share"].idxmax()]
    assert (maps[0].layer, maps[0].head) == (most["layer"], most["head"])
    early = last[last["late_advantage"] < -2 * last["late_advantage_se"]]
    assert (maps[1].layer, maps[1].head) in set(zip(early["layer"], early["head"], strict=True)) | {(0, 0)}
    assert len({(each.layer, each.head) for each in maps}) == len(maps) == 4
    # Each row's mean over the keys that it sees is 0: cells by their width, position 0 as one token.
    for each in maps:
        weights = np.where(np.isfinite(each.scores), np.diff(each.cells), 0.0)
        total = np.nansum(each.scores * weights, axis=1) + np.nan_to_num(each.first)
        np.testing.assert_allclose(total, 0.0, atol=1e-5 * weights.sum())
    figure = drawing(tables, "score_map")
    (mesh,) = [c for c in figure.axes[0].collections if c.get_gid() == "scores"]
    np.testing.assert_allclose(np.ma.filled(mesh.get_array(), np.nan), maps[0].scores)


def test_profiles_are_of_one_head_of_each_category_and_the_most_bent(tables):
    heads = profiles_of(tables.own)
    there = tables.own.heads.query("model == 'step-2'")
    assert [head.why for head in heads[:-1]] == [
        name for name in ("position-dominated", "Q-positional", "K-positional", "content-focused", "mixed")
        if name in set(there["category"])
    ]  # fmt: skip
    assert heads[-1].why == "most bent"
    for head in heads[:-1]:
        others = there[there["category"] == head.why]
        best = others.loc[others["explained_variance"].idxmax()]
        assert (head.layer, head.head) == (best["layer"], best["head"])
    figure = drawing(tables, "profile")
    (line,) = [line for line in figure.axes[0].lines if line.get_gid() == "k_pc0"]
    rows = tables.own.table("profile.csv")
    mine = rows[(rows["model"] == "step-2") & (rows["layer"] == heads[0].layer) & (rows["head"] == heads[0].head)]
    np.testing.assert_allclose(line.get_ydata(), mine["k_pc0"].iloc[1:])  # without position 0


def test_single_heads_are_drawn_at_the_common_window_too(tables):
    heads = tables.common.table(TABLE.name)
    last = heads[(heads["model"] == "step-2") & (heads["rotary"] == "rotary")]
    figure = drawing(tables, "score_heads", common=True)
    order = last.sort_values(LINE_SHARES[0], ascending=False)  # entries have other buckets here
    np.testing.assert_allclose(heights(figure.axes[0], "position"), order[LINE_SHARES[0]])
    best = heads[heads["model"] == "step-2"].sort_values(LINE_SHARES[0]).iloc[-1]
    first = maps_of(tables.common)[0]
    assert (first.layer, first.head) == (best["layer"], best["head"])
    assert f"{100 * best[LINE_SHARES[0]]:.0f}% position" in drawing(tables, "score_map", common=True).axes[0].get_title(
        "left"
    )
    (mesh,) = [c for c in drawing(tables, "score_map", common=True).axes[0].collections if c.get_gid() == "scores"]
    assert mesh.get_array().shape[0] == 5  # buckets of the longer context within the common window
    assert drawing(tables, "profile", common=True) is not None
    for name in ("score_heads", "score_map", "profile"):
        assert "at a Common Window" in card_text(tables, name, common=True).splitlines()[0]
    profile = card_text(tables, "profile", common=True)
    assert "of the common window step-2 has 4 buckets beside position 0" in profile
    course = "The mean share of the variance of queries between buckets"  # not over buckets that differ
    assert course in card_text(tables, "profile")
    assert course not in profile


@pytest.mark.parametrize(
    ("end", "buckets", "drawn"), [(8, 1, ()), (16, 2, ("score_map",)), (24, 3, ("profile", "score_map"))]
)
def test_a_short_window_has_no_map_of_one_bucket_and_no_profile_of_two(tables, end, buckets, drawn):
    """Two points are always a line, so they show no shape."""
    at = copy(tables.common)
    at.head_tables = {
        file: rows[rows["end"] <= end] if file in ("profile.csv", "score_map.csv") else rows
        for file, rows in tables.common.head_tables.items()
    }
    assert at.table("profile.csv").query("model == 'step-2' and start > 0")["bucket"].nunique() == buckets
    assert tuple(name for name in ("profile", "score_map") if EVERY_FIGURE[name].figure.exists(at)) == drawn


# --- cards ------------------------------------------------------------------------------------------


def test_the_card_says_which_keys_win_where_and_how_much_position_explains(tables):
    text = card_text(tables, "score_split")
    takeaway = text.partition("## Key Takeaway")[2]
    row = tables.own.table("score_shares").query("model == 'step-2' and layer_kind == 'all'").iloc[0]
    assert share_plus_minus(row["position_share"], row["position_share_se"]) in takeaway
    assert lean(row["late_advantage"], row["late_advantage_se"], tables.own.freedom("step-2")) in text
    assert "Position is a larger part in rotary than in NoPE layers." in text
    assert "Late keys win significantly in 4 of 12 heads, early keys in 4." in text
    assert "the mean standard deviation of a query's scores" in text
    assert "Does it hold here?" in text
    assert "the covariances to first order" in text


def test_the_card_states_every_change_with_its_error_and_whether_it_is_significant(tables):
    panel, text = tables.own.panel_of(TABLE.name), card_text(tables, "score_split")
    verdicts = set()
    for kind in ("rotary", "NoPE"):
        (said,) = [line for line in text.splitlines() if line.startswith(f"In {kind} layers from step-0 to step-2: ")]
        for share, name in zip(SHARES, LOOKS, strict=True):
            change = panel.change(share, "step-0", "step-2", Part(layer_kind=kind))
            size = plus_minus(100 * change.difference, 100 * change.error, signed=True)
            reach = stats.t.ppf(0.975, change.over_documents.freedom) * change.error
            verdicts.add(abs(change.difference) > reach)
            (part,) = [part for part in said.partition(": ")[2].split("; ") if part.startswith(f"{name} ")]
            assert f"{size} points)" in part
            assert ("not significant" in part) == (abs(change.difference) <= reach)
    assert verdicts == {True, False}
    assert not any(word in text for word in ("largest step", "second clear step"))


def test_the_card_by_depth_says_whether_early_layers_carry_position(tables):
    """Layer 2 was made to follow position more than layer 0."""
    assert "in early than in late layers. Contradicted at" in card_text(tables, "score_depth")


def test_cards_of_single_heads_name_them(tables):
    text = card_text(tables, "score_heads")
    assert "The largest part of the 12 heads is" in text
    assert "Most position: layer 2 head" in text
    assert "(most position where early keys win)" in card_text(tables, "score_map")
    profile = card_text(tables, "profile")
    assert "the most bent head" in profile
    assert "follow position along PC0" in profile.partition("## Key Takeaway")[2]


@pytest.mark.slow
def test_without_errors_nothing_is_claimed_with_one(tmp_path):
    tables = build_tables(load_results(study_of(tmp_path, lengths=(32,), groups=3)))
    text = card_text(tables, "score_split")
    assert "(no error is known)" in text
    assert "±" not in text
    assert drawing(tables, "score_heads") is not None


@pytest.mark.slow
def test_models_are_compared_and_not_joined(folder, tmp_path):
    import shutil

    copy = shutil.copytree(folder, tmp_path / "results")
    place = copy / "provenance.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "kind": "models", "kind_stated": True}))
    tables = build_tables(load_results(copy))
    assert not tables.own.study.one_run
    for name in NAMES:
        assert "rises" not in card_text(tables, name), name
    assert drawing(tables, "score_split") is not None
    assert "is lowest in step-0" in card_text(tables, "score_split")
    assert len(drawing(tables, "score_depth").axes) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "heads"), [(2, 4), (36, 16)])
def test_eight_and_576_heads_can_be_drawn(tmp_path, layers, heads):
    results, _ = invented(tmp_path, 1, layers=layers, heads=heads)
    rng = np.random.default_rng(0)
    parts = rng.dirichlet(np.ones(4), layers * heads)
    columns = dict(zip((*SHARES, *LINE_SHARES), [*parts.T, *parts.T], strict=True))
    table = results.heads[["model", "layer", "head", "window", "depth"]].assign(
        **columns, late_advantage=rng.normal(size=len(parts)), buckets=16, score_sd=1.0, score_sd_scaled=np.nan
    )
    put(tmp_path, "heads", table)
    tables = build_tables(load_results(tmp_path))
    figure = drawing(tables, "score_heads")
    assert sum(len(heights(axes, "query")) for axes in figure.axes if axes.containers) == layers * heads
    assert "not known" in card_text(tables, "score_split")
