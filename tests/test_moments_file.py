"""Moments on disk: what is written is read, and anything damaged, foreign or old is refused by name."""

import errno
import hashlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from qkscope.errors import MomentsFileError, StorageError
from qkscope.layers import LayerFacts
from qkscope.moments.file import read_provenance
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.moments import Moments
from qkscope.moments.sizes import predict_sizes

LAYERS = [LayerFacts(0, 4, 2, 6, "rotary", 6), LayerFacts(2, 2, 1, 8, "nope", 0, "sliding", 16)]
LAYOUT = Layout(bucket_edges(32, 8), groups=4, skip_positions=1)


def checksum_of(about, arrays):
    """What a file has to state about its contents: whoever changes them on purpose states it, too."""
    parts = [f"\n{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode() + arrays[name].tobytes()
             for name in sorted(arrays)]  # fmt: skip
    return hashlib.sha256(b"".join([about.encode("utf-8", "surrogatepass"), *parts])).hexdigest()


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
            one, two = saved.layer_moments(facts.layer)[kind], loaded.layer_moments(facts.layer)[kind]
            for name in ("pivot", "n", "u", "uu", "x", "xu", "xx"):
                np.testing.assert_array_equal(getattr(one.buckets, name), getattr(two.buckets, name))
            for name in ("n", "u", "uu"):
                np.testing.assert_array_equal(getattr(one.crossed, name), getattr(two.crossed, name))
            # What serves errors alone is float16 in units of the largest: three digits.
            for a, b in ((one.crossed.x, two.crossed.x), (one.crossed.xu, two.crossed.xu), (one.groups, two.groups)):
                np.testing.assert_allclose(b, a, atol=1e-3 * np.abs(a).max())


def test_predicted_size_is_the_file_without_its_header(path):
    data = path.read_bytes()
    (header,) = struct.unpack("<Q", data[:8])
    assert len(data) - 8 - header == predict_sizes(LAYOUT, LAYERS).file


def test_predicted_memory_is_what_the_live_sums_hold():
    assert example().live_memory == predict_sizes(LAYOUT, LAYERS).memory


def test_smollm3_3b_fits_below_a_gigabyte():
    layers = [LayerFacts(layer, 16, 4, 128) for layer in range(36)]
    sizes = predict_sizes(Layout(bucket_edges(65536, 16), 8), layers)
    # By hand: 36 x 20 heads of 8256 + 256 sums; 16 buckets of float64; of 8 groups squares, and first sums in every
    # bucket, as float16 with a float32 scale for each; counts and pivots; documents.
    of_groups = 8 * (2 * 8256 + 4) + 16 * 8 * 2 * (2 * 128 + 4)
    by_hand = 720 * (16 * 8 * (8256 + 256) + of_groups + 8 * 3 * 16 * 8 + 8 * 128) + 8 * 16 * 8
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
    with pytest.raises(MomentsFileError, match="schema '99', this qkscope reads schemas 1 to 3"):
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
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(StorageError, match="No space left"):
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


# --- files whose checksum is right and whose contents are not -------------------------------------------


def forge(path, change_header=lambda header: None, change_about=lambda text: text, change_arrays=lambda arrays: None):
    """Change what a file says, and give it the checksum that its arrays and its text then have."""
    rewrite(path, lambda metadata: None, change_arrays)
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata = header["__metadata__"]
    metadata["about"] = change_about(metadata["about"])
    metadata["sha256"] = checksum_of(metadata["about"], load_file(path))
    change_header(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_a_forgery_that_changes_nothing_is_read(path):
    forge(path)
    assert Moments.load(path).provenance == example().provenance


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"groups": 4', '"groups": 4, "groups": 4', "a key is given twice"),
        ('"groups": 4', '"groups": 4.0', "groups should be a whole number"),
        ('"groups": 4', '"groups": true', "groups should be a whole number"),
        ('"groups": 4', '"groups": 1000000000000', "groups should be a whole number"),
        ('"edges": [0, 4', '"edges": [0, NaN', "an edge should be a whole number"),
        ('"edges": [0, 4', '"edges": [0, 1e999', "an edge should be a whole number"),
        ('"edges": [0, 4', '"edges": [0, -4', "an edge should be a whole number"),
        ('"edges": [0, 4', '"edges": [0, 9', "bucket edges must rise"),
        ('"rate": 1.0', '"rate": NaN', "a sampling rate"),
        ('"head_dim": 6', '"head_dim": 1000000', "head_dim should be a whole number"),
        ('"q_heads": 4', '"q_heads": 8', "should be F64 of shape"),
        ('"layer": 2', '"layer": 0', "a layer is listed twice"),
        ('"name": "a"', '"n_layers": 1', "n_layers should be a whole number from 3"),
        ('"name": "a"', '"name": ["a"]', "name should be text"),
        ('"name": "a"', '"x": ' + "[" * 100_000, "its header is damaged"),
        ('"name": "a"', '"x": "' + "a" * 9_000_000 + '"', "its description is larger than 8 MiB"),
    ],
)
def test_claims_that_cannot_be(path, old, new, message):
    def change(text):
        assert old in text
        return text.replace(old, new, 1)

    forge(path, change_about=change)
    with pytest.raises(MomentsFileError, match=message):
        Moments.load(path)


def offsets(name, begin, end):
    return lambda header: header[name].update(data_offsets=[begin, end])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (offsets("0.q.pivot", -8, 184), "an offset should be"),
        (offsets("0.q.pivot", 0, 2**62), "overlaps another, or leaves a gap"),
        (offsets("0.q.pivot", 8, 200), "overlaps another, or leaves a gap"),
        (offsets("0.q.pivot", 0.0, 192), "an offset should be"),
        (lambda header: header["0.q.pivot"].update(dtype="I64"), "should be F64 of shape"),
        (lambda header: header["0.q.pivot"].update(shape=[6, 4]), "should be F64 of shape"),
        (lambda header: header["0.q.pivot"].update(shape=[10**12, 10**12]), "should be F64 of shape"),
        (lambda header: header.pop("0.q.pivot"), "'0.q.pivot' is missing"),
        (lambda header: header.update(x=header["0.q.pivot"]), "'x' is unexpected"),
    ],
)
def test_arrays_that_are_not_where_or_what_they_should_be(path, change, message):
    forge(path, change)
    with pytest.raises(MomentsFileError, match=message):
        Moments.load(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("0.q.counts", -1.0, "counts that no tokens can have"),
        ("0.q.counts", 2.5, "counts that no tokens can have"),
        ("0.q.counts", np.nan, "counts that no tokens can have|not numbers"),
        ("2.k.buckets.xx", np.inf, "xx holds values that are not sums"),
        ("2.k.crossed.x", np.nan, "values that are not numbers"),
        ("2.k.groups.xx.scale", np.nan, "values that are not numbers"),
        ("2.k.pivot", np.nan, "pivot holds values that are not sums"),
        ("documents", -1, "values that are not numbers of documents"),
    ],
)
def test_numbers_that_are_no_sums(path, name, value, message):
    def change(arrays):
        arrays[name] = arrays[name].copy()
        arrays[name].reshape(-1)[0] = value

    forge(path, change_arrays=change)
    with pytest.raises(MomentsFileError, match=message):
        Moments.load(path)


def test_a_provenance_that_could_not_be_read_again_is_not_written(tmp_path):
    moments = example()
    moments.provenance["notes"] = "x" * 9_000_000
    with pytest.raises(MomentsFileError, match="larger than 8 MiB"):
        moments.save(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())
