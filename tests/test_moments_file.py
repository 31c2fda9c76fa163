"""Moments on disk: what is written is read, and anything damaged, foreign or old is refused by name."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from qkscope.errors import MomentsFileError
from qkscope.layers import LayerFacts
from qkscope.moments.file import read_provenance
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.moments import Moments
from qkscope.moments.sizes import predict_sizes

LAYERS = [LayerFacts(0, 4, 2, 6, "rotary", 6), LayerFacts(2, 2, 1, 8, "nope", 0, "sliding", 16)]
LAYOUT = Layout(bucket_edges(32, 8), groups=4, skip_positions=1)


def example() -> Moments:
    rng = np.random.default_rng(0)
    moments = Moments(LAYOUT, LAYERS, {"name": "a", "text": "schön = 1"})
    for facts in LAYERS:
        q = 100 + rng.normal(size=(3, facts.q_heads, 32, facts.head_dim))
        k = rng.normal(size=(3, facts.kv_heads, 32, facts.head_dim))
        moments.add(facts.layer, q, k, groups=[0, 1, 3])
    return moments


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.safetensors"
    example().save(path)
    return path


def test_round_trip(path):
    saved, loaded = example(), Moments.load(path)
    assert loaded.layout == LAYOUT
    assert list(loaded.layers.values()) == LAYERS
    assert loaded.provenance == saved.provenance == read_provenance(path)
    for facts in LAYERS:
        for kind in ("q", "k"):
            one, two = saved.layer_moments(facts.layer), loaded.layer_moments(facts.layer)
            for name in ("pivot", "n", "u", "uu", "x", "xu", "xx"):
                np.testing.assert_array_equal(getattr(one.buckets[kind], name), getattr(two.buckets[kind], name))
                # Group sums are stored in float32: seven digits.
                np.testing.assert_allclose(
                    getattr(two.groups[kind], name), getattr(one.groups[kind], name), rtol=1e-6, atol=1e-5
                )


def test_predicted_size_is_the_file_without_its_header(path):
    data = path.read_bytes()
    (header,) = struct.unpack("<Q", data[:8])
    assert len(data) - 8 - header == predict_sizes(LAYOUT, LAYERS).file


def test_predicted_memory_is_what_the_live_sums_hold():
    moments = example()
    held = sum(
        tensor.numel() * tensor.element_size()
        for live in moments._live.values()
        for tensor in (live.pivot, *(part for of in (live._buckets, live._groups) for part in (of.lower, of.corner)))
    )
    assert held == predict_sizes(LAYOUT, LAYERS).memory


def test_smollm3_3b_fits_below_a_gigabyte():
    layers = [LayerFacts(layer, 16, 4, 128) for layer in range(36)]
    sizes = predict_sizes(Layout(bucket_edges(65536, 16), 8), layers)
    # By hand: 36 x 20 heads, 8256 + 256 sums; 16 buckets of float64 and 8 groups of float32, counts and pivots.
    by_hand = 720 * (16 * 8 * (8256 + 256 + 3) + 8 * (4 * (8256 + 256) + 8 * 3) + 8 * 128)
    assert sizes.file == by_hand
    assert sizes.file < 1e9


def test_loading_twice_merges_like_the_originals(path):
    twice = Moments.load(path).merge(Moments.load(path))
    one, two = (m.window(0, "q").statistics(1.0) for m in (example(), twice))
    np.testing.assert_allclose(two.n, 2 * one.n)
    np.testing.assert_allclose(two.cov_xx, one.cov_xx, rtol=1e-12, atol=1e-12)


def test_truncated(path):
    data = path.read_bytes()
    for keep in (0, 4, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:keep])
        with pytest.raises(MomentsFileError, match=r"a\.safetensors: .*(truncated|damaged)"):
            Moments.load(path)


@settings(max_examples=80, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(tmp_path_factory, where, bit):
    path = tmp_path_factory.mktemp("flip") / "a.safetensors"
    example().save(path)
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    path.write_bytes(bytes(data))
    with pytest.raises(MomentsFileError, match=r"a\.safetensors: "):
        Moments.load(path)


def test_another_schema_version(path):
    rewrite(path, lambda metadata: metadata.update(schema="99"))
    with pytest.raises(MomentsFileError, match="schema '99', this qkscope reads schema 1"):
        Moments.load(path)


def test_some_other_safetensors_file(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"w": np.zeros(3)}, path)
    with pytest.raises(MomentsFileError, match="not a qkscope moments file"):
        Moments.load(path)


def test_no_safetensors_file_at_all(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\xff" * 64)  # a header of 2^64 bytes must not be allocated
    with pytest.raises(MomentsFileError, match="not a safetensors file"):
        Moments.load(path)
    with pytest.raises(MomentsFileError, match="no such file"):
        Moments.load(tmp_path / "missing.safetensors")


def test_arrays_that_do_not_fit_the_header(path):
    def cut(arrays):
        arrays["0.q.buckets.x"] = arrays["0.q.buckets.x"][:, :3].copy()

    rewrite(path, lambda metadata: None, cut)
    with pytest.raises(MomentsFileError, match=r"checksum|do not fit"):
        Moments.load(path)


def test_an_unfinished_write_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()

    def fail(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        example().save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["a.safetensors"]


def rewrite(path, metadata_change, arrays_change=lambda arrays: None):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    arrays = load_file(path)
    metadata_change(metadata)
    arrays_change(arrays)
    save_file(arrays, path, metadata=metadata)
