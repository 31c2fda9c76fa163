"""Sketches of the groups' squares against brute force, and errors at every doubling against a full jackknife."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from families import tiny
from qkscope import capture_moments
from qkscope.layers import LayerFacts
from qkscope.lenses.pca import matched_components
from qkscope.lenses.position import LEADING
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.sums import layer_sums
from qkscope.moments.file import _checksum
from qkscope.moments.first_batch import leading
from qkscope.moments.layout import capture_layout
from qkscope.moments.moments import Moments
from qkscope.stats.jackknife import jackknife_error

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import errors_population
import errors_simulated

WIDTH, GROUPS, CONTEXT = 24, 4, 64
FACTS = LayerFacts(0, 4, 2, WIDTH)
LAYOUT = capture_layout(CONTEXT, buckets=8, groups=GROUPS, common=16)
DOCUMENTS = 40


def documents(seed=0, count=DOCUMENTS):
    """Queries and keys whose leading direction turns with position and differs between documents."""
    rng = np.random.default_rng(seed)
    t = np.arange(CONTEXT) / CONTEXT
    found = []
    for heads in (FACTS.q_heads, FACTS.kv_heads):
        scales = np.geomspace(1.0, 0.2, WIDTH)
        noise = scales * rng.normal(size=(count, heads, CONTEXT, WIDTH))
        angle = 1.2 * t + 0.25 * rng.normal(size=(count, 1, 1))
        axis = np.zeros((count, heads, CONTEXT, WIDTH))
        axis[..., 0], axis[..., 1] = np.cos(angle), np.sin(angle)
        size = 4.0 * t + rng.normal(size=(count, heads, CONTEXT)) + 0.5 * rng.normal(size=(count, heads, 1))
        found.append(5.0 + noise + axis * size[..., None])
    return found


def captured(q, k, chosen, layout=LAYOUT, way="host"):
    """The sums of some documents, one after the other."""
    moments = Moments(layout, [FACTS], way=way)
    for document in chosen:
        moments.add(0, q[[document]], k[[document]], groups=int(document) % layout.groups)
    return moments


@pytest.mark.parametrize("way", ["host", "device"])
def test_sketches_are_the_products_of_squares_and_directions(way):
    q, k = documents()
    held = captured(q, k, range(DOCUMENTS), way=way).layer_moments(0)
    spans = [(LAYOUT.edges[span.start], LAYOUT.edges[span.stop]) for span in LAYOUT.sketch_spans]
    assert spans == [(0, 1), (1, 8), (16, 32)]
    for kind, x in (("q", q), ("k", k)):
        sketch, pivot = held[kind].sketch, held[kind].buckets.pivot
        assert sketch.directions.shape == (x.shape[1], WIDTH, 4 if kind == "q" else 8)
        inner = sketch.directions.swapaxes(1, 2) @ sketch.directions
        np.testing.assert_allclose(inner, np.broadcast_to(np.eye(inner.shape[-1]), inner.shape), atol=1e-6)
        for number, (start, stop) in enumerate(spans):
            for group in range(GROUPS):
                y = x[group::GROUPS, :, start:stop].swapaxes(0, 1).reshape(x.shape[1], -1, WIDTH) - pivot[:, None]
                squares = y.swapaxes(1, 2) @ y
                found = sketch.y[:, group, number]
                np.testing.assert_allclose(found, squares @ sketch.directions, atol=2e-6 * np.abs(squares).max())
                np.testing.assert_allclose(sketch.power[:, group, number], (y**2).sum(axis=(1, 2)), rtol=1e-5)


def test_the_last_group_has_the_squares_that_the_others_leave():
    q, k = documents()
    held = captured(q, k, range(DOCUMENTS)).layer_moments(0)["q"]
    y = q[GROUPS - 1 :: GROUPS, :, 1:16].swapaxes(0, 1).reshape(4, -1, WIDTH) - held.buckets.pivot[:, None]
    rows, columns = np.triu_indices(WIDTH)
    np.testing.assert_allclose(held.groups[:, -1, 0], (y.swapaxes(1, 2) @ y)[:, rows, columns], rtol=1e-4, atol=1e-3)
    none = captured(q, k, [0, 1, 2]).layer_moments(0)["q"]
    assert not none.groups[:, -1].any()


@pytest.mark.parametrize("way", ["host", "device"])
def test_squares_beyond_float32_cost_errors_and_nothing_else(tmp_path, way):
    q, k = documents()
    moments = captured(1e25 * q, k, range(8), way=way)
    moments.save(tmp_path / "m.safetensors")
    found = layer_sums(Moments.load(tmp_path / "m.safetensors"), 0, range(4), 64)
    assert np.isfinite(found.principal.r_q).all()


def test_directions_lead():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(5, WIDTH, WIDTH)))[0]
    covariance = basis * np.geomspace(1, 1e-3, WIDTH) @ basis.swapaxes(1, 2)
    overlap = np.abs(np.einsum("hdc,hdc->hc", leading(covariance, 4), basis[..., :4]))
    assert overlap.min() > 0.999


def replicates(q, k, window, skip=0):
    """r_q, r_k and explained variance of component 0 from raw vectors: of all, and without each group of documents."""
    t = np.arange(skip, window)

    def of(chosen, axes=None):
        rows = []
        for head in range(FACTS.q_heads):
            x, y = (z[chosen][:, h, skip:window].reshape(-1, WIDTH) for z, h in ((q, head), (k, head // 2)))
            values, vectors = np.linalg.eigh(np.cov(np.vstack([x, y]).T, bias=True))
            best = -1 if axes is None else int(np.argmax(np.abs(vectors.T @ axes[head])))
            v = vectors[:, best]
            reference = np.corrcoef(x @ v, np.tile(t, len(chosen)))[0, 1] if axes is None else v @ axes[head]
            v = v * np.sign(reference)
            r = [np.corrcoef(z @ v, np.tile(t, len(chosen)))[0, 1] for z in (x, y)]
            rows.append([*np.arctanh(r), values[best] / values.sum(), *v])
        return np.array(rows)

    every = np.arange(len(q))
    whole = of(every)
    return whole[:, :3], np.stack([of(every[every % GROUPS != g], whole[:, 3:])[:, :3] for g in range(GROUPS)])


def errors_of(moments, window, skip=0):
    sums = layer_sums(moments, 0, range(FACTS.q_heads), window, 1, skip)

    def numbers(of):
        found = of.principal
        return np.stack([np.arctanh(found.r_q[:, 0]), np.arctanh(found.r_k[:, 0]), found.explained_variance[:, 0]], 1)

    without = np.stack([numbers(each) for each in sums.replicates])
    return sums.replication.words, jackknife_error(numbers(sums), without, np.ones(GROUPS))


@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize(("window", "skip"), [(8, 1), (16, 1), (32, 1), (64, 1), (32, 0), (64, 8), (32, 8)])
def test_errors_at_every_doubling_are_those_of_a_full_jackknife(way, window, skip):
    """PC0 turns with position and with documents; keeping covariances constant is wrong by a factor of up to 30."""
    q, k = documents()
    words, found = errors_of(captured(q, k, range(DOCUMENTS), way=way), window, skip)
    exact = skip < 8 and window in (16, 64)
    assert words == ("jackknife" if exact else "jackknife, first order")
    whole, without = replicates(q, k, window, skip)
    np.testing.assert_allclose(found, jackknife_error(whole, without, np.ones(GROUPS)), rtol=1e-3 if exact else 0.1)


@pytest.mark.parametrize(
    "shards", [[range(g, DOCUMENTS, GROUPS) for g in range(GROUPS)], [range(4), range(4, DOCUMENTS)]]
)
@pytest.mark.parametrize("window", [8, 32])
def test_shards_that_chose_other_directions_and_pivots_add_up(shards, window):
    """Each shard has its own pilot: shards of one group lose nothing, others are estimated along the first's."""
    q, k = documents()
    parts = [captured(q, k, shard) for shard in shards]
    merged = parts[0]
    for part in parts[1:]:
        directions = [each.layer_moments(0)["q"].sketch.directions for each in (part, merged)]
        assert not np.array_equal(*directions)
        merged = merged.merge(part)
    _, found = errors_of(merged, window, 1)
    whole, without = replicates(q, k, window, 1)
    np.testing.assert_allclose(found, jackknife_error(whole, without, np.ones(GROUPS)), rtol=0.1)
    if len(shards) == GROUPS:
        held = merged.layer_moments(0)["q"]
        span = LAYOUT.sketch_spans[2]
        y = q[3::4, :, LAYOUT.edges[span.start] : LAYOUT.edges[span.stop]].swapaxes(0, 1).reshape(4, -1, WIDTH)
        y = y - held.buckets.pivot[:, None]
        expected = y.swapaxes(1, 2) @ (y @ held.sketch.directions)
        np.testing.assert_allclose(held.sketch.y[:, 3, 2], expected, atol=1e-5 * np.abs(expected).max())


def test_sketches_along_the_same_directions_add_exactly_and_move_with_the_pivot():
    q, k = documents()
    layout = replace(LAYOUT, sketched=WIDTH)  # a sketch along all directions is the whole square
    parts = [captured(q, k, chosen, layout) for chosen in (range(6), range(6, DOCUMENTS))]
    found = parts[0].merge(parts[1]).without_group(0, "q", 1, 32, 1).statistics(layout.scale)
    kept = np.arange(DOCUMENTS) % GROUPS != 1
    y = q[kept][:, 2, 1:32].reshape(-1, WIDTH)
    np.testing.assert_allclose(found.cov_xx[2], np.cov(y.T, bias=True), atol=1e-4)


def test_moments_without_sketches_merge_with_moments_that_have_them(tmp_path):
    """Moments of 0.2 have none: errors at other windows then keep covariances constant, as they did."""
    q, k = documents()
    old = captured(q, k, range(6), replace(LAYOUT, sketched=0))
    for merged in (old.merge(captured(q, k, range(6, DOCUMENTS))), captured(q, k, range(6, DOCUMENTS)).merge(old)):
        assert errors_of_method(merged, 32) == "jackknife, covariances fixed"
        assert errors_of_method(merged, 16) == "jackknife"
        merged.save(tmp_path / "merged.safetensors")
        loaded = Moments.load(tmp_path / "merged.safetensors")
        assert errors_of_method(loaded, 32) == "jackknife, covariances fixed"
        assert np.isfinite(layer_sums(loaded, 0, range(4)).replicates[0].alone.q_buckets.cov_xx).all()


def as_0_2(sums):
    """The arrays of which qkscope 0.2 wrote others: float64 squares, and float16 differences from groups' shares."""
    n, whole = sums.crossed.n, np.stack([sums.buckets.xx[:, span].sum(axis=1) for span in LAYOUT.spans], axis=1)
    of_spans = np.stack([n[:, span].sum(axis=1) for span in LAYOUT.spans], axis=2)  # (heads, groups, spans)
    share = of_spans / of_spans.sum(axis=1, keepdims=True)
    values = {"groups.xx": (sums.groups, share[..., None] * whole[:, None])}
    share = (n / n.sum(axis=2, keepdims=True))[..., None]
    for name in ("x", "xu"):
        values[f"crossed.{name}"] = getattr(sums.crossed, name), share * getattr(sums.buckets, name)[:, :, None]
    if (before := sums.unrotated) is not None:
        total = before.x.sum(axis=2, dtype=np.float64).astype(np.float32)
        share = before.n / np.maximum(before.n.sum(axis=1, keepdims=True), 1)
        values["unrotated.crossed.x"] = before.x, share[..., None] * total[:, :, None]
    arrays = {"buckets.xx": sums.buckets.xx}
    for name, (given, shares) in values.items():
        scale = np.abs(given - shares).max(axis=-1).astype(np.float32)
        units = np.divide(given - shares, scale[..., None], where=scale[..., None] > 0, out=np.zeros(given.shape))
        arrays |= {name: units.astype(np.float16), f"{name}.scale": scale}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def test_files_of_schema_2_are_read_without_sketches(tmp_path):
    """As 0.2 wrote them: the layout says nothing of sketches, and there are no arrays of theirs."""
    q, k = documents()
    captured(q, k, range(DOCUMENTS), replace(LAYOUT, sketched=0)).save(tmp_path / "new.safetensors")
    with safe_open(tmp_path / "new.safetensors", framework="numpy") as file:
        metadata, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for kind, sums in captured(q, k, range(DOCUMENTS), replace(LAYOUT, sketched=0)).layer_moments(0).items():
        arrays |= {f"0.{kind}.{name}": array for name, array in as_0_2(sums).items()}
    arrays = {
        name: array for name, array in arrays.items() if "segments" not in name and "buckets.xx.scale" not in name
    }
    about = json.loads(metadata["about"])
    del about["layout"]["sketched"]
    metadata |= {"schema": "2", "about": json.dumps(about, sort_keys=True, ensure_ascii=False)}
    metadata["sha256"] = _checksum(metadata["about"], arrays)
    save_file(arrays, tmp_path / "old.safetensors", metadata=metadata)
    old = Moments.load(tmp_path / "old.safetensors")
    assert {window: errors_of_method(old, window) for window in LAYOUT.windows()} == {
        8: "jackknife, covariances fixed", 16: "jackknife", 32: "jackknife, covariances fixed", 64: "jackknife",
    }  # fmt: skip
    new = captured(q, k, range(DOCUMENTS))
    np.testing.assert_allclose(errors_of(old, 64, 1)[1], errors_of(new, 64, 1)[1], rtol=1e-2)


def errors_of_method(moments, window):
    return layer_sums(moments, 0, range(4), window).replication.words


def test_a_file_keeps_sketches_to_three_digits(tmp_path):
    q, k = documents()
    moments = captured(q, k, range(DOCUMENTS))
    moments.save(tmp_path / "m.safetensors")
    loaded = Moments.load(tmp_path / "m.safetensors")
    for window in (8, 32):
        np.testing.assert_allclose(errors_of(loaded, window)[1], errors_of(moments, window)[1], rtol=5e-3)


@pytest.mark.parametrize("sketched", [WIDTH, 4])
def test_a_replicate_alone_has_covariances_of_its_own_in_every_bucket(sketched):
    """They add up to the window's; along all directions, and in spans of one bucket, they are exact."""
    q, k = documents()
    layout = replace(LAYOUT, sketched=sketched)
    sums = layer_sums(captured(q, k, range(DOCUMENTS), layout), 0, range(4), 32)
    kept = np.arange(DOCUMENTS) % GROUPS != 2
    alone = sums.without(2).alone
    for kind, of, window in (("q", alone.q_buckets, alone.q), ("k", alone.k_buckets, alone.k.take(np.array([0, 2])))):
        x = (q if kind == "q" else k)[kept]
        weight = of.n / of.n.sum(axis=1, keepdims=True)
        about = of.mean_x - window.mean_x[:, None]
        total = np.einsum("hb,hbij->hij", weight, of.cov_xx) + np.einsum("hb,hbi,hbj->hij", weight, about, about)
        np.testing.assert_allclose(total, window.cov_xx, atol=1e-4)
        if sketched == WIDTH:
            first = [np.cov(x[:, head, 1:8].reshape(-1, WIDTH).T, bias=True) for head in range(x.shape[1])]
            np.testing.assert_allclose(of.cov_xx[:, 1], first, atol=1e-4)


def test_errors_in_the_simulated_population_are_those_of_a_full_jackknife():
    """64 heads of width 6, documents of other lengths: nine of ten heads within 10 %, at the window that is neither."""
    rng, groups = np.random.default_rng(3), errors_simulated.GROUPS
    made = errors_population.drawn_documents(rng, errors_simulated.DOCUMENTS)
    facts = LayerFacts(0, errors_population.HEADS, errors_population.KEY_HEADS, errors_population.WIDTH)
    of = np.arange(len(made.positions)) % groups

    def sums(kept):
        moments = Moments(errors_simulated.layout(), [facts])
        for row in np.flatnonzero(kept):
            q, k = (x[[row]] for x in made.vectors["before"])
            moments.add(0, q, k, positions=made.positions[[row]], groups=int(of[row]))
        return layer_sums(moments, 0, range(facts.q_heads), errors_population.SHORT, 2)

    whole = sums(of >= 0)
    assert whole.replication.first_order
    found = np.stack([numbers_of(each, whole) for each in whole.replicates])
    full = np.stack([numbers_of(sums(of != group), whole) for group in range(groups)])
    sizes = whole.replication.sizes
    errors = [jackknife_error(numbers_of(whole), each, sizes) for each in (found, full)]
    stable = whole.principal.gap[:, 0] > 2 * errors[1][:, 3]
    ratio = (errors[0] / errors[1])[stable, :3]
    assert (np.abs(ratio - 1) < 0.1).mean(axis=0).min() >= 0.9


def test_nearly_degenerate_components_are_flagged_at_every_doubling():
    """Two directions of one variance lead: which of them is component 0, documents decide."""
    rng = np.random.default_rng(0)
    scales = np.r_[2.0, 2.0, np.full(WIDTH - 2, 0.3)]
    q, k = (scales * rng.normal(size=(DOCUMENTS, heads, CONTEXT, WIDTH)) for heads in (4, 2))
    settings = RowSettings(common=16, skip=1, components=2)
    close = checkpoint_rows(captured(q, k, range(DOCUMENTS)), [LEADING], settings, model="m")[LEADING.table]
    assert close["unstable"].notna().all()
    assert (close.groupby("window")["unstable"].mean()[[16, 32, 64]] >= 0.7).all()  # from four groups
    apart = checkpoint_rows(captured(*documents(), range(DOCUMENTS)), [LEADING], settings, model="m")[LEADING.table]
    assert apart["unstable"].notna().all()
    assert apart["unstable"].mean() <= 0.2


@pytest.mark.slow
def test_errors_of_a_model_at_every_doubling():
    """A tiny Llama with grouped keys, captured from Python, against sums without each group's documents."""
    torch.manual_seed(0)
    model = tiny("llama", vocab_size=64, num_attention_heads=4, num_key_value_heads=2, hidden_size=96)
    rng = np.random.default_rng(0)
    with torch.no_grad():  # tokens differ most along one direction, as in trained models
        axes = torch.randn(2, 96)
        model.get_input_embeddings().weight += 0.1 * torch.randn(64, 2) @ axes
    windows = [rng.integers(0, 64, size=128) // (1 + i % 3) for i in range(24)]
    alone = [capture_moments(model, [window], context=128, buckets=8, groups=1) for window in windows]
    moments = capture_moments(model, windows, context=128, buckets=8, groups=GROUPS)
    ratios = []
    for layer in moments.layers:
        for window in (16, 32, 64):
            sums = layer_sums(moments, layer, range(4), window, 2)
            assert sums.replication.first_order
            full = [numbers_of(layer_sums(_merged(alone, g), layer, range(4), window), sums) for g in range(GROUPS)]
            found = [numbers_of(each, sums) for each in sums.replicates]
            errors = [jackknife_error(numbers_of(sums), np.stack(each), np.ones(GROUPS)) for each in (found, full)]
            ratios.append((errors[0] / errors[1])[sums.principal.gap[:, 0] > 2 * errors[1][:, 3]])
    every = np.concatenate(ratios)[:, :3]
    assert len(every) > 8
    assert (np.abs(every - 1) < 0.1).mean() >= 0.9


def _merged(alone, group):
    """The sums of all documents but those of one group."""
    left = [each for i, each in enumerate(alone) if i % GROUPS != group]
    without = left[0]
    for each in left[1:]:
        without = without.merge(each)
    return without


def numbers_of(sums, whole=None):
    """r_q and r_k on Fisher's scale, explained variance and gap of component 0, matched to the whole's."""
    if whole is None or sums.whole is not None:
        found = sums.principal
    else:
        found = matched_components(sums.q, sums.k, whole.principal, sums.eigen)
    return np.stack([np.arctanh(found.r_q), np.arctanh(found.r_k), found.explained_variance, found.gap], 2)[:, 0]
