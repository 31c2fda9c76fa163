"""Sketches of squares before rotation: against brute force, and predictions against a full jackknife."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from qkscope import Moments
from qkscope.lenses.rope import table
from qkscope.lenses.rotated_moments import Planes, Positions, rotated_covariance, rotated_product, rotation_means
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.file import PreRopeFile, _checksum
from qkscope.moments.layout import capture_layout
from qkscope.moments.replicates import before_rotation
from qkscope.stats.jackknife import jackknife_error
from rope_world import (
    HALVES,
    HEADS,
    KEY_HEADS,
    NEIGHBOURS,
    PARTIAL,
    WIDTH,
    YARN,
    brute,
    cloud,
    facts,
    heads,
    turn,
)

NAMES = ("r_q_rope", "r_k_rope", "explained_rope")
DOCUMENTS, LENGTH, COMMON, GROUPS = 48, 64, 16, 8
OF = np.arange(DOCUMENTS) % GROUPS
LAYOUT = capture_layout(LENGTH, buckets=8, groups=GROUPS, common=COMMON)
ROTATIONS = {"halves": HALVES, "neighbours": NEIGHBOURS, "partial": PARTIAL, "yarn": YARN}


def rows(moments, window):
    """One layer's predictions over a window."""
    settings = RowSettings(own=window)
    return checkpoint_rows(moments, [table.TABLE], settings, model="m")[table.TABLE.table]


def captured(rotation, q, k, sketched=2, of=OF, way=None):
    """Moments of vectors at rest, one document after the other."""
    moments = Moments(replace(LAYOUT, unrotated_sketched=sketched), [facts(rotation)], way=way)
    t = np.arange(q.shape[2])
    for row, group in enumerate(of):
        moments.add(0, *(turn(x[[row]], t, rotation) for x in (q, k)), groups=int(group))
    return moments


def own(x, kind, head):
    """The head's vectors, or those of the keys it reads."""
    return x[:, head if kind == "q" else head // (HEADS // KEY_HEADS)]


@pytest.mark.parametrize("way", ["host", "device"])
def test_sketches_are_the_products_of_squares_and_directions(way):
    q, k = heads(rows=DOCUMENTS)
    held = captured(HALVES, q, k, way=way).layer_moments(0)
    for kind, x in (("q", q), ("k", k)):
        unrotated = held[kind].unrotated
        sketch, pivot = unrotated.sketch, unrotated.pivot
        assert sketch.directions.shape == (x.shape[1], WIDTH, 2)
        inner = sketch.directions.swapaxes(1, 2) @ sketch.directions
        np.testing.assert_allclose(inner, np.broadcast_to(np.eye(2), inner.shape), atol=1e-6)
        for number, (start, stop) in enumerate(((1, COMMON), (COMMON, LENGTH))):
            for group in range(GROUPS):
                y = x[group::GROUPS, :, start:stop].swapaxes(0, 1).reshape(x.shape[1], -1, WIDTH) - pivot[:, None]
                squares = y.swapaxes(1, 2) @ y
                found = sketch.y[:, group, number]
                np.testing.assert_allclose(found, squares @ sketch.directions, atol=2e-5 * np.abs(squares).max())
                np.testing.assert_allclose(sketch.power[:, group, number], (y**2).sum(axis=(1, 2)), rtol=1e-4)


def test_several_groups_in_one_batch_are_those_of_one_after_the_other():
    q, k = heads(rows=6)
    of = (0, 1, 2, 3, 4, 0)
    t = np.arange(LENGTH)
    one = captured(HALVES, q, k, of=of).layer_moments(0)
    for way in ("host", "device"):
        moments = Moments(LAYOUT, [facts(HALVES)], way=way)
        moments.add(0, *(turn(x[:1], t, HALVES) for x in (q, k)), groups=of[0])  # decides on directions
        moments.add(0, *(turn(x[1:], t, HALVES) for x in (q, k)), groups=of[1:])
        both = moments.layer_moments(0)
        for kind in ("q", "k"):
            found, wanted = both[kind].unrotated.sketch, one[kind].unrotated.sketch
            np.testing.assert_allclose(found.y, wanted.y, atol=1e-5 * np.abs(wanted.y).max())
            np.testing.assert_allclose(found.power, wanted.power, rtol=1e-4)


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
def test_the_product_with_a_turned_covariance_needs_no_rotated_covariance(rotation):
    rng = np.random.default_rng(0)
    matrix, v = rng.normal(size=(3, WIDTH, WIDTH)), rng.normal(size=(3, WIDTH))
    matrix = matrix + matrix.swapaxes(1, 2)
    by = rotation_means(Planes.of(rotation, WIDTH), Positions.window(40, 3))
    wanted = (rotated_covariance(matrix, by) @ v[..., None])[..., 0]
    np.testing.assert_allclose(rotated_product(matrix, v, by), wanted, atol=1e-12)


@pytest.mark.parametrize("sketched", [2, WIDTH])
def test_covariances_without_a_group_and_up_to_the_common_window(sketched):
    """Along all directions they are exact; along few, total variances are."""
    q, k = heads(rows=DOCUMENTS, drift=3.0)
    moments = captured(HALVES, q, k, sketched)
    for kind, x in (("q", q), ("k", k)):
        for window, stop in ((COMMON, COMMON), (8, COMMON), (32, LENGTH), (LENGTH, LENGTH)):
            for group in (None, 2):
                of = x[group != OF, :, 1:stop].swapaxes(0, 1).reshape(x.shape[1], -1, WIDTH)
                wanted = np.stack([np.cov(each.T, bias=True) for each in of])
                whole = moments.before_rotation(0, kind, window)
                found = moments.before_rotation(0, kind, window, without=group, whole=None if group is None else whole)
                traces = [np.trace(each, axis1=1, axis2=2) for each in (found.cov, wanted)]
                np.testing.assert_allclose(*traces, rtol=1e-4)
                np.testing.assert_array_equal(
                    found.cov, moments.before_rotation(0, kind, window, without=group).cov
                )  # whether or not the whole was known
                if sketched == WIDTH:
                    np.testing.assert_allclose(found.cov, wanted, atol=1e-4 * np.abs(wanted).max())
                if group is None:
                    assert np.linalg.eigvalsh(found.cov).min() > -1e-6


def full_jackknife(q, k, groups, rotation, window, reach):
    """(heads, names) values and errors from raw vectors without each group's documents: nothing is shared.

    Means are of positions 1 to `window`, covariances of positions 1 to `reach`. A replicate is turned so that its r are
    those of the same component, whose sign the published rule may have changed.
    """
    values, errors = np.empty((2, HEADS, len(NAMES)))

    def numbers(kept, head):
        parts = []
        for x, own in ((q, head), (k, head // 2)):
            of = x[kept, own, 1:reach].reshape(-1, WIDTH)
            parts.append(cloud(x[kept, own, 1:window].reshape(-1, WIDTH).mean(axis=0), np.cov(of.T, bias=True)))
        found = brute(*parts, range(window), rotation)
        return np.array([found[name] for name in NAMES])

    for head in range(HEADS):
        whole = values[head] = numbers(groups >= 0, head)
        replicates = np.stack([numbers(groups != group, head) for group in range(max(groups) + 1)])
        turned = replicates * [-1, -1, 1]
        other = np.abs(turned - whole).sum(axis=1) < np.abs(replicates - whole).sum(axis=1)
        replicates[other] = turned[other]
        for place, name in enumerate(NAMES):
            scale = "fisher" if name.startswith("r_") else "plain"
            errors[head, place] = jackknife_error(whole[place], replicates[:, place], np.ones(len(replicates)), scale)
    return values, errors


def test_errors_are_those_of_a_full_jackknife():
    """Nine of ten within 10 % from two directions of eight, and all but the nearly degenerate from all of them."""
    q, k = heads(rows=DOCUMENTS)
    ratios = {0: [], 2: [], WIDTH: []}
    for rotation in ROTATIONS.values():
        known = {sketched: captured(rotation, q, k, sketched) for sketched in ratios}
        for window, reach in ((64, 64), (32, 64), (16, 16)):
            values, errors = full_jackknife(q, k, OF, rotation, window, reach)
            for sketched, moments in known.items():
                found = rows(moments, window)
                ratios[sketched].append(found[[f"{name}_se" for name in NAMES]].to_numpy() / errors)
                if sketched:
                    close = 0.01 if reach < LENGTH and sketched < WIDTH else 1e-6
                    np.testing.assert_allclose(found[list(NAMES)], values, atol=close)
    near = {sketched: (np.abs(np.array(each) - 1) < 0.1).mean() for sketched, each in ratios.items()}
    assert near[0] < 0.6  # with covariances of all documents
    assert near[2] >= 0.9
    assert near[WIDTH] >= 0.97
    assert np.abs(np.median(ratios[WIDTH], axis=(0, 1)) - 1).max() < 0.01


def test_the_common_window_has_a_covariance_of_its_own():
    """Later tokens vary more, in half of the directions: with the covariance of the whole context, r would be off."""
    q, k = heads(rows=DOCUMENTS)
    for x in (q, k):
        x[:, :, COMMON:] *= np.where(np.arange(WIDTH) % 2, 1.4, 1.0)
    values, _ = full_jackknife(q, k, OF, HALVES, COMMON, COMMON)
    off = {}
    for sketched in (0, 2, WIDTH):
        found = rows(captured(HALVES, q, k, sketched), COMMON)
        off[sketched] = np.abs(found[list(NAMES)].to_numpy() - values)
    assert off[0].max() > 0.05
    assert off[2].mean() < off[0].mean() / 4
    assert off[WIDTH].max() < 1e-6


def test_shards_that_chose_other_directions_and_pivots_add_up():
    q, k = heads(rows=DOCUMENTS)
    whole = rows(captured(HALVES, q, k), LENGTH)
    parts = [captured(HALVES, q[part], k[part], of=OF[part]) for part in (slice(0, 20), slice(20, None))]
    merged = rows(parts[0].merge(parts[1]), LENGTH)
    for name in NAMES:
        np.testing.assert_allclose(merged[name], whole[name], atol=1e-5)
        np.testing.assert_allclose(merged[f"{name}_se"], whole[f"{name}_se"], rtol=0.1)  # other directions


def test_moments_without_sketches_merge_with_moments_that_have_them(tmp_path):
    q, k = heads(rows=DOCUMENTS)
    one, other = captured(HALVES, q[:24], k[:24], of=OF[:24]), captured(HALVES, q[24:], k[24:], 0, OF[24:])
    none = rows(captured(HALVES, q, k, 0), LENGTH)
    for merged in (one.merge(other), other.merge(one)):
        assert merged.layout == replace(LAYOUT, unrotated_sketched=0)
        found = rows(merged, LENGTH)
        for name in NAMES:
            np.testing.assert_allclose(found[f"{name}_se"], none[f"{name}_se"], rtol=1e-3)
        merged.save(tmp_path / "m.safetensors")
        assert Moments.load(tmp_path / "m.safetensors").layer_moments(0)["q"].unrotated.sketch is None


def test_a_file_keeps_sketches_to_three_digits_and_is_read_in_part(tmp_path):
    q, k = heads(rows=DOCUMENTS)
    moments, path = captured(HALVES, q, k), tmp_path / "m.safetensors"
    moments.save(path)
    for window in (COMMON, LENGTH):
        found, wanted = rows(Moments.load(path), window), rows(moments, window)
        for name in NAMES:
            np.testing.assert_allclose(found[name], wanted[name], atol=1e-4)
            np.testing.assert_allclose(found[f"{name}_se"], wanted[f"{name}_se"], rtol=2e-3)
    layer, loaded = PreRopeFile(path).layer(0), Moments.load(path)
    for window in (COMMON, LENGTH):
        found = before_rotation(layer.unrotated["k"], loaded.cells(window), 3)
        np.testing.assert_array_equal(found.cov, loaded.before_rotation(0, "k", window, without=3).cov)


def test_files_from_before_there_were_such_sketches_are_read(tmp_path):
    q, k = heads(rows=DOCUMENTS)
    captured(HALVES, q, k, 0).save(tmp_path / "new.safetensors")
    with safe_open(tmp_path / "new.safetensors", framework="numpy") as file:
        metadata, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert not any("unrotated.sketch" in name for name in arrays)
    metadata["about"] = metadata["about"].replace(', "unrotated_sketched": 0', "")
    assert "unrotated_sketched" not in metadata["about"]
    metadata["sha256"] = _checksum(metadata["about"], arrays)
    save_file(arrays, tmp_path / "old.safetensors", metadata=metadata)
    old = rows(Moments.load(tmp_path / "old.safetensors"), COMMON)
    new = rows(Moments.load(tmp_path / "new.safetensors"), COMMON)
    for name in NAMES:
        np.testing.assert_array_equal(old[[name, f"{name}_se"]], new[[name, f"{name}_se"]])


def test_sketches_beyond_float32_cost_the_common_windows_covariance_and_nothing_else():
    q, k = heads(rows=8)
    moments = captured(HALVES, q, k, of=OF[:8])
    sketch = moments.layer_moments(0)["q"].unrotated.sketch
    sketch.y[0, 0, 0, 0, 0] = np.inf
    found = rows(moments, COMMON)
    assert np.isfinite(found[list(NAMES)].to_numpy()).all()
