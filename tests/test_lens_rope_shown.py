"""What RoPE alone predicts, as it is drawn and told: the numbers of the tables, and no claim within two errors."""

import re

import numpy as np
import pandas as pd
import pytest

import shared
from lens_worlds import Silent
from qkscope import Moments
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.draws import drawn_correlations, replicated
from qkscope.lenses.rope import kernel
from qkscope.lenses.rope.chosen import chosen_heads, shown_entries
from qkscope.lenses.rope.split_table import FILE as SPLIT
from qkscope.lenses.rope.steps import (
    JOINT_WORDS,
    MOST_STEPS,
    WORDS,
    causes_of,
    consecutive,
    drawn_steps,
    order_matters,
    split_rows,
)
from qkscope.lenses.rope.summaries import beside_measured
from qkscope.lenses.rope.table import FILE
from qkscope.lenses.views import build_tables
from qkscope.moments.layout import capture_layout
from qkscope.results.read import load_results
from qkscope.tables.from_moments import analyze_files
from reports import card_text, drawing
from rope_world import turn
from written import table_of

WIDTH, HEADS, KEYS, GROUPS, LAYERS, NOPE = 8, 4, 2, 5, 3, 1
RUN = ((64, 50.0), (64, 50.0), (128, 2000.0))  # context and base of each checkpoint
FIGURES = ("rope_alone", "rope_excess", "rope_split", "rope_kernel")


def rotation(base):
    angles = tuple(float(np.float32(base ** (-plane / 4))) for plane in range(4))
    return Rotation(tuple((i, i + 4) for i in range(4)), angles)


def moments_of(number, context, base, common, known=True, unmeasured=()):
    """A checkpoint whose means at rest grow with training, and with them what RoPE makes of position."""
    by = rotation(base)
    rotary = "rotary" if known else "unknown"
    facts = [
        LayerFacts(i, HEADS, KEYS, WIDTH, "nope", score_scale=0.5) if i == NOPE and known
        else LayerFacts(i, HEADS, KEYS, WIDTH, rotary, rotation=by if known and i not in unmeasured else None,
                        score_scale=0.5)
        for i in range(LAYERS)
    ]  # fmt: skip
    about = {"name": f"step-{number}", "label": f"S{number}", "n_layers": LAYERS, "context": context,
             "documents": GROUPS, "corpus": {"fingerprint": "sha256:1"}}  # fmt: skip
    moments = Moments(capture_layout(context, buckets=4, groups=GROUPS, common=common), facts, about)
    for layer in facts:
        rng = np.random.default_rng(100 * layer.layer + number)
        same = np.random.default_rng(layer.layer)
        parts = []
        for count in (HEADS, KEYS):
            x = rng.normal(size=(GROUPS, count, context, WIDTH)) + 0.1 * rng.normal(size=(GROUPS, count, 1, WIDTH))
            x += (1 + number) * same.normal(size=(1, count, 1, WIDTH))
            parts.append(turn(x, np.arange(context), by) if layer.rotation or layer.rotary != "nope" else x)
        moments.add(layer.layer, *parts, groups=list(range(GROUPS)))
    return moments


def folder_of(place, run=RUN, kind="checkpoints", **options):
    place.mkdir(parents=True, exist_ok=True)
    known, detail = options.pop("known", True), options.pop("detail", True)
    unmeasured = options.pop("unmeasured", ())
    files = [place / f"step-{number}.safetensors" for number in range(len(run))]
    for number, (context, base) in enumerate(run):
        moments_of(number, context, base, min(c for c, _ in run), known, unmeasured).save(files[number])
    common = min(context for context, _ in run)
    return analyze_files(files, Silent(), "test", out=place / "out", common_window=common, kind=kind, detail=detail)


@pytest.fixture(scope="module")
def tables():
    return build_tables(load_results(shared.once("rope shown", folder_of) / "out"))


def bars(axes, part):
    return [patch for patch in axes.patches if patch.get_gid() == part]


def dots(axes, name):
    return [line for line in axes.lines if line.get_gid() == name]


# --- the summary ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_summary_is_of_the_heads_by_kind_of_layer(tables):
    found = tables.own.table("rope_alone").set_index(["model", "layer_kind"])
    rows = pd.read_csv(tables.files.folder / FILE)
    heads = pd.read_csv(tables.files.folder / "qk.csv").query("pc == 0")
    both = rows.merge(heads, on=["model", "layer", "head", "window"], suffixes=("", "_measured"))
    last = both[(both["model"] == "step-2") & (both["window"] == 128) & (both["rotary"] == "rotary")]
    row = found.loc[("step-2", "rotary")]
    assert row["heads"] == len(last) == HEADS * 2
    for name in ("r_q", "r_k", "r_q_rope", "r_k_excess"):
        assert row[name] == pytest.approx(last[name].mean())
    assert row["corr_r_q"] == pytest.approx(np.corrcoef(last["r_q"], last["r_q_rope"])[0, 1])
    assert row["position_dominated_rope"] == pytest.approx((last["category_rope"] == 0).mean())
    assert row["median_pc0_cos"] == pytest.approx(last["pc0_cos"].median())
    assert row["r_q_excess_se"] > 0
    nope = found.loc[("step-2", "NoPE")]
    assert (nope["r_q_rope"], nope["r_k_rope"]) == (0, 0)
    assert np.isnan(nope["corr_r_q"])
    assert nope["r_q_excess"] == pytest.approx(nope["r_q"])


def test_every_head_in_one_row_has_its_prediction(tables):
    heads = tables.own.table("heads")
    assert {"r_q_rope", "r_q_excess", "r_q_excess_se", "category_rope"} <= set(heads.columns)


# --- figures ----------------------------------------------------------------------------------------


def test_the_scatter_shows_every_head_that_has_a_prediction(tables):
    figure = drawing(tables, "rope_alone")
    panels = [axes for axes in figure.axes if axes.collections]
    assert len(panels) == 2 * 3  # r_q and r_k of three checkpoints
    rows = beside_measured(tables.own)
    here = rows[rows["model"] == "step-2"]
    (points,) = [c for c in panels[2].collections if c.get_gid() == "r_q rotary"]
    drawn = sorted(map(tuple, np.round(points.get_offsets(), 9)))
    moving = here[here["prediction"] == 0]
    assert drawn == sorted(zip(moving["r_q_rope"].round(9), moving["r_q"].round(9), strict=True))
    (still,) = [c for c in panels[2].collections if c.get_gid() == "r_q still"]
    np.testing.assert_allclose(still.get_offsets()[:, 0], 0)
    assert len(still.get_offsets()) == HEADS


@pytest.mark.parametrize("common", [False, True])
def test_the_waterfall_adds_up_from_dot_to_dot(tables, common):
    at = tables.common if common else tables.own
    figure = drawing(tables, "rope_split", common)
    table = split_rows(at)
    for axes, quantity in ((figure.axes[0], "r_q"), (figure.axes[2], "r_k")):
        rows = [step[quantity] for step in consecutive(table, at.study)]
        ends = [line.get_ydata() for line in dots(axes, "measured")]
        np.testing.assert_allclose(ends, [[row["before"], row["after"]] for row in rows])
        for part in (*WORDS, *JOINT_WORDS):
            heights = [patch.get_height() for patch in bars(axes, part)]
            np.testing.assert_allclose(
                heights, [row[part] for row in rows if part in causes_of(row) and row[part] != 0]
            )
        tops = [patch.get_y() + patch.get_height() for patch in bars(axes, "unexplained")]
        np.testing.assert_allclose(tops, [row["after"] for row in rows])  # the last bar of a step ends at its dot
    whole = figure.axes[1]
    total = table[(table["from_model"] == "step-0") & (table["to_model"] == "step-2")].set_index("quantity").loc["r_q"]
    name = "weights" if common else "joint_weights"  # the orders of window and base matter at own contexts
    np.testing.assert_allclose([patch.get_height() for patch in bars(whole, name)], [total[name]])
    texts = {text.get_gid(): text.get_text() for text in whole.texts}
    assert texts[f"{name} value"].startswith(f"{total[name]:+.2f}".replace("-", "−"))
    assert ("window value" in texts) == common


def test_the_rotary_heads_stand_for_the_split_and_nope_heads_are_told(tables):
    assert set(split_rows(tables.own)["heads_of"]) == {"rotary"}
    card = card_text(tables, "rope_split")
    assert "In 4 NoPE heads RoPE predicts no change" in card
    assert "window 64 to 128 tokens, base 50 to 2,000" in card


def test_the_kernel_figure_draws_the_kernel_of_the_table(tables):
    figure = drawing(tables, "rope_kernel")
    (each, *_) = chosen_heads(tables.own)
    assert each.model == "step-2"
    rows = each.rows[(each.rows["distance"] > 0) & each.rows["measured"].isna()]
    curve = each.curve(rows["distance"].to_numpy(), 0.0)  # not averaged at all
    np.testing.assert_allclose(curve, rows["kernel_scaled"], atol=2e-3)  # tables have six digits
    assert each.scale == pytest.approx(0.5)
    (line,) = dots(figure.axes[0], "kernel")
    assert line.get_xdata()[-1] == pytest.approx(4 * 128)
    (measured,) = [c for c in figure.axes[0].collections if c.get_gid() == "measured"]
    checked = each.rows[each.rows["measured"].notna()]
    np.testing.assert_allclose(measured.get_offsets()[:, 1], 0.5 * checked["measured"])


def test_means_over_checkpoints_and_what_exceeds_them(tables):
    figure = drawing(tables, "rope_excess")
    table = tables.own.table("rope_alone")
    rotary = table[table["layer_kind"] == "rotary"]
    left, right = figure.axes[:2]
    for name in ("r_q", "r_k"):
        np.testing.assert_allclose(dots(left, name)[0].get_ydata(), rotary[name])
        np.testing.assert_allclose(dots(left, f"{name}_rope")[0].get_ydata(), rotary[f"{name}_rope"])
        np.testing.assert_allclose(dots(right, f"{name}_excess")[0].get_ydata(), rotary[f"{name}_excess"])
        assert [c for c in right.collections if c.get_gid() == f"{name}_excess error"]
    assert len(figure.axes) == 4  # rotary and NoPE heads apart


# --- cards ------------------------------------------------------------------------------------------


def plain(text):
    return text.replace("\\", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_card_says_what_is_held_fixed_and_takes_something_away(tables, name):
    card = plain(card_text(tables, name))
    assert "held fixed" in card
    assert len(card.partition("## Key Takeaway")[2].strip()) > 40
    assert "nan" not in card.lower().replace("nanmean", "")


def test_the_split_card_has_the_numbers_of_the_table(tables):
    card = plain(card_text(tables, "rope_split"))
    table = split_rows(tables.own)
    row = table[(table["from_model"] == "step-0") & (table["to_model"] == "step-2")].set_index("quantity").loc["r_q"]
    takeaway = card.partition("## Key Takeaway")[2]
    assert not abs(row["change"]) > 2.7764 * row["change_se"]  # five groups
    assert f"mean r_q does not change by more than its noise ({row['before']:.2f} and {row['after']:.2f})" in takeaway
    name = "joint_weights" if order_matters(row) else "weights"
    stated = re.search(r"\+(\d\.\d+) ± (\d\.\d+) by the weights", takeaway)
    assert float(stated[1]) == pytest.approx(row[name], abs=10 ** -len(stated[1].partition(".")[2]))
    assert float(stated[2]) == pytest.approx(row[f"{name}_se"], abs=10 ** -len(stated[2].partition(".")[2]))


def test_parts_within_two_errors_are_named_and_not_claimed(tables, tmp_path):
    """The same results with errors ten times as large as every part."""
    import shutil

    folder = shutil.copytree(tables.files.folder, tmp_path / "out")
    rows = pd.read_csv(folder / SPLIT)
    for part in ("window", "base", "weights", "unexplained", "joint", "joint_weights"):
        rows[f"{part}_se"] = 10 * rows[part].abs() + 1
    rows.to_csv(folder / SPLIT, index=False)
    card = plain(card_text(build_tables(load_results(folder)), "rope_split"))
    takeaway = card.partition("## Key Takeaway")[2]
    assert "no part is significant; not significant: " in takeaway
    assert not re.search(r"[+−]\d\.\d+ ± \d\S* by", takeaway)


def test_the_card_of_predictions_claims_an_excess_only_beyond_two_errors(tables):
    card = plain(card_text(tables, "rope_alone"))
    row = tables.own.table("rope_alone").set_index(["model", "layer_kind"]).loc[("step-2", "rotary")]
    beyond = abs(row["r_q_excess"]) > 2.7764 * row["r_q_excess_se"]  # five groups
    sentence = re.search(r"At S2, 8 rotary heads: mean r_q [\d.]+ measured and [\d.]+ predicted, (.*?);", card)[1]
    assert sentence.startswith("an excess of" if beyond else "which do not differ significantly")
    assert f"{row['corr_r_q']:.2f} for r_q" in card
    assert "In 4 NoPE heads nothing rotates" in card


# --- other studies ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_models_have_predictions_and_no_split(tmp_path):
    tables = build_tables(load_results(folder_of(tmp_path, RUN[1:], kind="models")))
    assert not tables.own.has(SPLIT)
    assert drawing(tables, "rope_split") is None
    figure = drawing(tables, "rope_excess")
    assert all(line.get_linestyle() == "None" for line in dots(figure.axes[0], "r_q"))  # nothing joins models
    assert len(drawing(tables, "rope_kernel").axes) == 2 * 4  # of each model a head, its planes, a heatmap, its scale
    assert "lowest in" in card_text(tables, "rope_excess") or "does not differ" in card_text(tables, "rope_excess")


@pytest.mark.slow
def test_one_checkpoint_has_its_figures(tmp_path):
    tables = build_tables(load_results(folder_of(tmp_path, RUN[:1])))
    for name in ("rope_alone", "rope_excess", "rope_kernel"):
        assert drawing(tables, name) is not None
        assert card_text(tables, name)
    assert drawing(tables, "rope_split") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no prediction")
def test_nothing_is_drawn_where_nothing_can_be_predicted_or_details_are_left_out(tmp_path):
    tables = build_tables(load_results(folder_of(tmp_path / "unknown", RUN[:2], known=False)))
    assert [name for name in FIGURES if drawing(tables, name) is not None] == []
    tables = build_tables(load_results(folder_of(tmp_path / "short", RUN[:2], detail=False)))
    assert not tables.own.has(kernel.FILE)
    assert drawing(tables, "rope_kernel") is None
    assert drawing(tables, "rope_split") is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no prediction")
def test_a_layer_whose_rotation_could_not_be_measured_is_left_out_and_named(tmp_path):
    """Means, measured ones too, and their errors are of the other layers alone."""
    folder = folder_of(tmp_path, RUN[:2], unmeasured=(2,))
    tables = build_tables(load_results(folder))
    row = tables.own.table("rope_alone").set_index(["model", "layer_kind"]).loc[("step-1", "rotary")]
    assert row["heads"] == HEADS
    heads = table_of(folder, "replicates").query("model == 'step-1' and layer == 0 and window == 64")
    without = [(heads[name], replicated(heads, name, list(range(GROUPS)))) for name in ("r_q", "r_k")]
    assert row["r_q"] == pytest.approx(heads["r_q"].mean())
    assert row["r_q_se"] == pytest.approx(drawn_correlations(*without, [1] * GROUPS)[0].mean(axis=1).std(), rel=1e-5)
    assert row["r_q_excess_se"] > 0
    for name in ("rope_alone", "rope_excess"):
        card = plain(card_text(tables, name))
        said = "layer 2 of 2 checkpoints, because the rotation of the layer could not be measured."
        assert f"Left out, without a prediction: {said}" in card
        assert "nan" not in card


def test_of_many_steps_those_with_a_new_window_or_base_and_the_largest_are_drawn():
    steps = [
        {"r_q": pd.Series({"from_window": 64, "to_window": 128 if i == 3 else 64, "from_base": 1.0,
                           "to_base": 2.0 if i == 5 else 1.0, "base": 0.0, "change": i / 100})}
        for i in range(30)
    ]  # fmt: skip
    assert drawn_steps(steps) == [3, 5, *range(30 - MOST_STEPS + 2, 30)]
    assert drawn_steps(steps[:10]) == list(range(10))


def test_of_many_models_few_have_a_panel(tables):
    study = tables.own.study
    assert shown_entries(study) == ["step-0", "step-1", "step-2"]
