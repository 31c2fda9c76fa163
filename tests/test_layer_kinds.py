"""Kinds of layers: how they encode position and how far they see, by hand."""

import numpy as np
import pandas as pd
import pytest

from qkscope.lenses.kind_of_layer import kinds_in_order, with_layer_kind
from qkscope.lenses.layer_kinds.table import layer_kinds


def heads(rows):
    """Rows of (model, layer, rotary, attention, window, r_q)."""
    table = pd.DataFrame(rows, columns=["model", "layer", "rotary", "attention", "attention_window", "r_q"])
    return table.assign(head=0, r_k=0.1, explained_variance=0.5, depth=0.0, window=64.0)


def test_rotary_and_nope_only_where_a_model_has_both():
    rows = [("a", 0, "nope", "full", np.nan, 0.2), ("a", 1, "rotary", "full", np.nan, 0.6),
            ("b", 0, "rotary", "full", np.nan, 0.5)]  # fmt: skip
    table = layer_kinds(heads(rows), ["a", "b"])
    assert table[["model", "layer_kind", "heads", "r_q"]].to_numpy().tolist() == [
        ["a", "rotary", 1, 0.6],
        ["a", "NoPE", 1, 0.2],
    ]
    assert layer_kinds(heads(rows).assign(rotary="rotary"), ["a", "b"]) is None
    assert layer_kinds(heads(rows).assign(rotary=["unknown", "rotary", "unknown"]), ["a", "b"]) is None


def test_sliding_layers_are_told_from_full_ones():
    rows = [("gemma", 0, "rotary", "sliding", 512, 0.84), ("gemma", 1, "rotary", "sliding", 512, 0.80),
            ("gemma", 2, "rotary", "full", np.nan, 0.45), ("llama", 0, "rotary", "full", np.nan, 0.5)]  # fmt: skip
    table = layer_kinds(heads(rows), ["gemma", "llama"])
    found = table[["model", "layer_kind", "attention", "heads", "r_q"]].to_numpy().tolist()
    assert found == [
        ["gemma", "rotary, full", "full", 1, 0.45],
        ["gemma", "rotary, sliding 512", "sliding", 2, pytest.approx(0.82)],
    ]
    assert table["attention_window"].tolist()[1] == 512


def test_kinds_without_a_known_position_encoding_are_told_by_their_reach():
    rows = [("a", 0, "unknown", "chunked", 8192, 0.1), ("a", 1, "unknown", "", np.nan, 0.2)]
    assert with_layer_kind(heads(rows))["layer_kind"].tolist() == ["chunked 8,192", "full"]


def test_the_index_and_order_of_a_table_stay():
    rows = [("a", i, kind, "full", np.nan, 0.1 * i) for i, kind in enumerate(["nope", "rotary", "nope"])]
    table = heads(rows).set_axis([7, 3, 7])
    named = with_layer_kind(table)
    assert named.index.tolist() == [7, 3, 7]
    assert named["layer_kind"].tolist() == ["NoPE", "rotary", "NoPE"]
    pd.testing.assert_frame_equal(named.drop(columns="layer_kind"), table)


def test_kinds_have_one_order():
    kinds = ["NoPE, full", "rotary, chunked 8,192", "rotary, sliding 4,096", "", "rotary, sliding 512", "rotary, full"]
    assert kinds_in_order([*kinds, *kinds]) == [
        "rotary, full", "rotary, sliding 512", "rotary, sliding 4,096", "rotary, chunked 8,192", "NoPE, full",
    ]  # fmt: skip
