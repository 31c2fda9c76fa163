"""Moments on disk: what is written is read, and anything damaged, foreign or old is refused by name."""

import hashlib
import json
import os
import resource
import signal
import stat
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.numpy import save as serialize

from qkscope.errors import MomentsFileError, StorageError
from qkscope.files import is_abandoned, replacing
from qkscope.layers import LayerFacts
from qkscope.moments.file import PreRopeFile, read_provenance
from qkscope.moments.layout import Layout, bucket_edges, capture_layout
from qkscope.moments.moments import Moments
from qkscope.moments.sizes import predict_sizes
from qkscope.results.remove import remove_unfinished

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


def test_smollm3_3b_fits_below_a_gigabyte():
    layers = [LayerFacts(layer, 16, 4, 128) for layer in range(36)]
    sizes = predict_sizes(Layout(bucket_edges(65536, 16), 8), layers)
    # By hand: 36 x 20 heads; float32 squares of 5 segments (the window doubles four times), and their float64 scale; of
    # 11 buckets and 7 groups squares, of 16 x 8 cells two first sums, in 16 bits with a float32 scale for each; float64
    # first sums of 16 buckets, counts, pivots; documents.
    rounded = (11 + 7) * (2 * 8256 + 4) + 16 * 8 * 2 * (2 * 128 + 4)
    by_hand = 720 * (5 * (4 * 8256 + 8) + rounded + 8 * (16 * 256 + 3 * 16 * 8 + 128)) + 8 * 16 * 8
    assert sizes.file == by_hand
    assert sizes.file < 0.45e9


def test_loading_twice_merges_like_the_originals(path):
    twice = Moments.load(path).merge(Moments.load(path))
    one, two = (m.window(0, "q").statistics(1.0) for m in (example(), twice))
    np.testing.assert_allclose(two.n, 2 * one.n)
    np.testing.assert_allclose(two.cov_xx, one.cov_xx, atol=1e-7)


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
    with pytest.raises(MomentsFileError, match="schema '99', this qkscope reads schemas 2 to 4"):
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


def saving_up_to(size, path):
    """Save in a process that may write only so many bytes per file; returns how it ended.

    With SIGXFSZ the system kills it in the middle of a write, as SIGKILL would.
    """
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        example().save(path)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_unfinished_write_leaves_the_old_file(path):
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            example().save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["a.safetensors"]


def test_a_kill_in_the_middle_of_a_write_leaves_one_unlocked_file_that_the_next_run_removes(tmp_path):
    moments = tmp_path / "moments"
    for place in (moments, moments / ".shards/one"):
        place.mkdir(parents=True)
        name = "one.safetensors" if place == moments else "000000.safetensors"
        assert saving_up_to(10_000, place / name) == -signal.SIGXFSZ
        (left,) = [entry for entry in place.iterdir() if entry.is_file()]
        assert left.stat().st_size == 10_000
        assert is_abandoned(left)
        # As the library's own writer, which qkscope 0.2 used, left them; and what is not ours.
        (place / ".tmpAb12xY").touch(mode=0o600)
        (place / ".tmpAb12xYz").touch(mode=0o600)
        (place / ".tmpshared").touch(mode=0o644)
    remove_unfinished(tmp_path)
    assert (moments / ".tmpAb12xY").exists()  # somebody may be writing it
    remove_unfinished(tmp_path, alone=True)
    files = sorted(str(path.relative_to(moments)) for path in moments.rglob("*") if path.is_file())
    assert files == [".shards/one/.tmpAb12xYz", ".shards/one/.tmpshared", ".tmpAb12xYz", ".tmpshared"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_file_has_the_rights_that_the_umask_leaves(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        example().save(tmp_path / "a.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == mode


def test_the_file_that_is_written_is_the_one_that_was_locked(tmp_path, monkeypatch):
    """Its inode is followed from the lock to the finished file, and it is locked while its last bytes are synced."""
    seen, sync = [], os.fsync

    def watching(descriptor):
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            (temporary,) = tmp_path.glob(".a.safetensors.*.tmp")
            assert not is_abandoned(temporary)
            seen.append((status.st_ino, temporary.stat().st_ino, status.st_size))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watching)
    example().save(tmp_path / "a.safetensors")
    done = (tmp_path / "a.safetensors").stat()
    assert seen == [(done.st_ino, done.st_ino, done.st_size)]


def test_a_writer_that_renames_a_file_of_its_own_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("old")

    def write():
        with replacing(tmp_path / "a.txt") as temporary:
            (tmp_path / "private").write_text("new")
            (tmp_path / "private").rename(temporary)

    with pytest.raises(StorageError, match="another file took the place of its temporary file"):
        write()
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {"a.txt": "old"}


def test_the_bytes_are_those_of_the_safetensors_library(path):
    """But for the order of the metadata, which the library leaves to chance."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    theirs = serialize(load_file(path), header["__metadata__"])
    (their_size,) = struct.unpack("<Q", theirs[:8])
    their_header = json.loads(theirs[8 : 8 + their_size])
    assert (size, list(header), header) == (their_size, list(their_header), their_header)
    assert data[8 + size :] == theirs[8 + their_size :]
    again = path.with_name("b.safetensors")
    example().save(again)
    assert again.read_bytes() == data


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
        ("2.k.segments.xx", np.inf, "xx holds values that are not sums"),
        ("2.k.crossed.x.scale", np.nan, "values that are not numbers"),
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


# --- sums that no tokens can have -------------------------------------------------------------------------


SPACED = Layout(bucket_edges(32, 4), groups=3, unrotated_every=2)
WITHOUT_ROTATION = [LayerFacts(0, 2, 1, 4, "nope", 0)]


def summed(rng, size=(6, 32)):
    """Moments of six documents in three groups, also summed before rotation."""
    moments = Moments(SPACED, WITHOUT_ROTATION)
    rows, tokens = size
    q, k = (3 + rng.normal(size=(rows, heads, tokens, 4)) for heads in (2, 1))
    moments.add(0, q, k, groups=[row % 3 for row in range(rows)])
    return moments


def squares_of(arrays, kind="q"):
    """Packed squares of segments, in units of 1, and where a triangle of width 4 has its diagonal.

    There are three segments: the first bucket, the second, and the last two.
    """
    squares, scale = arrays[f"0.{kind}.segments.xx"], arrays[f"0.{kind}.segments.xx.scale"]
    squares *= scale[..., None].astype(np.float32)
    scale[:] = 1.0
    return squares, [0, 4, 7, 9]


def negative_squares(arrays):
    squares, diagonal = squares_of(arrays)
    squares[1, 2, diagonal[3]] *= -1


def negative_products(arrays):
    """Products within their bounds, two by two, that no four coordinates can have together: all correlate by -0.9."""
    squares, diagonal = squares_of(arrays, "k")
    roots = np.sqrt(squares[..., diagonal])
    rows, columns = np.triu_indices(4)
    arrays["0.k.buckets.xx"][:] = 0  # the share of their segment
    squares[:] = roots[..., rows] * roots[..., columns] * np.where(rows == columns, 1, -0.9)
    arrays["0.k.buckets.x"][:] = 0
    arrays["0.k.buckets.xu"][:] = 0


def large_products(arrays):
    squares, diagonal = squares_of(arrays)
    squares[0, 1, 1] = 1.01 * np.sqrt(squares[0, 1, 0] * squares[0, 1, diagonal[1]])


def large_sums(arrays):
    squares, _ = squares_of(arrays)
    n = arrays["0.q.counts"][0, 0, 1].sum()
    arrays["0.q.buckets.x"][0, 1, 0] = 1.03 * np.sqrt(n * squares[0, 1, 0])


def large_covariances(arrays):
    """A correlation of 1.5 with position in one bucket: xu = x u / n + 1.5 n sqrt(var x var u)."""
    squares, _ = squares_of(arrays)
    n, u, uu = arrays["0.q.counts"][1, :, 1].sum(axis=-1)
    x, xx = arrays["0.q.buckets.x"][1, 1, 0], squares[1, 1, 0]
    arrays["0.q.buckets.xu"][1, 1, 0] = x * u / n + 1.5 * np.sqrt((xx - x * x / n) * (uu - u * u / n))


def other_positions(arrays):
    """Tokens of the last bucket at the positions of the first."""
    arrays["0.q.counts"][:, 1:, -1] = arrays["0.q.counts"][:, 1:, 0]


def equal_positions(arrays):
    """All tokens at their bucket's mean position, and Σu² below that."""
    n, u, _ = arrays["0.q.counts"][:, :, 1].transpose(1, 0, 2)
    arrays["0.q.counts"][:, 2, 1] = 0.999 * u * u / n


def group_squares(sign):
    def change(arrays):
        arrays["0.q.groups.xx"][0, 1, 0, squares_of(arrays)[1][2]] = sign * 32767
        arrays["0.q.groups.xx.scale"][0, 1, 0] = 2.0  # twice what all groups have together

    return change


def group_sums(arrays):
    squares, _ = squares_of(arrays)
    arrays["0.q.crossed.x"][0, 1, 2, 0] = 32767
    arrays["0.q.crossed.x.scale"][0, 1, 2] = 2 * np.sqrt(arrays["0.q.counts"][0, 0, 1, 2] * squares[0, 1].max())


def documents(value):
    return lambda arrays: arrays["documents"].__setitem__((1, 2), value)


def before_rotation(name, value, at=(0, 0)):
    return lambda arrays: arrays[f"0.k.unrotated.{name}"].__setitem__(at, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (negative_squares, "0.q: squares that no tokens"),
        (large_products, "0.q: products that no tokens"),
        (negative_products, "0.k: its second moments are not positive semidefinite"),
        (large_sums, "0.q: sums that no tokens"),
        (large_covariances, "0.q: covariances with position that no tokens"),
        (other_positions, "0.q: counts that no tokens"),
        (equal_positions, "0.q: counts that no tokens"),
        (group_squares(-1), "0.q: squares of document groups that no tokens"),
        (group_squares(1), "0.q: squares of document groups that no tokens"),
        (group_sums, "0.q: sums of document groups that no tokens"),
        (documents(0), ".*not numbers of documents"),
        (documents(2**53), ".*not numbers of documents"),
        (documents(1000), ".*not numbers of documents"),
        (documents(-1), ".*not numbers of documents"),
        (before_rotation("n", -1.0), "0.k: counts before rotation that no tokens can have"),
        (before_rotation("n", 0.5), "0.k: counts before rotation that no tokens can have"),
        (before_rotation("n", 1e6), "0.k: counts before rotation that no tokens can have"),
        (before_rotation("xx", -1.0), "0.k: squares before rotation"),
        (before_rotation("xx", 1e6, (0, 1)), "0.k: products before rotation"),
        (before_rotation("x", 1e6), "0.k: sums before rotation"),
    ],
)
def test_sums_that_no_tokens_can_have_are_refused_though_their_checksum_is_right(tmp_path, change, message):
    path = tmp_path / "a.safetensors"
    summed(np.random.default_rng(0)).save(path)
    forge(path)
    Moments.load(path)
    forge(path, change_arrays=change)
    with pytest.raises(MomentsFileError, match=rf"a\.safetensors: {message}"):
        Moments.load(path)
    if "before_rotation" in change.__qualname__:
        with pytest.raises(MomentsFileError, match=rf"a\.safetensors: {message}"):
            PreRopeFile(path).layer(0)


def test_rounding_of_a_coordinate_far_below_the_others_is_no_damage(tmp_path):
    """As at position 0 of documents that begin with the same token: products of small coordinates are only rounding."""

    def small_coordinate(arrays):
        squares, diagonal = squares_of(arrays)
        squares[0, 0, :4] = 0
        squares[0, 0, 0] = 1e-9 * squares[0, 0, diagonal[1]]
        squares[0, 0, 1] = 1.0005 * np.sqrt(squares[0, 0, 0] * squares[0, 0, diagonal[1]])
        for name in ("buckets.x", "buckets.xu", "crossed.x", "crossed.xu"):
            arrays[f"0.q.{name}"][0, 0, ..., 0] = 0

    path = tmp_path / "a.safetensors"
    summed(np.random.default_rng(0)).save(path)
    forge(path, change_arrays=small_coordinate)
    Moments.load(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["spread", "constant", "far", "sink", "line", "zero", "one", "tiny"])
def test_real_sums_are_never_refused(tmp_path, kind, dtype):
    """Vectors at the edge of what a Gram matrix can be: no spread, one token, a straight line, a mean far away."""
    rng = np.random.default_rng(1)
    total = Moments(capture_layout(64, buckets=8, groups=3, common=32, skip=0), WITHOUT_ROTATION)
    for document in range(1 if kind == "one" else 7):
        x = rng.normal(size=(1, 3, 64, 4))
        if kind in ("constant", "zero"):
            x[:] = 0 if kind == "zero" else np.array([1.0, -2, 3, 0.1])
        elif kind == "line":
            x = np.arange(64.0)[:, None] * np.array([1.0, 2, -1, 0.5]) + np.zeros((1, 3, 1, 1))
        x = x * 1e-18 if kind == "tiny" else x + (3e4 if kind == "far" else 0)
        if kind == "sink":
            x[:, :, 0] = 1e4
        vectors = torch.tensor(x).to(dtype)
        one = Moments(total.layout, WITHOUT_ROTATION)
        one.add(0, vectors[:, :2], vectors[:, 2:], groups=document % 3)
        total = one if document == 0 else total.merge(one)
    total.save(tmp_path / "a.safetensors")
    loaded = Moments.load(tmp_path / "a.safetensors")
    assert loaded.tokens() == total.tokens()
    assert PreRopeFile(tmp_path / "a.safetensors").layer(0).unrotated["q"] is not None
