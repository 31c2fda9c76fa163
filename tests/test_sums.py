"""The sums behind errors, sinks and rotation against brute force, on the host's way and on an accelerator's."""

import weakref
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from families import tiny
from qkscope.capture import collect
from qkscope.capture.collect import make_batch
from qkscope.errors import ActivationError, InputError
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.sums import layer_sums
from qkscope.moments import placement
from qkscope.moments.layout import Layout, capture_layout
from qkscope.moments.moments import Moments
from qkscope.moments.sizes import predict_sizes, workspace_bytes

WIDTH = 8
ROTATION = Rotation(pairs=((0, 4), (1, 5), (2, 6)), angles=(1.0, 0.3, 0.01))  # coordinates 3 and 7 do not turn
FACTS = LayerFacts(0, 4, 2, WIDTH, rotary="rotary", rotary_dims=6, rotation=ROTATION)
LAYOUT = capture_layout(64, buckets=8, groups=3, common=16)
WAYS = ["host", "device"]


def turn(x, positions, rotation=ROTATION):
    """Rotate (…, tokens, width) plane by plane, from the definition."""
    y = x.copy()
    for (first, second), angle in zip(rotation.pairs, rotation.angles, strict=True):
        cos, sin = np.cos(angle * positions), np.sin(angle * positions)
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def documents(rows, length=64, seed=0):
    """Unrotated and rotated queries and keys; position 0 is a sink twenty times as long."""
    rng = np.random.default_rng(seed)
    before = [
        3 * rng.normal(size=(1, heads, 1, WIDTH)) + rng.normal(size=(rows, heads, length, WIDTH)) for heads in (4, 2)
    ]
    for x in before:
        x[:, :, 0] *= 20
    return before, [turn(x, np.arange(length)) for x in before]


def captured(q, k, groups, layout=LAYOUT, facts=FACTS, way="host", **where):
    moments = Moments(layout, [facts], way=way)
    moments.add(0, q, k, groups=groups, **where)
    return moments


def statistics(x, t):
    """Means and covariances of (n, d) vectors with positions, straight from the definition."""
    dx, dt = x - x.mean(0), t - t.mean()
    return x.mean(0), dx.T @ dx / len(x), dx.T @ dt / len(x)


def assert_sums(found, head, x, t, tolerance):
    mean, cov, cov_t = statistics(x, t)
    assert found.n[head] == len(x)
    np.testing.assert_allclose(found.mean_x[head], mean, atol=tolerance * np.abs(mean).max())
    np.testing.assert_allclose(found.cov_xx[head], cov, atol=tolerance * np.abs(cov).max())
    np.testing.assert_allclose(found.cov_xt[head], cov_t, atol=tolerance * np.abs(cov_t).max())


def test_position_0_is_a_bucket_and_the_common_window_an_edge():
    assert LAYOUT.edges == (0, 1, 8, 16, 24, 32, 40, 48, 56, 64)
    assert LAYOUT.spans == (slice(1, 3), slice(3, 9))
    assert LAYOUT.windows() == (8, 16, 32, 64)
    assert capture_layout(64, buckets=8, common=64).spans == (slice(1, 9),)
    assert capture_layout(64, buckets=8, skip=4).edges[:4] == (0, 1, 4, 8)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("window", [8, 16, 64])
def test_any_window_with_and_without_the_sink(way, skip, window):
    _, (q, k) = documents(5)
    moments = captured(q, k, [0, 1, 2, 0, 1], way=way)
    for kind, x in (("q", q), ("k", k)):
        found = moments.window(0, kind, window, skip).statistics(LAYOUT.scale)
        t = np.tile(np.arange(float(skip), window), 5)
        assert_sums(found, 1, x[:, 1, skip:window].reshape(-1, WIDTH), t, 1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [16, 64])
def test_a_replicate_leaves_one_group_of_documents_out(way, window):
    """Without the sink, exactly (groups are float32); with it, every group has the same sink here."""
    _, (q, k) = documents(6)
    q[:, :, 0], k[:, :, 0] = q[:1, :, 0], k[:1, :, 0]
    moments = captured(q, k, [0, 1, 2, 0, 1, 2], way=way)
    for skip in (0, 1):
        found = moments.without_group(0, "q", 1, window, skip).statistics(LAYOUT.scale)
        t = np.tile(np.arange(float(skip), window), 4)
        assert_sums(found, 3, q[[0, 2, 3, 5], 3, skip:window].reshape(-1, WIDTH), t, 1e-5)


def test_groups_have_no_squares_at_other_windows():
    _, (q, k) = documents(3)
    moments = captured(q, k, [0, 1, 2])
    with pytest.raises(InputError, match="no squares of their own over positions 0 to 40"):
        moments.without_group(0, "q", 1, 40)


@pytest.mark.parametrize("way", WAYS)
def test_means_of_every_group_in_every_bucket(way):
    _, (q, k) = documents(6)
    held = captured(q, k, [0, 1, 2, 0, 1, 2], way=way).layer_moments(0)["k"]
    mean = held.buckets.pivot[:, None, None] + held.crossed.x / held.crossed.n[..., None]
    for bucket, (left, right) in enumerate(zip(LAYOUT.edges, LAYOUT.edges[1:], strict=False)):
        expected = k[[1, 4], 1, left:right].reshape(-1, WIDTH).mean(axis=0)
        np.testing.assert_allclose(mean[1, bucket, 1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_there_before_rotation(way):
    """Every token (the documents are short), turned back: means, covariance, and means per bucket and group."""
    before, after = documents(5)
    moments = captured(*after, [0, 1, 2, 0, 1], way=way)
    for kind, x in zip(("q", "k"), before, strict=True):
        held = moments.layer_moments(0)[kind].unrotated
        found = held.whole().statistics(1.0)
        mean, cov, _ = statistics(x[:, 1, 1:].reshape(-1, WIDTH), np.zeros(5 * 63))
        np.testing.assert_allclose(found.mean_x[1], mean, atol=1e-5)
        np.testing.assert_allclose(found.cov_xx[1], cov, atol=1e-5)
        in_bucket = held.pivot[1] + held.x[1, 4, 2] / held.n[4, 2]
        np.testing.assert_allclose(in_bucket, x[2, 1, 24:32].mean(axis=0), atol=1e-5)


def test_one_token_in_some_is_summed_before_rotation():
    """Every fourth position of a document, others for other groups, never position 0."""
    layout = Layout(LAYOUT.edges, 3, common=16, unrotated_every=4)
    before, after = documents(2)
    held = captured(*after, [0, 1], layout=layout).layer_moments(0)["q"].unrotated
    chosen = np.concatenate([before[0][0, 2, 4::4], before[0][1, 2, 1::4]])
    np.testing.assert_allclose(held.whole().statistics(1.0).mean_x[2], chosen.mean(axis=0), atol=1e-5)
    assert held.n.sum() == 15 + 16


def test_layers_without_rotation_are_summed_as_they_are():
    facts = LayerFacts(0, 4, 2, WIDTH, rotary="nope", rotary_dims=0)
    before, _ = documents(3)
    held = captured(*before, 0, facts=facts).layer_moments(0)["k"].unrotated
    expected = before[1][:, 0, 1:].reshape(-1, WIDTH).mean(axis=0)
    np.testing.assert_allclose(held.whole().statistics(1.0).mean_x[0], expected, atol=1e-5)


def test_an_unknown_rotation_is_not_turned_back():
    facts = LayerFacts(0, 4, 2, WIDTH)
    assert captured(*documents(2)[1], 0, facts=facts).layer_moments(0)["q"].unrotated is None


def test_documents_are_counted_where_they_have_tokens():
    _, (q, k) = documents(3)
    positions = np.where(np.arange(64) < np.array([[64], [10], [20]]), np.arange(64), -1)
    moments = captured(q, k, [0, 1, 1], positions=positions)
    assert moments.documents.sum(axis=0).tolist() == [3, 3, 3, 2, 1, 1, 1, 1, 1]
    assert moments.documents[1].tolist() == [2, 2, 2, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_make_the_same_sums_of_low_precision_vectors(dtype):
    """Wide heads, ragged rows of three groups. Float32 over 100 tokens: 1e-6 of the spread."""
    rng = np.random.default_rng(0)
    facts = LayerFacts(0, 4, 2, 64, rotary="nope", rotary_dims=0)
    layout = capture_layout(900, buckets=9, groups=3, common=300)
    q, k = (torch.from_numpy(5 + rng.normal(size=(3, heads, 900, 64))).to(dtype) for heads in (4, 2))
    positions = np.where(np.arange(900) < np.array([[900], [400], [701]]), np.arange(900), -1)
    one, two = (captured(q, k, [0, 1, 2], layout, facts, way, positions=positions) for way in WAYS)
    for kind in ("q", "k"):
        host, device = (m.window(0, kind, 300).statistics(layout.scale) for m in (one, two))
        np.testing.assert_array_equal(host.n, device.n)
        np.testing.assert_allclose(host.cov_xx, device.cov_xx, atol=2e-6)
        np.testing.assert_allclose(host.mean_x, device.mean_x, atol=2e-6)


@pytest.mark.parametrize("at_once", [0, 2**28], ids=["in two chunks", "at once"])
@pytest.mark.parametrize("common", [None, 20], ids=["equal buckets", "another edge"])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (3, 1)])
def test_every_way_of_laying_out_a_batch_makes_the_same_sums(monkeypatch, heads, common, at_once):
    """Twice two whole documents of one group; squares of the group by brute force."""
    monkeypatch.setattr(placement, "CHUNK_BYTES", at_once)
    layout = capture_layout(64, buckets=8, groups=2, common=common)
    moments = Moments(layout, [LayerFacts(0, *heads, WIDTH, rotary="nope", rotary_dims=0)], way="device")
    rng = np.random.default_rng(3)
    seen = [[5 + rng.normal(size=(2, count, 64, WIDTH)) for count in heads] for _ in range(2)]
    for q, k in seen:
        moments.add(0, q, k, groups=1)
    for kind, both in zip(("q", "k"), zip(*seen, strict=True), strict=True):
        x = np.concatenate(both).swapaxes(1, 2)  # (documents, tokens, heads, width)
        for window in layout.edges[1:]:
            found = moments.window(0, kind, window).statistics(layout.scale)
            for head in range(x.shape[2]):
                flat = x[:, :window, head].reshape(-1, WIDTH)
                # Windows between doublings end inside a segment, where buckets are float32.
                exact = window in layout.windows() or window == layout.common
                assert_sums(found, head, flat, np.tile(np.arange(window), 4), 1e-11 if exact else 1e-6)
        alone = moments.layer_moments(0)[kind]
        cells = alone.groups[:, 1].sum(axis=1)
        centred = x[:, 1:].reshape(-1, x.shape[2], WIDTH) - alone.buckets.pivot  # without the sink
        rows, columns = np.triu_indices(WIDTH)
        expected = np.einsum("nhi,nhj->hij", centred, centred)[:, rows, columns]
        np.testing.assert_allclose(cells, expected, atol=1e-5 * np.abs(expected).max())
        assert not alone.groups[:, 0].any()


# -- an accelerator waits at every call ------------------------------------------------------------------------


VIEWS = {
    "view", "slice", "select", "permute", "transpose", "expand", "alias", "unsqueeze", "detach", "as_strided", "t",
    "_unsafe_view", "split", "split_with_sizes", "reshape", "squeeze", "_reshape_alias", "empty", "lift_fresh",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts what a device would have to start, and what would wait for it."""

    def __init__(self):
        super().__init__()
        self.launches, self.waits = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "item", "equal"):
            self.waits.append(name)
        elif name not in VIEWS:
            self.launches.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [4096, 32_768, 131_072])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_layer_starts_few_kernels_and_waits_for_none(context, rows):
    facts = [LayerFacts(n, 2, 1, 16, "rotary", 16, rotation=Rotation(((0, 8),), (0.1,))) for n in range(2)]
    layout = capture_layout(context, common=4096)
    moments = Moments(layout, facts, way="device")
    q, k = (torch.randn(rows, context, heads, 16).to(torch.bfloat16).transpose(1, 2) for heads in (2, 1))
    for layer in range(2):  # the first batch decides on pivots and lays out memory
        moments.add(layer, q, k)
    with Launches() as seen:
        moments.add(0, q, k)
    assert seen.waits == []
    assert len(seen.launches) <= 31, seen.launches


class Copies(TorchDispatchMode):
    """Counts copies from the host to a device (without contents)."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        copies = func.overloadpacket.__name__ == "_to_copy"
        self.count += copies and args[0].device.type == "cpu" and found.device.type == "meta"
        return found


@pytest.mark.parametrize("layers", [1, 6])
def test_explicit_positions_go_to_a_device_once_per_batch_not_once_per_layer(layers):
    facts = [replace(big_layer(4, 2, 64), layer=n) for n in range(layers)]
    moments = Moments(capture_layout(512, common=128), facts, way="device")
    q, k = (torch.empty(2, heads, 512, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    counts = []
    for stop in (512, 300, 300, 200):
        positions = np.where(np.arange(512) < np.array([[512], [stop]]), np.arange(512), -1)
        with Copies() as copies:
            for layer in range(layers):
                moments.add(layer, q, k, positions=positions.copy())
        counts.append(copies.count)
    # What to gather, weights and positions, and the rotation there; the same batch again needs none.
    assert counts[1:] == [12, 0, 12]


def test_the_device_is_asked_once_per_pass_whether_all_was_finite():
    facts = [LayerFacts(n, 2, 1, 16) for n in range(3)]
    moments = Moments(capture_layout(64), facts, way="device")
    q, k = (torch.randn(1, heads, 64, 16) for heads in (2, 1))
    for layer in range(3):
        moments.add(layer, q, k)
    with Launches() as seen:
        assert not moments.has_non_finite()
    assert len(seen.waits) == 1
    bad = k.clone()
    bad[0, 0, 7, 3] = torch.inf
    moments.add(1, q, bad)
    assert moments.has_non_finite()
    moments.locate(0, q, k)
    with pytest.raises(ActivationError, match="inf in a key of layer 1, head 0, position 7"):
        moments.locate(1, q, bad)


@pytest.mark.parametrize(("projection", "vector"), [("q_proj", "query"), ("k_proj", "key")])
def test_a_second_pass_names_what_a_device_only_saw(monkeypatch, projection, vector):
    """Sums as on a GPU, which there is none of here: they notice a number that is not finite, but not where it is."""
    model = tiny("llama", vocab_size=64)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0.0
        model.get_input_embeddings().weight[9, 0] = 9.0
        getattr(model.model.layers[0].self_attn, projection).weight[:, 0] = 3e38
    monkeypatch.setattr(collect, "Moments", partial(Moments, way="device"))
    batch = make_batch([[1, 2, 3, 4] * 8, [5, 6, 9, 7] + [8] * 28], [0, 1], ["one", "two"], [0, 1])
    with pytest.raises(ActivationError, match=rf"two: \S+ in a {vector} of layer 0, head 0, position 2"):
        collect.collect_moments(model, [batch], capture_layout(32))


class Live(Launches):
    """Counts the bytes of tensors that were made inside and are still there: what a device would have to hold."""

    def __init__(self):
        super().__init__()
        self.held = self.peak = 0
        self._users = Counter()  # tensors on each storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in found if isinstance(found, list | tuple) else [found]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = StorageWeakRef(storage), storage.nbytes()  # on "meta" addresses are all 0
                if func.is_view and not self._users[key]:
                    continue  # of something that was there before
                self.held += 0 if self._users[key] else size
                self._users[key] += 1
                weakref.finalize(tensor, self._gone, key, size)
        self.peak = max(self.peak, self.held)
        return found

    def _gone(self, key, size):
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.held -= size


def big_layer(queries, keys, width):
    half = width // 2
    rotation = Rotation(tuple((i, i + half) for i in range(half)), tuple(0.5**i for i in range(half)))
    return LayerFacts(0, queries, keys, width, "rotary", width, rotation=rotation)


SHAPES = {
    "70B at 131072": ((64, 8, 128), 131_072, None, 5.3),
    "70B at 131072, common window of 4096": ((64, 8, 128), 131_072, 4096, 5.3),
    "70B at 131072, every bucket filled up": ((64, 8, 128), 131_000, None, 5.3),
    "two documents of 70B at 65536": ((64, 8, 128), 65_536, None, 5.3),
    "as many keys as queries at 32768": ((32, 32, 128), 32_768, None, 1.6),
    "SmolLM3-3B at 4096": ((16, 4, 128), 4096, None, 0.3),
    "narrow heads at 512": ((4, 2, 32), 512, None, 0.01),
}


@pytest.mark.parametrize("name", SHAPES)
def test_an_accelerator_needs_no_more_memory_and_launches_than_is_said(name):
    """The calls of the real shapes, on tensors without contents; 15 GiB was what 70B at 131 072 tokens took before."""
    (queries, keys, width), context, common, most = SHAPES[name]
    facts, layout = big_layer(queries, keys, width), capture_layout(context, common=common)
    moments = Moments(layout, [facts], way="device")
    rows = 2 if "two documents" in name else 1
    q, k = (
        torch.empty(rows, context, heads, width, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        for heads in (queries, keys)
    )
    sums = predict_sizes(layout, [facts]).memory
    with Live() as first:
        moments.add(0, q, k)
    with Live() as second:
        moments.add(0, q, k)
    assert second.waits == []
    assert len(second.launches) <= 36, second.launches  # 31, or 36 where heads are centred in two chunks
    said = workspace_bytes(layout, facts, rows * context)
    assert first.peak <= sums + said
    assert first.peak >= 0.6 * (sums + said)  # a bound that says nothing would be none
    assert said <= most * 2**30


def test_sums_without_float64_carry_what_each_addition_rounds_away():
    """On a device without float64: 2000 batches about a far-off pivot, against the same in float64."""
    from qkscope.moments.running_sums import RunningSums

    state = RunningSums(capture_layout(8, buckets=1), {"q": 1}, 2, torch.device("cpu"))
    plain = RunningSums(state.layout, {"q": 1}, 2, torch.device("cpu"))
    for each in (state, plain):
        each.exact, each.segments, each.firsts = torch.float32, each.segments.float(), each.firsts.float()
    state.carries = [torch.zeros_like(each) for each in (state.segments, state.firsts)]
    rng, exact = np.random.default_rng(0), 0.0
    for _ in range(2000):  # Σaaᵀ | Σbxᵀ | Σx | Σxs of both buckets
        cells = torch.from_numpy(1000 + rng.normal(size=(1, 2, 7))).to(torch.float32)
        exact += cells.double().numpy()[..., [0, 1, 2]]  # a packed triangle: aa, ba, bb
        for each in (state, plain):
            each.add_cells(0, slice(0, 2), cells.clone())
    found = state.segments.double().numpy() + state.carries[0].double().numpy()
    assert np.abs(found - exact).max() < 1e-6 < np.abs(plain.segments.double().numpy() - exact).max()


# -- what it costs ---------------------------------------------------------------------------------------------


def test_the_sums_of_smollm3_stay_below_1_2_gigabytes_and_their_file_below_0_64():
    """36 layers of 16 + 4 heads of width 128, 64K context, common window 4096, eight groups."""
    turned = Rotation(tuple((i, i + 64) for i in range(64)), tuple(0.5**i for i in range(64)))
    layers = [LayerFacts(n, 16, 4, 128, "rotary", 128, rotation=turned) for n in range(36)]
    sizes = predict_sizes(capture_layout(65_536, common=4096), layers)
    assert sizes.memory < 1.2e9
    assert sizes.file < 0.64e9


@pytest.mark.parametrize("common", [16, 64])
def test_memory_and_file_are_as_predicted(tmp_path, common):
    layout = capture_layout(64, buckets=8, groups=3, common=common)
    moments = Moments(layout, [FACTS])
    q, k = documents(3)[1]
    moments.add(0, q, k, groups=[0, 1, 2])
    sizes = predict_sizes(layout, [FACTS])
    assert moments.live_memory == sizes.memory
    path = tmp_path / "moments.safetensors"
    moments.save(path)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    assert path.stat().st_size - 8 - header == sizes.file


def test_a_file_gives_back_what_was_saved(tmp_path):
    q, k = documents(6)[1]
    moments = captured(q, k, [0, 1, 2, 0, 1, 2])
    moments.save(tmp_path / "moments.safetensors")
    again = Moments.load(tmp_path / "moments.safetensors")
    np.testing.assert_array_equal(again.documents, moments.documents)
    for kind in ("q", "k"):
        one, two = moments.layer_moments(0)[kind], again.layer_moments(0)[kind]
        for name in ("pivot", "n", "u", "uu", "x", "xu"):
            np.testing.assert_array_equal(getattr(one.buckets, name), getattr(two.buckets, name))
        for segment in LAYOUT.segments:  # float32, and buckets in them to four digits
            whole, again_whole = (each.buckets.xx[:, segment] for each in (one, two))
            np.testing.assert_allclose(again_whole.sum(axis=1), whole.sum(axis=1), rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(again_whole, whole, atol=1e-4 * np.abs(whole).max())
        for name in ("n", "u", "uu"):
            np.testing.assert_array_equal(getattr(one.crossed, name), getattr(two.crossed, name))
        # 16-bit differences from a group's share: four digits of what distinguishes groups.
        rounded = [(each.groups, each.crossed.x, each.crossed.xu, each.unrotated.x) for each in (one, two)]
        for a, b in zip(*rounded, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(a).max())
        np.testing.assert_array_equal(one.unrotated.xx, two.unrotated.xx)


def test_the_documents_of_a_window_are_those_that_reach_its_last_bucket():
    moments = Moments(LAYOUT, [FACTS])
    rng = np.random.default_rng(0)
    for number, length in enumerate((64, 60, 30, 16, 12, 3)):
        q = rng.normal(size=(1, 4, length, WIDTH))
        moments.add(0, q, q[:, :2], groups=number % 3)
    # Buckets of 8 positions, and position 0: a document counts if it has a token in the window's last bucket.
    reach = {window: layer_sums(moments, 0, [0], window).documents for window in (None, 32, 16, 8)}
    assert reach == {None: 2, 32: 3, 16: 5, 8: 6}
    assert layer_sums(moments, 0, [0], 16, skip=1).documents == 5
