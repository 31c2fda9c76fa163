"""The comparison of the score breakdown with all actual scores, in small: a tiny model, and vectors made by hand.

`benchmarks/score_split.py` runs the same code on trained models.
"""

import json
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from families import tiny, tokens
from qkscope.layers import LayerFacts
from rope_world import HALVES, WIDTH, turn

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import score_split as real

LENGTH = 24


def rotated(documents, tie=0.0, noise=1.0, seed=0, length=LENGTH):
    """Queries and keys of one head, which RoPE rotates; queries resemble keys of their own document by `tie`."""
    rng = np.random.default_rng(seed)
    k = rng.normal(size=WIDTH) + noise * rng.normal(size=(documents, length, WIDTH))
    q = rng.normal(size=WIDTH) + noise * rng.normal(size=(documents, length, WIDTH)) + tie * (k - k.mean(axis=(0, 1)))
    return [turn(x, np.arange(length), HALVES) for x in (q, k)]


@pytest.mark.parametrize("reach", [{}, {"attention": "sliding", "attention_window": 7}])
def test_actual_parts_are_covariances_of_all_different_documents(reach):
    """Every choice of different documents in turn, query by query."""
    facts = LayerFacts(0, 1, 1, WIDTH, **reach)
    q, k = rotated(5, tie=0.5)
    scores = np.einsum("atd,bsd->abts", q, k)

    def mean_covariance(one, other):
        found = []
        for t in range(LENGTH):
            seen = slice(max(0, t - 6) if reach else 0, t + 1)
            found.append(np.cov(one[t, seen], other[t, seen], ddof=0)[0, 1])
        return np.mean(found)

    def over(count, choose):
        return np.mean([mean_covariance(*choose(*chosen)) for chosen in permutations(range(5), count)])

    position = over(2, lambda a, b: (scores[a, a], scores[b, b]))
    by_key = over(3, lambda a, b, d: (scores[a, d], scores[b, d]))
    by_query = over(3, lambda a, b, d: (scores[d, a], scores[d, b]))
    found = real.actual_parts(q, k, facts)
    total = np.mean([mean_covariance(scores[d, d], scores[d, d]) for d in range(5)])
    assert found["total"] == pytest.approx(total)
    assert found["position"] == pytest.approx(position)
    assert found["preference"] == pytest.approx(by_key - found["independent_position"])
    assert found["query_position"] == pytest.approx(by_query - found["independent_position"])
    assert sum(found[part] for part in real.PARTS) == pytest.approx(total)


def test_actual_parts_are_unbiased_with_few_documents():
    """Of four documents at a time, the mean over many is the truth, which is known for noise without a direction."""
    facts = LayerFacts(0, 1, 1, WIDTH)
    found = []
    rng = np.random.default_rng(0)
    means = rng.normal(size=(2, WIDTH))
    t = np.arange(LENGTH)
    for _ in range(150):
        q, k = (turn(mean + rng.normal(size=(4, LENGTH, WIDTH)), t, HALVES) for mean in means)
        parts = real.actual_parts(q, k, facts)
        found.append([parts[name] for name in (*real.PARTS, "independent_position")])
    mu, m = (turn(mean, t, HALVES) for mean in means)
    seen = 1 - 1 / (t + 1)
    position = np.mean([(m[: i + 1] @ mu[i]).var() for i in t])
    spread = np.mean([m[: i + 1].var(axis=0).sum() for i in t])
    # A mean query of many documents has no noise: preference and query-position are those of the means alone.
    expected = np.array([position, spread, np.mean(seen) * (means[0] ** 2).sum(), WIDTH * np.mean(seen), position])
    error = np.std(found, axis=0, ddof=1) / np.sqrt(len(found))
    assert (abs(np.mean(found, axis=0) - expected) < 4 * error).all()
    assert (error < 0.15 * expected).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("gemma3_text", {"sliding_window": 16, "head_dim": 16})]
)
def test_a_models_sums_are_compared_with_its_scores(family, changes):
    model = tiny(family, num_hidden_layers=2, **changes)
    found = real.compared(model, tokens(rows=8, length=64).tolist(), count=4)
    assert set(found) == {
        "all scores", "independent position", "one bucket", "8 buckets", "16 buckets", "32 buckets",
        "16 buckets, lines only",
    }  # fmt: skip
    for name, shares in found.items():
        assert shares.shape == (1 if name == "independent position" else 4, 4)
    for name in ("all scores", "16 buckets"):
        np.testing.assert_allclose(found[name].sum(axis=0), 1.0)
    case = {"context": 64, "independent_position": 0.25, "methods": real.summary(found)}
    json.dumps(case)
    text = real.table({"tiny": case})
    position = found["all scores"][0].mean()
    assert f"| tiny | 64 | position | {position:.3f} (0.250) | " in text
    assert text.count("\n| tiny | ") == 4


def test_sums_agree_with_all_scores_where_queries_and_keys_are_independent():
    """Noise without a direction: what sums take from buckets is then exact but for noise."""
    facts = LayerFacts(0, 1, 1, WIDTH, "rotary", rotation=HALVES)
    q, k = rotated(40, noise=0.5, length=64)
    parts = real.actual_parts(q, k, facts)
    expected = [parts[name] / parts["total"] for name in real.PARTS]
    found = real.from_sums((q[:, None], k[:, None]), facts)
    for name in ("one bucket", "8 buckets", "16 buckets"):
        np.testing.assert_allclose(found[name][:, 0], expected, atol=0.015)
    assert abs(found["16 buckets, lines only"][:, 0] - expected).max() > 0.04


def test_the_page_gets_the_table(tmp_path):
    page = tmp_path / "score.md"
    page.write_text("before\n<!-- real scores -->\nold\n<!-- end -->\nafter\n")
    real.write_section("| new |", page)
    assert page.read_text() == "before\n<!-- real scores -->\n\n| new |\n\n<!-- end -->\nafter\n"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="no section"):
        real.write_section("", page)
