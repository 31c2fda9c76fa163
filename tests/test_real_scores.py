"""The check of the split of scores against real scores, in small: a tiny model, and vectors made to agree or not.

`benchmarks/score_split.py` runs the same code on a pretrained model.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from families import tiny, tokens
from qkscope import Moments
from qkscope.layers import LayerFacts
from qkscope.lenses.score.table import SHARES
from qkscope.moments.layout import capture_layout

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import score_split as real

LENGTH, WIDTH, DOCUMENTS = 96, 4, 40


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("gemma3_text", {"sliding_window": 16})])
def test_the_position_part_of_a_models_real_scores_is_that_of_the_sums(family, changes):
    """Position is the same number by either way: all other parts depend on how queries and keys go together."""
    model = tiny(family, num_hidden_layers=2, **changes)
    heads = real.compared(model, tokens(rows=5, length=48).tolist(), buckets=4)
    assert len(heads) == 2 * 4
    np.testing.assert_allclose(heads["position_ratio"], 1.0, rtol=1e-4)
    np.testing.assert_allclose(heads["query_position_ratio"], 1.0, rtol=0.1)
    for name in SHARES:
        assert heads[f"{name}_sums"].corr(heads[f"{name}_real"], method="spearman") > 0.5


def made(facts, tie=0.0, apart=0.0):
    """A layer's real scores: queries look by `tie` where keys of their document vary; documents' keys are `apart`."""
    rng, t = np.random.default_rng(0), np.linspace(0, 1, LENGTH)[:, None]
    documents = []
    for _ in range(DOCUMENTS):
        k = rng.normal(size=(facts.kv_heads, LENGTH, WIDTH)) + apart * rng.normal(size=(facts.kv_heads, 1, WIDTH))
        q = rng.normal(size=(facts.q_heads, LENGTH, WIDTH)) + 1.0
        topic = rng.normal(size=WIDTH)
        k += 2 * bool(tie) * rng.normal(size=(*k.shape[:2], 1)) * topic
        q += tie * rng.normal(size=(*q.shape[:2], 1)) * topic
        documents.append((q + t, k - 3 * t))
    moments = Moments(capture_layout(LENGTH, buckets=4, groups=4), [facts])
    for number, (q, k) in enumerate(documents):
        moments.add(0, q[None], k[None], groups=number % 4)
    layer = real.RealLayer.of(moments, 0)
    for q, k in documents:
        layer.add(torch.from_numpy(q).float(), torch.from_numpy(k).float())
    return real.rows_of(moments, 0, layer, DOCUMENTS), documents


FACTS = LayerFacts(0, 4, 2, WIDTH)


def test_independent_queries_and_keys_have_the_scores_that_sums_predict():
    heads, _ = made(FACTS)
    for name in ("position", "query_position", "preference", "query", "total"):
        np.testing.assert_allclose(heads[f"{name}_ratio"], 1.0, rtol=0.03)
    np.testing.assert_allclose(heads["own_document"], 1.0, rtol=0.03)
    np.testing.assert_allclose(heads["together"], 0.0, atol=0.02)


def test_dependence_is_noticed():
    """Queries that look for what their document is about; and documents whose keys differ less than those of all."""
    plain, _ = made(FACTS)
    tied, _ = made(FACTS, tie=1.0)
    assert (tied["own_document"] > 1.05).all()
    assert (plain["own_document"] < 1.05).all()
    apart, _ = made(FACTS, apart=1.0)
    assert (apart["preference_ratio"] < 0.7).all()  # half of the keys' variance is between documents
    assert (apart["other_document"] < 0.7).all()


def test_variances_and_scores_by_distance_are_those_of_every_pair():
    facts = LayerFacts(0, 1, 1, WIDTH, attention="sliding", attention_window=30)
    heads, documents = made(facts)
    whole, kernel = [], np.zeros(LENGTH)
    for q, k in documents:
        scores = q[0] @ k[0].T
        whole += [scores[i, max(0, i - 29) : i + 1].var() for i in range(LENGTH)]
        kernel += [np.diagonal(scores, -distance).mean() for distance in range(LENGTH)]
    kernel /= DOCUMENTS
    by_distance = np.mean([kernel[: i + 1].var() for i in range(LENGTH)])
    assert heads["by_distance"][0] == pytest.approx(by_distance / np.mean(whole), rel=1e-3)


def test_the_page_gets_the_tables(tmp_path):
    heads, _ = made(FACTS)
    page = tmp_path / "score.md"
    page.write_text("before\n<!-- real scores -->\nold\n<!-- end -->\nafter\n")
    real.write_section(real.table(heads), page)
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| `position_share` |" in text
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="no section"):
        real.write_section("", page)
