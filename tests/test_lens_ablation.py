"""What the tables of an ablation say of its heads, against scipy and numbers worked out by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from published_table import invented
from qkscope.ablate.edits import EDIT_MAKERS
from qkscope.lenses import ablation as strength
from qkscope.lenses.ablation import (
    COURSE,
    COURSE_FILE,
    EDITS,
    FILE,
    SPREAD,
    begins_at,
    correlations,
    fisher_interval,
    independent_error,
    strengths_at,
)
from qkscope.lenses.views import build_tables
from qkscope.results.read import load_results


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
        table.to_csv(folder / f"{FILE}.csv", index=False)
        return build_tables(load_results(folder)), last

    return write


def test_every_edit_has_a_column():
    assert set(EDITS) == set(EDIT_MAKERS)


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


def test_heads_that_were_edited_join_the_list_of_heads(ablated):
    tables, heads = ablated(lambda rows: np.full(len(rows), 0.25))
    joined = tables.own.table("heads")
    edited = joined[joined["loss_kernel"].notna()]
    assert len(edited) == len(heads)
    assert isinstance(joined, pd.DataFrame)


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
    table.assign(loss_kernel_se=0.1).to_csv(tmp_path / f"{FILE}.csv", index=False)
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
