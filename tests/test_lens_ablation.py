"""What an ablation's figure and card say of its heads, against scipy and numbers worked out by hand."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from published_table import invented
from qkscope.ablate.edits import KINDS
from qkscope.lenses.ablation import strength
from qkscope.lenses.ablation.card import best_sentence
from qkscope.lenses.ablation.strength import STRENGTHS, correlations, fisher_interval, independent_error, strengths_at
from qkscope.lenses.ablation.summary import begins_at
from qkscope.lenses.ablation.table import COURSE, COURSE_FILE, EDITS, FILE, GROUPS, GROUPS_FILE, SPREAD
from qkscope.lenses.views import build_tables
from qkscope.results.read import load_results
from reports import EVERY_FIGURE, card_text, drawing


@pytest.fixture
def ablated(tmp_path):
    """Invented results whose last checkpoint's heads were edited: `ablated(loss, error)`."""
    invented(tmp_path, 3, heads=8)
    folder = tmp_path
    heads = load_results(folder).heads

    def write(loss, error=0.001):
        last = heads[heads["model"] == heads["model"].iloc[-1]].reset_index(drop=True)
        table = last[["model", "layer", "head", "window"]].assign(
            **{f"loss_{edit}{end}": np.nan for edit in EDITS for end in ("", "_se")}, **{SPREAD: np.nan}
        )
        table["loss_kernel"], table["loss_kernel_se"] = loss(last), error
        table.to_csv(folder / FILE, index=False)
        return build_tables(load_results(folder)), last

    return write


def test_every_edit_has_a_column():
    assert set(EDITS) == set(KINDS)


def test_rank_correlations_are_scipys(ablated):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=10_000)
    tables, heads = ablated(lambda rows: rows["r_q"].abs() + 0.2 * noise[: len(rows)])
    found = strengths_at(tables.own).set_index("strength").loc["r_q"]
    expected = stats.spearmanr(heads["r_q"].abs(), heads["r_q"].abs() + 0.2 * noise[: len(heads)]).statistic
    assert found["rho"] == pytest.approx(expected)
    assert found["low"] < expected < found["high"]
    assert found["heads"] == len(heads)


def test_the_interval_of_independent_heads_covers_in_simulation():
    """Pairs with a known rank correlation: 95 % intervals hold it in 93 to 97 of 100 samples."""
    rng, n, r = np.random.default_rng(1), 64, 0.5
    true = 6 / np.pi * np.arcsin(r / 2)  # Spearman's rho of a bivariate normal
    held = 0
    for _ in range(2000):
        x = rng.normal(size=n)
        rho = stats.spearmanr(x, r * x + np.sqrt(1 - r * r) * rng.normal(size=n)).statistic
        low, high = fisher_interval(rho, independent_error(rho, n))
        held += low <= true <= high
    assert 0.93 <= held / 2000 <= 0.97


def clustered(rng, layers=24, per_layer=6, better=0.0):
    """Heads whose loss and strengths have a part that their layer shares: r_q and position_share go with it alike, the
    kernel's spread more so."""
    layer = np.repeat(np.arange(layers), per_layer)
    common = rng.normal(size=layers)[layer]
    loss = common + rng.normal(size=len(layer))
    noisy = {
        name: loss + rng.normal(size=layers)[layer] + rng.normal(size=len(layer)) for name in ("r_q", "position_share")
    }
    # Sizes are what counts: all are far above 0.
    found = {name: 100.0 + values for name, values in noisy.items()}
    found[SPREAD] = 100.0 + loss + (1.0 - better) * (noisy["r_q"] - loss)
    return pd.DataFrame({"layer": layer, "loss_kernel": loss, **found})


@pytest.mark.slow
def test_the_interval_over_layers_covers_where_heads_of_a_layer_are_alike():
    """The truth is that of a very large sample; heads as independent would give intervals that are too narrow."""
    rng = np.random.default_rng(2)
    many = clustered(rng, 20_000)
    true = stats.spearmanr(many["r_q"], many["loss_kernel"]).statistic
    rows = [correlations(clustered(rng), "loss_kernel").set_index("strength").loc["r_q"] for _ in range(60)]
    assert np.mean([row["low"] <= true <= row["high"] for row in rows]) >= 0.85
    alone = [fisher_interval(row["rho"], independent_error(row["rho"], 144)) for row in rows]
    assert np.mean([row["high"] - row["low"] for row in rows]) > np.mean([high - low for low, high in alone])


def test_errors_are_those_of_samples_of_whole_layers():
    """Brute force, with ties and layers of two sizes: scipy's correlation of the heads of each sample."""
    rng = np.random.default_rng(7)
    layer = np.repeat(np.arange(9), [3, 5] * 4 + [3])
    r_q = rng.integers(0, 6, size=len(layer)).astype(float)
    heads = pd.DataFrame({"layer": layer, "r_q": r_q, "loss_kernel": r_q.round(-1) + rng.integers(0, 9, len(layer))})
    found = correlations(heads, "loss_kernel").iloc[0]
    of_layer, draw = [rows for _, rows in heads.groupby("layer")], np.random.default_rng(strength.SEED)
    samples = [pd.concat([of_layer[i] for i in draw.integers(9, size=9)]) for _ in range(strength.DRAWS)]
    rhos = [stats.spearmanr(sample["r_q"], sample["loss_kernel"]).statistic for sample in samples]
    assert np.arctanh(found["high"]) - np.arctanh(found["rho"]) == pytest.approx(1.959964 * np.std(np.arctanh(rhos)))


def test_measures_that_go_alike_are_not_decided_and_one_that_goes_better_is():
    alike = correlations(clustered(np.random.default_rng(4)), "loss_kernel").set_index("strength")
    assert alike.loc["r_q", "behind"] == pytest.approx(alike["rho"].max() - alike.loc["r_q", "rho"])
    assert not (alike.loc[["r_q", "position_share"], "behind_low"] > 0).any()
    better = correlations(clustered(np.random.default_rng(4), better=0.9), "loss_kernel")
    assert (better.set_index("strength").loc[["r_q", "position_share"], "behind_low"] > 0).all()
    said = best_sentence(better)
    assert said.startswith(f"What goes with the loss most is {STRENGTHS[SPREAD]}")
    assert f"more than {STRENGTHS['r_q']} and {STRENGTHS['position_share']}, beyond the interval" in said
    assert "is not decided" not in said


def test_the_card_counts_heads_beyond_two_errors_and_names_the_largest(ablated):
    def loss(rows):
        values = np.zeros(len(rows))
        values[3], values[5], values[7] = 0.05, 0.0019, -0.004
        return values

    tables, heads = ablated(loss)
    text = card_text(tables, "ablation")
    head = heads.iloc[3]
    assert f"Of {len(heads)} heads, 1 cost loss significantly when edited, and 1 gain" in text
    assert f"0.0500 ± 0.0010 nats per token, of L{int(head['layer'])}H{int(head['head'])}" in text


def test_nothing_is_claimed_without_errors_or_beyond_an_interval(ablated):
    tables, _ = ablated(lambda rows: np.random.default_rng(3).normal(size=len(rows)), np.nan)
    text = card_text(tables, "ablation")
    assert "too few documents for errors, so nothing is claimed" in text
    assert "No measure of strength here goes with the loss: every interval holds 0." in text


def test_the_figure_has_a_dot_per_head_and_says_the_correlation(ablated):
    tables, heads = ablated(lambda rows: rows["r_q"].abs().to_numpy())
    figure = drawing(tables, "ablation")
    dots = sum(len(line.get_xdata()) for line in figure.axes[0].lines if str(line.get_gid() or "").startswith("r_q"))
    titles = [axes.get_title() for axes in figure.axes]
    assert "rank correlation +1.00" in titles[0]
    assert dots == len(heads)


def test_results_without_an_ablation_have_no_figure(tmp_path):
    invented(tmp_path, 3)
    tables = build_tables(load_results(tmp_path))
    assert not EVERY_FIGURE["ablation"].figure.exists(tables.own)


def test_heads_that_were_edited_join_the_list_of_heads(ablated):
    tables, heads = ablated(lambda rows: np.full(len(rows), 0.25))
    joined = tables.own.table("heads")
    edited = joined[joined["loss_kernel"].notna()]
    assert len(edited) == len(heads)
    assert isinstance(joined, pd.DataFrame)


# --- groups -----------------------------------------------------------------------------------------


def group_row(model, edit, excess, error, reach, outcome="all", group="position-dominated"):
    return {
        "model": model, "edit": edit, "group": group, "outcome": outcome, "windows": "own", "heads": 12, "documents": 8,
        "draws": 4, "chosen": 0.1 + excess, "controls": 0.1, "excess": excess, "excess_se": error,
        "low": excess - reach, "high": excess + reach, "exceeds": 4,
    }  # fmt: skip


@pytest.fixture
def grouped(tmp_path):
    """Results whose heads were edited in groups, at two of three checkpoints."""
    results, _ = invented(tmp_path, 3, heads=8)
    early, late = results.study.names[1:]
    rows = [
        group_row(early, "kernel", 5.0, 0.1, 0.3),
        group_row(late, "kernel", 0.05, 0.01, 0.03),
        group_row(late, "kernel", 0.5, 0.1, 0.3, outcome="repeated"),
        group_row(late, "zero", 0.02, 0.01, 0.03),
        group_row(late, "flatten", -0.04, 0.01, 0.03),
        group_row(late, "shuffle", 0.2, np.nan, np.nan),
    ]
    pd.DataFrame(rows)[list(GROUPS.written)].to_csv(tmp_path / GROUPS_FILE, index=False)
    return build_tables(load_results(tmp_path))


def test_the_card_of_groups_claims_what_exceeds_its_interval(grouped):
    text = card_text(grouped, "ablation_groups")
    assert "Heads chosen as position-dominated: under zero they do not differ significantly from random heads" in text
    assert "heads under kernel, flatten and shuffle are not matched for how much these edits remove" in text
    assert "matter more than" not in text
    assert "shuffle of position-dominated (12 heads): +0.3000 against +0.1000 for random heads; too few" in text
    assert "kernel of position-dominated (12 heads), repeated: +0.60 against +0.10 for random heads" in text
    assert "difference +0.50 ± 0.10 (+0.20 to +0.80): more." in text
    assert "difference −0.040 ± 0.010 (−0.070 to −0.010): less." in text
    assert "+5.1" not in text  # the last checkpoint with groups


def test_the_figure_of_groups_has_a_mark_for_each_edit_and_its_interval(grouped):
    figure = drawing(grouped, "ablation_groups")
    left, right = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["kernel", "flatten", "shuffle", "zero"]
    marks = {line.get_gid(): line.get_xdata() for axes in (left, right) for line in axes.lines if line.get_gid()}
    np.testing.assert_allclose(marks["chosen 0"], [0.15, 0.06, 0.3, 0.12])
    np.testing.assert_allclose(marks["excess 0"], [0.05, -0.04, 0.2, 0.02])
    (interval,) = [each for each in right.collections if each.get_gid() == "interval 0"]
    np.testing.assert_allclose(interval.get_segments()[0][:, 0], [0.02, 0.08])


def test_models_are_all_shown_and_told_and_none_is_the_last(grouped, tmp_path):
    record = json.loads((tmp_path / "provenance.json").read_text())
    (tmp_path / "provenance.json").write_text(json.dumps({**record, "kind": "models"}))
    tables = build_tables(load_results(tmp_path))
    text = card_text(tables, "ablation_groups")
    assert "+5.1" in text  # of the first of the two
    figure = drawing(tables, "ablation_groups")
    assert len(figure.axes) == 4  # two panels each
    assert "Across Models" in figure.texts[0].get_text()


# --- over training ----------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path):
    """Four checkpoints, three with ablated heads: head 0 of each layer matters from the second on, head 1 once."""
    results, _ = invented(tmp_path, 4, heads=4)
    names, rows = results.study.names[1:], []
    for place, name in enumerate(names):
        for layer in range(3):
            for head in range(4):
                loss = 0.0
                if head == 0 and place >= 1:
                    loss = 0.5
                if head == 1 and place == 0:
                    loss = 0.5
                if head == 2:
                    loss = 0.5 if layer == 0 else 0.01
                rows.append({"model": name, "layer": layer, "head": head, "window": 64, "loss_kernel": loss})
    empty = {f"loss_{edit}{end}": np.nan for edit in EDITS for end in ("", "_se")}
    table = pd.DataFrame(rows).assign(**{SPREAD: np.nan}, **{k: v for k, v in empty.items() if k != "loss_kernel"})
    table.assign(loss_kernel_se=0.1).to_csv(tmp_path / FILE, index=False)
    course = [
        {"model": name, "edit": "kernel", "windows": "own", "heads": 12, "documents": 8, "mean": 0.1 * place,
         "mean_se": 0.01, "costly": 4, "gaining": 0}
        for place, name in enumerate(names)
    ]  # fmt: skip
    pd.DataFrame(course)[list(COURSE.written)].to_csv(tmp_path / COURSE_FILE, index=False)
    return build_tables(load_results(tmp_path)), names


def test_a_head_begins_to_matter_where_it_costs_from_then_on(trained):
    tables, names = trained
    found = begins_at(tables.own).set_index("model")
    # From the first: head 2 of layer 0. From the second: three heads 0. Heads 1 cost once and then no more.
    assert list(found.loc[list(names), "begin"]) == [1, 3, 0]
    assert list(found.loc[list(names), "so_far"]) == [1, 4, 4]
    assert set(found["heads"]) == {12}


def test_the_card_says_since_when_heads_matter(trained):
    text = card_text(trained[0], "ablation_course")
    assert "Of 12 heads, 4 matter at the end; they begin at step 1 (1) and step 2 (3)." in text
    assert "the mean over heads goes from 0.000 ± 0.010 at step 1 to 0.200 ± 0.010 nats per token at step 3" in text
    assert "no change" not in text


def test_the_figure_over_training_leaves_room_for_checkpoints_without_an_ablation(trained):
    figure = drawing(trained[0], "ablation_course")
    lines = {line.get_gid(): line for line in figure.axes[1].lines}
    np.testing.assert_array_equal(lines["costly kernel"].get_xdata(), [1, 2, 3])
    np.testing.assert_array_equal(lines["costly kernel"].get_ydata(), [4, 4, 4])
    np.testing.assert_array_equal(lines["begun kernel"].get_ydata(), [1, 4, 4])
    assert figure.axes[1].get_ylim()[0] == 0


def test_lines_join_ablated_checkpoints_over_one_that_was_not(trained):
    tables, names = trained
    for file in (FILE, COURSE_FILE):
        table = tables.own.head_tables[file]
        tables.own.head_tables[file] = table[table["model"] != names[1]]
    figure = drawing(tables, "ablation_course")
    for gid, heads in (("costly kernel", [4, 4]), ("begun kernel", [1, 4])):
        (line,) = [each for each in figure.axes[1].lines if each.get_gid() == gid]
        np.testing.assert_array_equal(line.get_xdata(), [1, 3])
        np.testing.assert_array_equal(line.get_ydata(), heads)
        assert line.get_linestyle() in ("-", "--")


def test_one_ablated_checkpoint_has_no_course(ablated):
    tables, _ = ablated(lambda rows: np.full(len(rows), 0.25))
    assert begins_at(tables.own) is None
    assert not EVERY_FIGURE["ablation_course"].figure.exists(tables.own)
