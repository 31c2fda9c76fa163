"""What an ablation's figure and card say of its heads, against scipy and numbers worked out by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from published_table import invented
from qkscope.ablate.edits import KINDS
from qkscope.lenses.ablation.table import EDITS, FILE, spearman_interval, strengths_at
from qkscope.lenses.at_window import build_tables
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
            **{f"loss_{edit}{end}": np.nan for edit in EDITS for end in ("", "_se")}
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


def test_the_interval_covers_in_simulation():
    """Pairs with a known rank correlation: 95 % intervals hold it in 93 to 97 of 100 samples."""
    rng, n, r = np.random.default_rng(1), 64, 0.5
    true = 6 / np.pi * np.arcsin(r / 2)  # Spearman's rho of a bivariate normal
    held = 0
    for _ in range(2000):
        x = rng.normal(size=n)
        low, high = spearman_interval(stats.spearmanr(x, r * x + np.sqrt(1 - r * r) * rng.normal(size=n)).statistic, n)
        held += low <= true <= high
    assert 0.93 <= held / 2000 <= 0.97


def test_the_card_counts_heads_beyond_two_errors_and_names_the_largest(ablated):
    def loss(rows):
        values = np.zeros(len(rows))
        values[3], values[5], values[7] = 0.05, 0.0019, -0.004
        return values

    tables, heads = ablated(loss)
    text = card_text(tables, "ablation")
    head = heads.iloc[3]
    assert f"Of {len(heads)} heads, 1 cost loss beyond two errors when edited, and 1 gain" in text
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
    assert dots in (0, len(heads)) or dots >= len(heads)


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
