"""Claims of the published account against hand-made studies in which each holds, fails, or is undecided.

`python tests/test_claims.py --write` writes the claims into docs/lenses/claims.md.
"""

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import pearsonr

from known_errors import WAYS, moved
from lens_worlds import GROUPS, HEADS, tables_of
from qkscope import Moments
from qkscope.kinds import CHECKPOINTS, MODELS
from qkscope.layers import LayerFacts
from qkscope.lenses.categories import classify
from qkscope.lenses.claims import CLAIMS, claim_rows
from qkscope.lenses.claims.base import Evidence, Ruling
from qkscope.lenses.claims.steps import against_keys
from qkscope.lenses.registry import registered
from qkscope.lenses.rotation.table import TABLE as ROTATED
from qkscope.lenses.rotation.table import averaged, rotated
from qkscope.lenses.rows import checkpoint_rows
from qkscope.lenses.sums import layer_sums
from qkscope.lenses.views import WindowView, build_tables
from qkscope.moments.layout import capture_layout
from qkscope.report.cards import catalogue
from qkscope.report.claims import claims_page
from qkscope.results.entries import Entries, Entry
from qkscope.results.read import load_results
from qkscope.results.schema import LAYER_MEANS, REPLICATES
from qkscope.stats.means import HeadPanel, Part
from qkscope.stats.significance import Error
from qkscope.study.rows import RowSettings
from qkscope.words.blocks import to_markdown
from qkscope.words.phrases import plus_minus

SUPPORTED, CONTRADICTED, NOT_SIGNIFICANT, UNDECIDED = Ruling
FAR = math.sqrt(3)  # how many steps another sample of documents is away: four groups of one size
BY_NAME = {claim.name: claim for claim in CLAIMS}


PAGE = Path(__file__).parents[1] / "docs/lenses/claims.md"
START, END = "<!-- claims: `python tests/test_claims.py --write` -->\n", "<!-- end of claims -->"


def claims_block() -> str:
    """The claims as the page has them."""
    lines = ["", "| claim | statement | holds if | figures |", "|---|---|---|---|"]
    for claim in CLAIMS:
        right = claim.statistic.replace("|", "\\|") or "–"
        lines.append(f"| `{claim.name}` | {claim.said} | {right} | {', '.join(claim.figures)} |")
    return "\n".join([*lines, "", ""])


def test_the_page_has_every_claim():
    assert PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0] == claims_block()


# --- studies by hand --------------------------------------------------------------------------------


def heads_of(model, r_q, r_k, *, layers=4, window=64, nope=()):
    """Two heads per layer, each with a key head of its own; r_q and r_k are numbers per layer, or (layers, 2)."""
    q, k = (np.broadcast_to(np.asarray(r, dtype=float).reshape(-1, 1 if np.ndim(r) < 2 else 2), (layers, 2))
            for r in (r_q, r_k))  # fmt: skip
    return pd.DataFrame([
        {
            "model": model, "layer": layer, "head": head, "kv_head": head, "pc": 0, "depth": layer / (layers - 1),
            "explained_variance": 0.4, "r_q": q[layer, head], "r_k": k[layer, head], "window": window,
            "rotary": "nope" if layer in nope else "rotary", "attention": "full", "attention_window": np.nan,
        }
        for layer in range(layers) for head in range(2)
    ])  # fmt: skip


def replicates_of(heads, step):
    """Without each of four groups, every r of queries is a step up, down, up, down on Fisher's scale; keys likewise.

    `step` is one number, or a pair for queries and keys.
    """
    steps = dict(zip(("r_q", "r_k"), step if isinstance(step, tuple) else (step, step), strict=True))
    found = heads[["model", "layer", "head", "window", "r_q", "r_k", "explained_variance"]].assign(n_q=400)
    for group, way in enumerate(WAYS):
        for name, by in steps.items():
            found[f"{name}_without_{group}"] = moved(heads[name], way * by)
        found[f"explained_variance_without_{group}"] = heads["explained_variance"]
        found[f"n_q_without_{group}"] = 300
    return found


def means_of(heads, columns, by_category=()):
    """`layer_means`: {column: step} moves its means up, down, up, down."""
    rows = []
    for (model, layer), here in heads.groupby(["model", "layer"], sort=False):
        who = {"model": model, "window": here["window"].iloc[0], "layer": layer}
        rows.append(
            {
                **who,
                "measure": "tokens",
                "heads_of": "all",
                "heads": 2,
                "mean": 400.0,
                **{f"without_{g}": 300 for g in range(4)},
            }
        )
        inside = (classify(here["r_q"], here["r_k"]) == "position-dominated").astype(bool)
        sides = {"all": np.ones(len(here), dtype=bool)}
        if by_category:
            sides |= {"position-dominated": inside, "others": ~inside}
        for (name, steps), (side, chosen) in itertools.product(columns.items(), sides.items()):
            step = steps.get(side, 0.0) if isinstance(steps, dict) else steps
            values = here.loc[chosen, name].dropna()
            mean = values.mean() if len(values) else np.nan
            without = {f"without_{g}": mean + way * step for g, way in enumerate(WAYS)}
            rows.append({**who, "measure": name, "heads_of": side, "heads": len(values), "mean": mean, **without})
    return pd.DataFrame(rows)  # fmt: skip


def study(*heads, tables=None, kind=CHECKPOINTS, contexts=None, common=False, sampled=False):
    """A study of these entries at one choice of windows."""
    names = [part["model"].iloc[0] for part in heads]
    entries = Entries(
        title="t", checkpoints=tuple(Entry(name, name.upper()) for name in names), selected=tuple(names), kind=kind,
        sampled_heads=sampled, same_documents=True,
    )  # fmt: skip
    return WindowView(
        entries, pd.concat(heads, ignore_index=True), registered(), tables=tables, contexts=contexts, common=common
    )


def asked(name, at):
    """The rows of one claim."""
    return claim_rows(BY_NAME[name], at)


def verdict(name, at):
    return asked(name, at)["verdict"].iloc[-1]


# --- verdicts ---------------------------------------------------------------------------------------


SURE = Error(0.0, 7)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Evidence(0.5, Error(0.2, 7), SURE), SUPPORTED),
        (Evidence(-0.5, Error(0.2, 7), SURE), CONTRADICTED),
        (Evidence(0.46, Error(0.2, 7), SURE), NOT_SIGNIFICANT),  # 2.3 errors; Student's t with 7 is 2.36
        (Evidence(0.46, Error(0.2, 15), SURE), SUPPORTED),  # and 2.13 with 15
        (Evidence(0.5, SURE, Error(0.3, 40)), NOT_SIGNIFICANT),  # other KV heads might not show it
        (Evidence(0.5, None, Error(0.2, 40)), SUPPORTED),  # it does not depend on documents
        (Evidence(0.0005, SURE, SURE), NOT_SIGNIFICANT),  # below what three decimals show
        (Evidence(0.5, heads=SURE), UNDECIDED),  # no error over documents is known
        (Evidence(0.5, SURE), UNDECIDED),
        (Evidence(math.nan, SURE, SURE), UNDECIDED),
        (Evidence(0.5, SURE, SURE, why="no such heads"), UNDECIDED),
    ],
)
def test_both_errors_decide(found, expected):
    assert found.ruling is expected
    assert bool(found.reason) == (expected is UNDECIDED)


def test_every_claim_names_figures_that_exist_and_parts_of_one_sentence_stand_together():
    for claim in CLAIMS:
        assert claim.figures, claim.name
        assert set(claim.figures) <= {figure.name for figure in catalogue()}, claim.name
        assert claim.said.endswith(".")
        assert not claim.statistic.endswith(".")
    assert len(BY_NAME) == len(CLAIMS)


# --- position-dominated heads -----------------------------------------------------------------------

INSIDE, OUTSIDE = (0.9, 0.9), (0.5, 0.9)  # r_q, r_k of a position-dominated and of a mixed head


def dominated_study(inside, outside, steps, count=4):
    """`count` position-dominated heads with one bias_effect, the rest with another; every layer has both kinds."""
    r_q = np.full((4, 2), OUTSIDE[0])
    r_q[:count, 0] = INSIDE[0]
    heads = heads_of("m", r_q, INSIDE[1])
    chosen = heads["r_q"] > 0.7
    columns = dict.fromkeys(ROTATED.names, 0.1)
    table = heads.assign(**columns).assign(bias_effect=np.where(chosen, inside, -outside))
    table = table.drop(columns=["r_q", "r_k"]).assign(rotary="rotary")
    with_size = heads.assign(bias_effect_abs=np.where(chosen, inside, outside))
    means = means_of(with_size, {"bias_effect_abs": steps}, by_category=True)
    return study(heads, tables={ROTATED.name: table, LAYER_MEANS: means})


@pytest.mark.parametrize(
    ("inside", "outside", "step", "expected"),
    [(2.0, 1.0, 0.1, SUPPORTED), (1.0, 2.0, 0.1, CONTRADICTED), (2.0, 1.0, 0.3, NOT_SIGNIFICANT)],
)
def test_bias_of_position_dominated_heads(inside, outside, step, expected):
    """Sizes 2 and 1; documents move the first side alone by the root of 3 steps."""
    row = asked("bias_of_dominated", dominated_study(inside, outside, {"position-dominated": step})).iloc[0]
    assert row["value"] == pytest.approx(inside - outside)
    assert row["value_se"] == pytest.approx(FAR * step)
    assert row["population"] == "all heads"
    assert row["value_se_heads"] == pytest.approx(0.0)
    assert row["verdict"] == expected


def test_what_documents_do_to_both_sides_cancels():
    steps = {"position-dominated": 0.3, "others": 0.3}
    row = asked("bias_of_dominated", dominated_study(2.0, 1.0, steps)).iloc[0]
    assert row["value_se"] == pytest.approx(0.0, abs=1e-12)
    assert row["verdict"] == SUPPORTED


def test_key_heads_that_serve_both_sides_count_once():
    """Heads with values 1, 3, 5 on one side and 0, 2, 4 on the other: what a key head does to both sides cancels."""
    rows = [
        {"model": "m", "layer": 0, "head": i, "kv_head": i % 3, "depth": 0.0, "dominated": float(i < 3), "x": x}
        for i, x in enumerate((1.0, 3.0, 5.0, 0.0, 2.0, 4.0))
    ]
    inside, outside = Part(dominated=True), Part(dominated=False)
    shared, alone = pd.DataFrame(rows), pd.DataFrame(rows).assign(kv_head=range(6))

    def error(heads):
        return HeadPanel(heads, True, [heads, heads]).contrast_head_error("x", "m", outside, inside).size

    assert error(shared) == pytest.approx(0.0)
    # Deviations of -2, 0 and 2 over 3 heads on both sides: (4 + 4) / 9 twice, times 6 / 5.
    assert error(alone) == pytest.approx(math.sqrt(6 / 5 * 16 / 9))
    assert math.isnan(error(shared.assign(kv_head=0)))


def test_two_heads_on_one_side_are_too_few():
    row = asked("bias_of_dominated", dominated_study(2.0, 1.0, {}, count=2)).iloc[0]
    assert row["verdict"] == UNDECIDED
    assert "2 in position-dominated heads and 6 in the others" in row["why"]
    assert row["value"] != row["value"]


def test_the_share_of_the_interaction_by_hand():
    """A slope of 2 on average that gains 0.3 per token of query position, over a window of 10: 9 / 12 of 4.75."""
    columns = {name: np.array([1.0]) for name in ROTATED.names}
    columns |= {"bias_total": np.array([2.0]), "bias_window": np.array([20.0]), "interaction_total": np.array([0.3])}
    share = averaged(columns)["interaction_share"][0]
    assert share == pytest.approx(0.75 / 4.75)
    t = np.linspace(-5, 5, 200_001)  # the slope at every query of the window
    slopes = 2.0 + 0.3 * t
    assert share == pytest.approx(1 - slopes.mean() ** 2 / (slopes**2).mean(), rel=1e-4)


@pytest.mark.parametrize(
    ("interaction", "step", "expected"),
    [(0.8, 0.05, SUPPORTED), (0.2, 0.05, CONTRADICTED), (0.6, 0.06, NOT_SIGNIFICANT)],
)
def test_the_product_of_both_drifts(interaction, step, expected):
    heads = heads_of("m", INSIDE[0], INSIDE[1])
    # bias_total 1 over a window of 64: a share s of the interaction has (64 i)² / 12 = s / (1 - s)
    size = math.sqrt(12 * interaction / (1 - interaction)) / 64
    columns = dict.fromkeys(ROTATED.names, 0.1) | {"bias_total": 1.0, "bias_window": 64.0, "interaction_total": size}
    table = heads.drop(columns=["r_q", "r_k"]).assign(**columns)
    means = means_of(
        heads.assign(interaction_share=interaction),
        {"interaction_share": {"position-dominated": step}}, by_category=True,
    )  # fmt: skip
    row = asked("by_interaction", study(heads, tables={ROTATED.name: table, LAYER_MEANS: means})).iloc[0]
    assert row["value"] == pytest.approx(interaction - 0.5)
    assert row["value_se"] == pytest.approx(FAR * step)
    assert row["verdict"] == expected


def test_means_apart_by_category_are_those_of_the_heads_without_each_group():
    """Brute force: rotate every replicate, and average the heads of either side."""
    rng, t = np.random.default_rng(0), np.arange(64)[:, None] / 64 * np.eye(6)[0]
    facts = [LayerFacts(layer, HEADS, 2, 6, rotary="rotary") for layer in range(2)]
    moments = Moments(capture_layout(64, buckets=4, groups=GROUPS), facts)
    for layer in range(2):
        q, k = (rng.normal(size=(GROUPS, count, 64, 6)) for count in (HEADS, 2))
        q[:, :2] += 12 * t  # half of the heads
        moments.add(layer, q, k + 12 * t, groups=list(range(GROUPS)))
    rows = checkpoint_rows(moments, [ROTATED], RowSettings(components=2), model="m")[LAYER_MEANS]
    table = rows.set_index(["layer", "measure", "heads_of"])
    sides = set()
    for layer in range(2):
        sums = layer_sums(moments, layer, range(HEADS), components=2)
        category = classify(sums.principal.r_q[:, 0], sums.principal.r_k[:, 0])
        for side, inside in (
            ("position-dominated", category == "position-dominated"),
            ("others", category != "position-dominated"),
        ):
            row = table.loc[(layer, "bias_effect_abs", side)]
            assert row["heads"] == inside.sum()
            sides |= {side} if inside.any() else set()
            for group in range(GROUPS):
                without = np.abs(rotated(sums.without(group))["bias_effect"])[inside]
                expected = without.mean() if len(without) else np.nan
                np.testing.assert_allclose(row[f"without_{group}"], expected, rtol=1e-12)
    assert sides == {"position-dominated", "others"}


def leaning(r_k, advantage, error=0.1, layers=4):
    heads = heads_of("m", 0.9, np.reshape(r_k, (layers, 2)), layers=layers)
    scores = heads[["model", "layer", "head", "window"]].assign(late_advantage=advantage, late_advantage_se=error)
    return study(heads, tables={"score": scores})


def test_signs_agree_only_beyond_what_their_margins_give():
    """40 heads of which 36 have r_k above 0 and 36 favor late keys: 0.9 * 0.9 + 0.1 * 0.1 agree by chance."""
    keys = np.array([1.0] * 36 + [-1.0] * 4)
    chance = np.array([-1.0] * 4 + [1.0] * 36)  # 32 of 40 agree, fewer than by chance, and far more than half
    row = asked("sign_leans", leaning(0.8 * keys, chance, layers=20)).iloc[0]
    assert row["value"] == pytest.approx((0.8 - 0.82) / 0.18)
    assert row["verdict"] == NOT_SIGNIFICANT
    agree = asked("sign_leans", leaning(0.8 * keys, keys, layers=20)).iloc[0]
    assert agree["value"] == pytest.approx(1.0)
    assert agree["value_se_heads"] == pytest.approx(
        math.sqrt(0.82 + 0.82**2 - 0.81 * 1.8 - 0.01 * 0.2) / 0.18 / math.sqrt(40)
    )
    assert agree["verdict"] == SUPPORTED
    signs = np.array([1, 1, -1, -1] * 5)
    assert verdict("sign_leans", leaning(0.8 * signs, -signs, layers=10)) == CONTRADICTED
    one_sign = asked("sign_leans", leaning(np.full(8, 0.8), np.ones(8))).iloc[0]  # all agree, and would by chance
    assert one_sign["verdict"] == UNDECIDED
    assert "too few to tell agreement from chance" in one_sign["why"]
    assert verdict("sign_leans", leaning(0.8 * signs, signs, error=1.0, layers=10)) == UNDECIDED  # none significant
    assert verdict("sign_leans", leaning(0.2 * signs, signs, layers=10)) == UNDECIDED  # no key clearly runs either way


def test_claims_are_about_one_layer_type():
    """NoPE layers alone would turn each of these round: rotary heads count."""
    heads = heads_of("m", [0.8, 0.8, 0.1, 0.8, 0.8, 0.1], [0.5, 0.5, 0.99, 0.5, 0.5, 0.01], layers=6, nope=(2, 5))
    at = study(heads, tables={REPLICATES: replicates_of(heads, 0.01)})
    row = asked("keys_vary", at).iloc[0]
    assert row["population"] == "rotary layers"
    assert row["value"] == pytest.approx(0.0)  # over all layers keys would vary more
    r_q = np.full((6, 2), OUTSIDE[0])
    r_q[:4, 0] = INSIDE[0]
    heads = heads_of("m", r_q, INSIDE[1], layers=6, nope=(4, 5))
    chosen, nope = heads["r_q"] > 0.7, heads["rotary"] == "nope"
    size = np.where(nope, 0.0, np.where(chosen, 1.0, 2.0))
    table = heads.assign(**dict.fromkeys(ROTATED.names, 0.1)).assign(bias_effect=size).drop(columns=["r_q", "r_k"])
    means = means_of(heads.assign(bias_effect_abs=size), {"bias_effect_abs": 0.01}, by_category=True)
    row = asked("bias_of_dominated", study(heads, tables={ROTATED.name: table, LAYER_MEANS: means})).iloc[0]
    assert row["value"] == pytest.approx(-1.0)  # against all others it would be 1 - 1 = 0
    assert row["verdict"] == CONTRADICTED


def test_a_change_that_the_common_window_contradicts_is_not_supported():
    own, names = training(0.2, 0.5, 0.5, queries=(0.5, 0.6, 0.8)), ("c0", "c1", "c2")
    parts = [heads_of(name, r_q, 0.5) for name, r_q in zip(names, (0.5, 0.6, 0.4), strict=True)]
    tables = {REPLICATES: pd.concat([replicates_of(part, 0.01) for part in parts], ignore_index=True)}
    contexts = dict(zip(names, (64.0, 64.0, 128.0), strict=True))
    common = study(*parts, tables=tables, contexts=contexts, common=True)
    assert verdict("queries_stronger", own) == SUPPORTED
    assert verdict("queries_stronger", common) == CONTRADICTED
    own.other, common.other = common, own
    row = asked("queries_stronger", own).iloc[0]
    assert row["verdict"] == UNDECIDED
    assert row["why"].startswith("contradicted at the common window (−0.20")
    assert verdict("queries_stronger", common) == CONTRADICTED


# --- depth ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("early", "late", "step", "expected"),
    [(0.8, 0.4, 0.02, SUPPORTED), (0.4, 0.8, 0.02, CONTRADICTED), (0.8, 0.79, 0.3, NOT_SIGNIFICANT)],
)
def test_early_layers_by_hand(early, late, step, expected):
    """Ten layers: depths 0 to 0.33 are the first three tenths and one of ten more; every r moves with the documents."""
    heads = heads_of("m", 0.9, [early] * 3 + [0.6] * 4 + [late] * 3, layers=10)
    row = asked("early_keys", study(heads, tables={REPLICATES: replicates_of(heads, step)})).iloc[0]
    assert row["value"] == pytest.approx(early - late)
    drawn = [moved(early, way * FAR * step) - moved(late, way * FAR * step) for way in WAYS]
    assert row["value_se"] == pytest.approx(np.std(drawn), rel=1e-4)
    assert row["verdict"] == expected


def test_early_layers_are_compared_within_the_kind_that_has_most_heads():
    heads = heads_of("m", 0.9, [0.8] * 5 + [0.4] * 5, layers=10, nope=(0, 9))
    heads.loc[heads["rotary"] == "nope", "r_k"] = [0.0, 0.0, 0.99, 0.99]  # NoPE alone would say the opposite
    row = asked("early_keys", study(heads, tables={REPLICATES: replicates_of(heads, 0.01)})).iloc[0]
    assert row["value"] == pytest.approx(0.4)
    assert "(rotary layers)" in row["found"]


def test_one_layer_has_no_early_and_late():
    heads = heads_of("m", 0.9, 0.5, layers=2)
    assert verdict("early_keys", study(heads[heads["layer"] == 0])) == UNDECIDED


@pytest.mark.parametrize(("gap", "expected"), [(0.02, SUPPORTED), (0.3, CONTRADICTED), (0.1, NOT_SIGNIFICANT)])
def test_no_gradient_means_less_than_a_tenth(gap, expected):
    heads = heads_of("m", [0.6 + gap] * 3 + [0.6] * 7, 0.5, layers=10)
    row = asked("even_queries", study(heads, tables={REPLICATES: replicates_of(heads, 0.02)})).iloc[0]
    assert row["value"] == pytest.approx(0.1 - gap)
    assert row["verdict"] == expected


@pytest.mark.parametrize(
    ("queries", "keys", "steps", "expected"),
    [
        ([0.8, 0.8, 0.8, 0.8], [0.2, 0.8, 0.3, 0.9], 0.02, SUPPORTED),
        ([0.2, 0.8, 0.3, 0.9], [0.8, 0.8, 0.8, 0.8], 0.02, CONTRADICTED),
        ([0.2, 0.8, 0.3, 0.9], [0.2, 0.8, 0.3, 0.9], (0.0, 0.2), NOT_SIGNIFICANT),
    ],
)
def test_keys_vary_more_over_layers(queries, keys, steps, expected):
    heads = heads_of("m", queries, keys)
    row = asked("keys_vary", study(heads, tables={REPLICATES: replicates_of(heads, steps)})).iloc[0]
    assert row["value"] == pytest.approx(np.std(keys) - np.std(queries))
    by = steps if isinstance(steps, tuple) else (steps, steps)
    drawn = [np.std(moved(np.array(keys), w * FAR * by[1])) - np.std(moved(np.array(queries), w * FAR * by[0]))
             for w in WAYS]  # fmt: skip
    assert row["value_se"] == pytest.approx(np.std(drawn), rel=1e-3, abs=1e-6)
    assert row["verdict"] == expected
    assert verdict("keys_vary", study(heads_of("m", 0.5, 0.5, layers=2))) == UNDECIDED


def test_nope_layers_have_lower_r_q():
    for nope, rotary, expected in ((0.3, 0.8, SUPPORTED), (0.8, 0.3, CONTRADICTED)):
        heads = heads_of("m", [rotary, nope, rotary, nope], 0.5, nope=(1, 3))
        at = study(heads, tables={REPLICATES: replicates_of(heads, 0.01)})
        assert asked("nope_less", at)["value"].iloc[0] == pytest.approx(rotary - nope)
        assert verdict("nope_less", at) == expected
    assert verdict("nope_less", study(heads_of("m", 0.5, 0.5))) == UNDECIDED


# --- training ---------------------------------------------------------------------------------------


def training(*keys, queries=(0.6, 0.7, 0.8), contexts=(64, 64, 128), step=0.01, layers=4, **options):
    """Three checkpoints, the last with a longer context; `step` is how far documents move r, or one per checkpoint."""
    parts = [heads_of(f"c{i}", q, k, window=context, layers=layers)
             for i, (q, k, context) in enumerate(zip(queries, keys, contexts, strict=True))]  # fmt: skip
    steps = step if isinstance(step, list) else [step] * 3
    found = [replicates_of(part, each) for part, each in zip(parts, steps, strict=True)]
    return study(*parts, tables={REPLICATES: pd.concat(found, ignore_index=True)}, **options)


def test_long_context_training_is_the_way_from_the_last_short_checkpoint_to_the_last():
    row = asked("keys_weaker", training(0.2, 0.8, 0.5)).iloc[0]
    assert row["value"] == pytest.approx(0.3)
    drawn = [moved(0.5, way * FAR * 0.01) - moved(0.8, way * FAR * 0.01) for way in WAYS]
    assert row["value_se"] == pytest.approx(np.std(drawn), rel=1e-3)
    assert row["found"].startswith("from C1 to C2 it goes from 0.80")
    assert row["verdict"] == SUPPORTED
    assert verdict("queries_stronger", training(0.2, 0.8, 0.5)) == SUPPORTED
    assert verdict("keys_weaker", training(0.2, 0.5, 0.8)) == CONTRADICTED
    assert verdict("keys_weaker", training(0.2, 0.5, 0.52, step=[0.0, 0.1, -0.1])) == NOT_SIGNIFICANT


def test_without_a_longer_context_or_a_run_it_cannot_be_asked():
    level = training(0.2, 0.8, 0.5, contexts=(64, 64, 64))
    for name in ("keys_weaker", "query_part_grows", "consolidation", "deep_fall", "tighter_queries"):
        assert verdict(name, level) == UNDECIDED
    assert "does not grow" in asked("keys_weaker", level)["why"].iloc[0]
    models = training(0.2, 0.8, 0.5, kind=MODELS)
    assert "not stages of one training run" in asked("keys_weaker", models)["why"].iloc[0]


def test_at_the_common_window_the_own_contexts_tell_where_the_context_grows():
    contexts = {"c0": 64.0, "c1": 64.0, "c2": 128.0}
    at = training(0.2, 0.8, 0.5, contexts=(64, 64, 64))
    assert verdict("keys_weaker", at) == UNDECIDED
    parts = [heads_of(name, 0.7, r_k) for name, r_k in zip(contexts, (0.2, 0.8, 0.5), strict=True)]
    tables = {REPLICATES: pd.concat([replicates_of(part, 0.01) for part in parts], ignore_index=True)}
    assert verdict("keys_weaker", study(*parts, tables=tables, contexts=contexts, common=True)) == SUPPORTED


def test_a_fall_of_mean_r_k_may_be_a_split_in_sign():
    split = np.array([[0.8, -0.8]] * 4)
    weaker, split_in_sign = training(0.2, 0.8, 0.5), training(0.2, 0.8, split)
    assert verdict("coupling_weaker", weaker) == SUPPORTED
    row = asked("coupling_weaker", split_in_sign).iloc[0]
    assert row["value"] == pytest.approx(0.0)
    assert row["verdict"] == NOT_SIGNIFICANT
    stronger = training(0.2, 0.6, np.array([[0.9, -0.9]] * 4))
    assert verdict("coupling_weaker", stronger) == CONTRADICTED
    risen = asked("coupling_weaker", training(0.2, 0.5, 0.8)).iloc[0]
    assert risen["verdict"] == UNDECIDED
    assert "mean r_k does not fall significantly from C1 to C2 (change 0.300" in risen["why"]


def scored(query_shares, keys, step=0.01, **options):
    """The same with a query part per checkpoint, of which documents move every mean by a step."""
    parts = [heads_of(f"c{i}", 0.7, k, window=w) for i, (k, w) in enumerate(zip(keys, (64, 64, 128), strict=True))]
    heads = pd.concat(parts, ignore_index=True)
    shares = heads.assign(query_share=np.concatenate([np.broadcast_to(s, 8) for s in query_shares]))
    names = [
        name
        for part in ("", "line_")
        for name in (f"{part}position_share", f"{part}query_position_share", f"{part}preference_share")
    ]
    shares = shares.assign(
        **dict.fromkeys(names, 0.1),
        line_query_share=0.7,
        buckets=16,
        late_advantage=1.0,
        late_advantage_se=0.1,
        score_sd=1.0,
        score_sd_scaled=1.0,
    )
    means = means_of(shares, {"query_share": step})
    table = shares.drop(columns=["r_q", "r_k", "explained_variance"])
    tables = {"score": table, LAYER_MEANS: means}
    tables[REPLICATES] = pd.concat([replicates_of(part, 0.01) for part in parts], ignore_index=True)
    return study(*parts, tables=tables, **options)  # fmt: skip


def test_keys_that_are_freed_for_content():
    for shares, expected in (((0.3, 0.3, 0.6), SUPPORTED), ((0.3, 0.6, 0.3), CONTRADICTED)):
        row = asked("query_part_grows", scored(shares, (0.2, 0.8, 0.5))).iloc[0]
        assert row["value"] == pytest.approx(shares[2] - shares[1])
        assert row["verdict"] == expected
    assert verdict("query_part_grows", scored((0.3, 0.3, 0.6), (0.2, 0.5, 0.8))) == UNDECIDED  # r_k rises
    assert "score is not among" in asked("query_part_grows", training(0.2, 0.8, 0.5))["why"].iloc[0]


def test_head_by_head_with_its_error_over_key_heads():
    rng = np.random.default_rng(1)
    before, fall = np.full((4, 2), 0.9), rng.uniform(0.1, 0.6, (4, 2))
    shares = 0.3 + 0.5 * fall.ravel() + 0.02 * rng.normal(size=8)
    row = asked("query_part_by_head", scored((0.3, 0.3, shares), (0.2, before, before - fall))).iloc[0]
    x, y = -fall.ravel(), shares - 0.3
    assert row["value"] == pytest.approx(-pearsonr(x, y).statistic)
    left = np.arctanh([pearsonr(np.delete(x, i), np.delete(y, i)).statistic for i in range(8)])
    error = math.sqrt(7 / 8 * ((left - left.mean()) ** 2).sum()) * (1 - row["value"] ** 2)
    assert row["value_se_heads"] == pytest.approx(error)
    assert math.isnan(row["value_se"])  # of single heads there are no draws
    assert row["verdict"] == SUPPORTED
    against = scored((0.3, 0.3, 0.9 - shares), (0.2, before, before - fall))
    assert verdict("query_part_by_head", against) == CONTRADICTED
    assert verdict("query_part_by_head", scored((0.3, 0.3, 0.6), (0.2, before, before - fall))) == UNDECIDED


def test_heads_that_share_keys_are_left_out_together():
    entry = Entry("a", "A")
    gained = pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0] * 2, "y": [1.0, 2.2, 2.9, 4.1] * 2, "key": list("abcd") * 2})
    alone = against_keys(gained.head(4), entry, entry)
    both = against_keys(gained, entry, entry)
    assert both.heads == pytest.approx(alone.heads)  # twice the heads are no more key heads
    assert both.value == pytest.approx(alone.value)


def test_the_fall_is_largest_in_deep_layers():
    deep, shallow, ten = [0.8] * 7 + [0.5] * 3, [0.5] * 3 + [0.8] * 7, {"layers": 10}
    assert verdict("deep_fall", training(0.2, 0.8, deep, **ten)) == SUPPORTED
    row = asked("deep_fall", training(0.2, 0.8, shallow, **ten)).iloc[0]
    assert row["verdict"] == CONTRADICTED
    assert row["value"] == pytest.approx(-0.3)
    assert verdict("deep_fall", training(0.2, 0.8, 0.5, step=0.05, **ten)) == NOT_SIGNIFICANT  # everywhere alike
    assert verdict("deep_fall", training(0.2, 0.5, 0.8)) == UNDECIDED


def test_queries_come_first():
    """By the second of three checkpoints at one context, of a rise of 0.4 and 0.4."""
    run = {"contexts": (64, 64, 64), "step": 0.005}
    first = asked("queries_first", training(0.2, 0.3, 0.6, queries=(0.2, 0.5, 0.6), **run)).iloc[0]
    assert first["value"] == pytest.approx(0.75 - 0.25)
    assert first["verdict"] == SUPPORTED
    assert verdict("queries_first", training(0.2, 0.5, 0.6, queries=(0.2, 0.3, 0.6), **run)) == CONTRADICTED
    assert verdict("queries_first", training(0.2, 0.4, 0.6, queries=(0.2, 0.4, 0.6), **run)) == NOT_SIGNIFICANT
    assert verdict("queries_first", training(0.6, 0.4, 0.2, queries=(0.2, 0.4, 0.6), **run)) == UNDECIDED  # keys fall
    assert verdict("queries_first", training(0.2, 0.4, 0.6)) == UNDECIDED  # two checkpoints before the context grows


def test_keys_change_more_over_training():
    assert verdict("keys_change", training(0.2, 0.8, 0.3, queries=(0.7, 0.7, 0.7))) == SUPPORTED
    assert verdict("keys_change", training(0.7, 0.7, 0.7, queries=(0.2, 0.8, 0.3))) == CONTRADICTED
    row = asked("keys_change", training(0.2, 0.5, 0.8, queries=(0.1, 0.4, 0.8))).iloc[0]
    assert row["value"] == pytest.approx(np.std([0.2, 0.5, 0.8]) - np.std([0.1, 0.4, 0.8]))
    assert verdict("keys_change", study(heads_of("m", 0.5, 0.5))) == UNDECIDED


@pytest.mark.parametrize(
    ("predicted", "excess", "step", "expected"),
    [(0.5, 0.1, 0.02, SUPPORTED), (0.1, 0.5, 0.02, CONTRADICTED), (0.3, 0.25, 0.1, NOT_SIGNIFICANT)],
)
def test_what_rope_alone_gives(predicted, excess, step, expected):
    heads = heads_of("m", predicted + excess, 0.4)
    table = heads.assign(r_q_rope=predicted, r_q_excess=excess, r_k_rope=0.1, r_k_excess=0.1)
    means = means_of(table, {"r_q_rope": step, "r_q_excess": 0.0})
    at = study(heads, tables={"rope": table.drop(columns=["r_q", "r_k"]), LAYER_MEANS: means})
    row = asked("rope_structure", at).iloc[0]
    assert row["value"] == pytest.approx(predicted - excess)
    assert row["value_se"] == pytest.approx(FAR * step)
    assert row["verdict"] == expected
    none = table.assign(r_q_rope=np.nan, r_q_excess=np.nan).drop(columns=["r_q", "r_k"])
    assert verdict("rope_structure", study(heads, tables={"rope": none, LAYER_MEANS: means})) == UNDECIDED


def test_what_no_table_can_answer_says_so():
    row = asked("bottlenecks", training(0.2, 0.8, 0.5)).iloc[0]
    assert row["verdict"] == UNDECIDED
    assert "benchmark by length" in row["why"]


# --- cards ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return tables_of()


@pytest.fixture(scope="module")
def models():
    return tables_of((64, 128), kind="models")


def test_the_table_has_a_row_per_entry_and_one_about_training(run):
    table = run.own.table("claims")
    assert " ".join(table.columns) == (
        "claim said statistic model window population value value_se value_se_heads verdict found why"
    )
    counts = table.groupby("claim").size()
    for claim in CLAIMS:
        assert counts[claim.name] == (3 if claim.about == "entry" else 1)
    asked_ones = table[table["verdict"] != UNDECIDED]
    assert len(asked_ones) > len(table) / 2
    assert asked_ones["value_se_heads"].notna().all()
    assert (asked_ones["found"] != "").all()


def test_results_from_a_table_alone_say_what_is_missing(tmp_path):
    heads_of("m", 0.9, 0.5).drop(columns=["attention", "attention_window"]).to_csv(tmp_path / "qk.csv", index=False)
    page = to_markdown(claims_page(build_tables(load_results(tmp_path))))
    assert "is not among these results" in page
    assert "nan" not in page


@pytest.mark.slow
def test_the_page_of_claims_has_each_verdict_and_number_of_the_table(run):
    page = to_markdown(claims_page(run)).replace("\\", "")
    for at in run.views():
        for row in at.table("claims").itertuples():
            if row.claim in ("queries_stronger", "keys_weaker") and row.verdict != UNDECIDED:
                (line,) = [each for each in page.splitlines() if f"| {BY_NAME[row.claim].statistic} |" in each]
                assert row.verdict in line
                assert plus_minus(row.value, row.value_se) in line


if __name__ == "__main__" and "--write" in sys.argv:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(f"{before}{START}{claims_block()}{END}{rest.partition(END)[2]}", encoding="utf-8")
