"""Profiles along component 0 and the drift axis against raw vectors, numbers worked out by hand, and properties."""

from itertools import pairwise

import numpy as np
import pytest

from qkscope import Moments
from qkscope.layers import LayerFacts
from qkscope.lenses.profile import BEND, PROFILE, bend, profile
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import Layout, capture_layout
from qkscope.stats.jackknife import jackknife_error
from reference import reference_rows

WIDTH, LENGTH = 6, 64
FACTS = LayerFacts(0, 4, 2, WIDTH)
LAYOUT = capture_layout(LENGTH, buckets=8, groups=5, common=16)
GROUPS = [0, 1, 2, 3, 4, 0, 1]
ENDS = {"pc0": "", "a": "_a"}


def vectors():
    """Queries and keys with a bend and a line in position, and documents that differ."""
    rng, t, rows = np.random.default_rng(0), np.arange(LENGTH), len(GROUPS)
    found = []
    for count in (4, 2):
        x = rng.normal(size=(rows, count, LENGTH, WIDTH)) @ rng.normal(size=(count, WIDTH, WIDTH))
        x += 0.3 * rng.normal(size=(rows, count, 1, WIDTH)) + 3 * rng.normal(size=(1, count, 1, WIDTH))
        x += np.sqrt(t)[:, None] * rng.normal(size=(1, count, 1, WIDTH)) * 0.6
        x[..., 0] += 2 * np.cos(t / 9)
        found.append(x)
    return found


def captured(q, k, groups=GROUPS, layout=LAYOUT, facts=FACTS):
    moments = Moments(layout, [facts])
    moments.add(0, q, k, groups=groups)
    return moments


def flat(x, window, skip):
    """(tokens, width) of a head with their positions."""
    return x[:, skip:window].reshape(-1, x.shape[-1]), np.tile(np.arange(float(skip), window), len(x))


def axis_directions(q, k, window, skip):
    """Component 0 by sklearn, oriented as published, and the drift axis by a fit of the pool on position."""
    from sklearn.decomposition import PCA

    (q, t_q), (k, t_k) = flat(q, window, skip), flat(k, window, skip)
    pool, t = np.vstack([q, k]), np.concatenate([t_q, t_k])
    direction = PCA(1, svd_solver="full").fit(pool).components_[0]
    row = reference_rows(q, k, t_q, t_k, 1).iloc[0]
    sign = 1 if np.isclose(np.corrcoef(q @ direction, t_q)[0, 1], row["r_q"]) else -1
    slope = np.linalg.lstsq(np.column_stack([np.ones(len(t)), t]), pool, rcond=None)[0][1]
    return {"pc0": sign * direction, "a": slope / np.linalg.norm(slope)}


def edges_of(window, skip):
    return [edge for edge in LAYOUT.edges if skip <= edge <= window]


def brute_bend(x, direction, edges):
    """Variance between bucket means as a share of all, and the share of it that a weighted line leaves over."""
    tokens = x[:, edges[0] : edges[-1]] @ direction
    parts = [x[:, a:b] @ direction for a, b in pairwise(edges)]
    means = np.concatenate([np.full(part.size, part.mean()) for part in parts])  # each token's bucket mean
    places = np.concatenate(
        [np.full(part.size, (a + b - 1) / 2) for part, a, b in zip(parts, edges[:-1], edges[1:], strict=True)]
    )
    bent = 1 - np.corrcoef(means, places)[0, 1] ** 2 if len(edges) > 3 else np.nan
    return means.var() / tokens.var(), bent


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "skip"), [(64, 0), (64, 1), (16, 0), (8, 1)])
def test_every_profile_is_that_of_the_raw_vectors(window, skip):
    q, k = vectors()
    found = profile(layer_sums(captured(q, k), 0, [3, 0], window, skip=skip))
    edges = edges_of(window, skip)
    for i, head in enumerate([3, 0]):
        along = axis_directions(q[:, head], k[:, head // 2], window, skip)
        for axis, direction in along.items():
            for kind, x in (("q", q[:, head]), ("k", k[:, head // 2])):
                for bucket, (start, end) in enumerate(pairwise(edges)):
                    projected = x[:, start:end] @ direction
                    assert found[f"{kind}_{axis}"][i, bucket] == pytest.approx(projected.mean(), abs=1e-7)
                    assert found[f"{kind}_{axis}_sd"][i, bucket] == pytest.approx(projected.std(), abs=1e-6)
                    assert found["tokens"][i, bucket] == projected.size


@pytest.mark.parametrize(("window", "skip"), [(64, 0), (64, 1), (16, 0), (8, 0), (8, 1)])
def test_every_bend_is_that_of_the_raw_vectors(window, skip):
    """Over one or two buckets a line says nothing, so nothing is said."""
    q, k = vectors()
    found = bend(layer_sums(captured(q, k), 0, [3, 0], window, skip=skip))
    edges = edges_of(window, skip)
    for i, head in enumerate([3, 0]):
        for axis, direction in axis_directions(q[:, head], k[:, head // 2], window, skip).items():
            for kind, x in (("q", q[:, head]), ("k", k[:, head // 2])):
                mine = [found[f"{name}_{kind}{ENDS[axis]}"][i] for name in ("between", "bend")]
                np.testing.assert_allclose(mine, brute_bend(x, direction, edges), rtol=0, atol=1e-9)


def one_head(x, edges):
    """bend.csv of one document whose queries and keys are x (tokens,)."""
    x = np.asarray(x, dtype=float)[None, None, :, None]
    sums = layer_sums(captured(x, x, [0], Layout(edges, 1), LayerFacts(0, 1, 1, 1)), 0, [0])
    return {name: float(values[0]) for name, values in bend(sums).items()}


def test_bends_worked_out_by_hand():
    line = one_head([0, 1, 2, 3, 4, 5], (0, 2, 4, 6))  # bucket means 0.5, 2.5, 4.5: variance 8/3 of 35/12
    assert (line["between_q"], line["bend_q"]) == pytest.approx((32 / 35, 0), abs=1e-12)
    arch = one_head([0, 0, 1, 1, 0, 0], (0, 2, 4, 6))
    assert (arch["between_q"], arch["bend_q"]) == pytest.approx((1, 1))
    # Means 0, 0, 3 at 0.5, 2.5, 4.5: variance 2, covariance with place 2, variance of place 8/3; 2²/(8/3) = 3/2 of 2.
    step = one_head([0, 0, 0, 0, 3, 3], (0, 2, 4, 6))
    assert step["bend_k"] == pytest.approx(1 / 4)
    flat = one_head([1, -1, 1, -1, 1, -1], (0, 2, 4, 6))
    assert flat["between_q"] == pytest.approx(0, abs=1e-12)
    assert np.isnan(flat["bend_q"])
    still = one_head(np.ones(6), (0, 2, 4, 6))
    assert np.isnan([still["between_q"], still["bend_q"]]).all()


def test_no_drift_at_all_has_no_axis():
    x = np.array([1.0, -1, -1, 1, 1, -1, -1, 1])[None, None, :, None]
    sums = layer_sums(captured(x, x, [0], Layout((0, 4, 8), 1), LayerFacts(0, 1, 1, 1)), 0, [0])
    assert np.isnan(profile(sums)["q_a"]).all()
    assert np.isnan(bend(sums)["bend_q_a"]).all()


def test_a_bucket_without_tokens_is_empty_and_counts_for_nothing():
    q, k = vectors()
    positions = np.where((np.arange(LENGTH) >= 8) & (np.arange(LENGTH) < 16), -1, np.arange(LENGTH))
    moments = Moments(LAYOUT, [FACTS])
    moments.add(0, q, k, positions=positions, groups=GROUPS)
    sums = layer_sums(moments, 0, [0])
    found = profile(sums)
    assert found["tokens"][0, 2] == 0
    assert np.isnan([found["q_pc0"][0, 2], found["k_a_sd"][0, 2]]).all()
    direction = sums.principal.directions[0, :, 0]
    kept = np.concatenate([q[:, 0, :8], q[:, 0, 16:]], axis=1) @ direction
    means = [(q[:, 0, a:b] @ direction).mean() for a, b in ((0, 1), (1, 8), (16, 24))]
    np.testing.assert_allclose(found["q_pc0"][0, [0, 1, 3]], means, atol=1e-9)
    every = np.concatenate(
        [np.full(7 * (b - a), (q[:, 0, a:b] @ direction).mean())
         for a, b in [(0, 1), (1, 8), *((i, i + 8) for i in range(16, 64, 8))]]
    )  # fmt: skip
    assert bend(sums)["between_q"][0] == pytest.approx(every.var() / kept.var(), abs=1e-9)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "skip"), [(16, 1), (64, 1)])
def test_errors_are_those_of_profiles_without_each_group(window, skip):
    """Directions are found again without each group. Groups are kept in float32, and have no squares at position 0."""
    q, k = vectors()
    rows = checkpoint_rows(captured(q, k), [PROFILE, BEND], RowSettings(own=window, skip=skip), model="m")
    edges, sizes = edges_of(window, skip), np.bincount(GROUPS)
    for head in range(4):
        here, keys = q[:, head], k[:, head // 2]
        whole = axis_directions(here, keys, window, skip)
        for axis in ("pc0", "a"):
            found = []
            for group in (None, *range(5)):
                kept = [row for row, of in enumerate(GROUPS) if of != group]
                direction = axis_directions(here[kept], keys[kept], window, skip)[axis]
                direction = direction * np.sign(direction @ whole[axis])
                means = [(here[kept, a:b] @ direction).mean() for a, b in pairwise(edges)]
                found.append([*means, *brute_bend(keys[kept], direction, edges)])
            expected = jackknife_error(found[0], found[1:], sizes)
            table, row = rows[PROFILE.table], rows[BEND.table].set_index("head").loc[head]
            mine = table[table["head"] == head][f"q_{axis}_se"].to_numpy()
            np.testing.assert_allclose(mine, expected[:-2], rtol=5e-3)
            ends = [row[f"between_k{ENDS[axis]}_se"], row[f"bend_k{ENDS[axis]}_se"]]
            np.testing.assert_allclose(np.array(ends, dtype=float), expected[-2:], rtol=5e-3)
    assert not [name for name in rows[PROFILE.table].columns if name.endswith("_sd_se")]


def test_fewer_than_four_groups_leave_errors_empty_and_say_why():
    moments = captured(*vectors(), groups=[0, 1, 2, 0, 1, 2, 0], layout=capture_layout(LENGTH, buckets=8, groups=3))
    for rows in checkpoint_rows(moments, [PROFILE, BEND], RowSettings(), model="m").values():
        if "errors" in rows.columns:
            assert set(rows["errors"]) == {"none: 3 document groups, fewer than 4"}
            assert rows[[name for name in rows.columns if name.endswith("_se")]].isna().all(axis=None)
