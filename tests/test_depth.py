"""Depth bins against pandas.cut and against exact fractions; means against the published cells."""

from fractions import Fraction
from math import ceil

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from published_table import HEADS_PER_BIN, published_heads, read, sampled_heads
from qkscope.lenses.depth_axis import depth_bins
from qkscope.results.schema import depth_of_layers

EDGES = np.linspace(0, 1, 11)


@given(st.lists(st.one_of(st.floats(0, 1), st.sampled_from([*EDGES, *np.nextafter(EDGES[1:], 0)])), min_size=1))
def test_bins_are_those_of_pandas_cut(depths):
    expected = pd.cut(pd.Series(depths), EDGES, include_lowest=True, labels=False)
    assert depth_bins(depths).tolist() == expected.tolist()


def test_every_layer_of_every_model_is_in_the_bin_of_exact_arithmetic():
    for n_layers in range(2, 201):
        layers = np.arange(n_layers)
        exact = [max(0, ceil(Fraction(10 * int(layer), n_layers - 1)) - 1) for layer in layers]
        assert depth_bins(depth_of_layers(layers, n_layers - 1)).tolist() == exact, n_layers


def test_layer_7_of_36_is_in_the_second_bin():
    assert depth_bins(depth_of_layers([7], 35)).tolist() == [1]
    assert depth_bins([0.0, 1.0]).tolist() == [0, 9]


def test_the_only_layer_has_depth_zero():
    assert depth_of_layers([0], 0).tolist() == [0.0]
    assert depth_of_layers([0, 1, 0], [1, 1, 0]).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("depth", [-0.001, 1.001, np.nan])
def test_a_depth_outside_has_no_bin(depth):
    with pytest.raises(ValueError, match="outside"):
        depth_bins([0.5, depth])


def test_heads_per_bin_of_the_published_sample():
    heads = sampled_heads()
    bins = depth_bins(depth_of_layers(heads["layer"].to_numpy(), 35))
    assert tuple(np.bincount(bins, minlength=10)) == HEADS_PER_BIN


@pytest.mark.parametrize(("column", "name"), [("r_q", "heatmap_rq"), ("r_k", "heatmap_rk")])
def test_published_cells(column, name):
    table = published_heads()
    published = read(name)
    means = table.assign(bin=depth_bins(table["depth"])).pivot_table(column, "model", "bin").reindex(published.index)
    assert (means.round(2).to_numpy() == published.to_numpy()).all()
