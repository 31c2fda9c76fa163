"""Datasets of vectors in the predecessor's layout: the reference method's numbers out, or a clear refusal."""

import json
import random
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope.errors import InputError, QkscopeWarning
from qkscope.lenses.position import OWN
from qkscope.lenses.rows import table_columns
from qkscope.run.progress import Events
from qkscope.validation import scan
from qkscope.validation.layout import HeadName, VectorFolders, VectorsError, find_vectors, parse_head
from qkscope.validation.scan import kept_layer
from qkscope.validation.tables import (
    analyze_vectors,
    download_vectors,
    infer_group_size,
    open_vectors,
    pair_heads,
    table_from_vectors,
)
from reference import reference_rows

WIDTH = 12
NUMBERS = ("explained_variance", "r_q", "r_k", "mu_q", "mu_k", "alpha", "beta")


def head(seed, rows=400, width=WIDTH, context=64, documents=10, sorted_rows=True):
    """Columns of one head: a random subset of tokens, a drift along one direction, uneven spreads."""
    rng = np.random.default_rng(seed)
    tokens = rng.choice(documents * context, rows, replace=False)
    if sorted_rows:
        tokens = np.sort(tokens)
    ids, t = tokens // context, tokens % context
    x = rng.normal(size=(rows, width)) * np.linspace(3, 0.5, width) + 5 * rng.normal(size=width)
    x += np.outer(t / context, rng.normal(size=width))
    return {"example_id": ids, "position": t, "vector": x.astype(np.float32)}


def table_of(columns, window=None, form="fixed", drop=(), **replaced):
    x = np.asarray(columns["vector"])
    flat = pa.array(x.ravel())
    fixed = pa.FixedSizeListArray.from_arrays(flat, x.shape[1])
    lists = {"fixed": fixed, "list": fixed.cast(pa.list_(flat.type)), "large": fixed.cast(pa.large_list(flat.type))}
    made = {
        "bucket": pa.array(np.asarray(columns["position"]) // 4, pa.int32()),
        "example_id": pa.array(columns["example_id"], pa.int32()),
        "position": pa.array(columns["position"], pa.int32()),
        "vector": lists[form],
        # As the predecessor writes it: a column of type null where attention is full.
        "sliding_window": pa.array([window] * len(x)),
        **replaced,
    }
    return pa.table({name: column for name, column in made.items() if name not in drop})


def put(root, name, table, file="data.parquet", **options):
    (root / name).mkdir(parents=True, exist_ok=True)
    pq.write_table(table, root / name / file, **options)
    return root / name / file


def dataset(root, layers=2, q_heads=4, kv_heads=2, **options):
    """A whole model's dataset; every head has tokens of its own."""
    made = {}
    for layer in range(layers):
        for kind, count in (("q", q_heads), ("k", kv_heads)):
            for i in range(count):
                name = HeadName(layer, i, kind)
                made[name] = head(hash((layer, i, kind == "q")) % 1000, rows=300 + 10 * i)
                put(root, name.folder, table_of(made[name], **options))
    return made


def table_at(folder, components=5, window=None, **model):
    return table_from_vectors(open_vectors(folder, **model), model="m", components=components, window=window)


def assert_reference(table, made, group=2, components=5):
    for (layer, number), rows in table.groupby(["layer", "head"]):
        q, k = made[HeadName(layer, number, "q")], made[HeadName(layer, number // group, "k")]
        expected = reference_rows(
            q["vector"].astype(float), k["vector"].astype(float), q["position"], k["position"], components
        )
        for column in NUMBERS:
            np.testing.assert_allclose(rows[column], expected[column], atol=1e-9, rtol=1e-9)
        assert set(rows["kv_head"]) == {number // group}
        assert (set(rows["n_q"]), set(rows["n_k"])) == ({len(q["vector"])}, {len(k["vector"])})


# -- what must come out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["fixed", "list", "large"])
def test_the_table_is_the_reference_method_on_the_raw_vectors(tmp_path, form):
    made = dataset(tmp_path, form=form)
    table = table_at(tmp_path)
    assert tuple(table.columns) == table_columns([OWN])
    assert len(table) == 2 * 4 * 5
    assert_reference(table, made)
    assert set(table["model"]) == {"m"}
    assert set(table["rotary"]) == {"unknown"}
    assert set(table["attention"]) == {"full"}
    longest = max(each["position"].max() for each in made.values())
    assert set(table["window"]) == {longest + 1}


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types(tmp_path, dtype):
    made = {}
    for kind in ("q", "k"):
        name = HeadName(0, 0, kind)
        made[name] = head(3 if kind == "q" else 4)
        made[name]["vector"] = made[name]["vector"].astype(dtype)
        put(tmp_path, name.folder, table_of(made[name]))
    assert_reference(table_at(tmp_path), made, group=1)


@pytest.mark.slow
def test_a_sample_of_heads_gives_exactly_those_rows(tmp_path):
    """16 query heads over 4 keys, some of them there: as the published protocol leaves them."""
    rng = np.random.default_rng(0)
    made, present = {}, []
    for layer in range(8):
        chosen = sorted(rng.choice(16, 5, replace=False).tolist())
        present += [(layer, number) for number in chosen]
        names = [HeadName(layer, number, "q") for number in chosen]
        names += [HeadName(layer, key, "k") for key in sorted({number // 4 for number in chosen})]
        for name in names:
            made[name] = head(len(made), rows=80)
            put(tmp_path, name.folder, table_of(made[name]))
    table = table_at(tmp_path, components=2, n_layers=12)
    assert sorted(set(zip(table["layer"], table["head"], strict=True))) == present
    assert_reference(table, made, group=4, components=2)
    assert set(table.loc[table["layer"] == 5, "depth"]) == {5 / 11}
    _, moments = next(open_vectors(tmp_path).layer_moments())
    absent = next(number for number in range(16) if (0, number) not in present)
    assert moments.window(0, "q").n[absent] == 0


def test_a_window_takes_the_first_positions(tmp_path):
    made = dataset(tmp_path)
    table = table_at(tmp_path, window=32)
    inside = {name: {k: v[x["position"] < 32] for k, v in x.items()} for name, x in made.items()}
    assert_reference(table, inside)
    assert set(table["window"]) == {32}


def test_tables_of_another_window_take_the_page_of_the_old_ones_away(tmp_path):
    dataset(tmp_path / "vectors", layers=1)
    out, page = tmp_path / "out", tmp_path / "out/report.html"

    def analyze(**settings):
        analyze_vectors([f"theirs={tmp_path / 'vectors'}"], out, Events(), "command", components=2, **settings)

    analyze()
    page.touch()
    analyze()
    assert page.exists()
    analyze(window=32)
    assert not page.exists()


def test_sliding_layers_say_so(tmp_path):
    dataset(tmp_path, layers=1, window=512)
    table = table_at(tmp_path, components=1)
    assert set(table["attention"]) == {"sliding"}
    assert set(table["attention_window"]) == {512}
    # pandas turns a nullable integer into floats; NaN is null.
    other = tmp_path / "other"
    for name in ("l00h00q", "l00h00k"):
        put(other, name, table_of(head(1), sliding_window=pa.array([512.0] * 400)))
    assert open_vectors(other).layers[0].attention_window == 512
    for name in ("l00h00q", "l00h00k"):
        put(other, name, table_of(head(1), sliding_window=pa.array(np.full(400, np.nan))))
    assert open_vectors(other).layers[0].attention == "full"


def test_unsorted_rows_and_several_files_change_nothing(tmp_path):
    made = dataset(tmp_path / "sorted")
    rng = np.random.default_rng(1)
    for name, columns in made.items():
        order = rng.permutation(len(columns["position"]))
        for i, part in enumerate(np.array_split(order, 3)):
            put(tmp_path / "mixed", name.folder, table_of({k: v[part] for k, v in columns.items()}), f"part{i}.parquet")
        # token_str is of no use here, and temporaries are not data.
        put(tmp_path / "mixed", name.folder, pa.table({"x": [1]}), ".data.parquet.tmp.parquet")
    found = open_vectors(tmp_path / "mixed")
    inferred = "group size 2, inferred from the heads that are there"
    assert found.notes == (inferred, "unsorted rows, which change no sum, in 12 heads, first l00h00q")
    assert open_vectors(tmp_path / "sorted").notes == (inferred,)
    one, two = (table_at(tmp_path / each) for each in ("sorted", "mixed"))
    for column in NUMBERS:
        np.testing.assert_allclose(one[column], two[column], atol=1e-11)


def test_the_predecessor_nests_heads_in_a_folder_of_the_models_name(tmp_path):
    dataset(tmp_path / "data" / "HuggingFaceTB_SmolLM3_3B", layers=1)
    assert find_vectors(tmp_path).root == tmp_path / "data" / "HuggingFaceTB_SmolLM3_3B"
    dataset(tmp_path / "data" / "other", layers=1)
    with pytest.raises(VectorsError, match=r"holds 2 datasets \(data/HuggingFaceTB_SmolLM3_3B, data/other\); give the"):
        find_vectors(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row_group", [500, None])
def test_no_more_than_a_batch_is_held(tmp_path, row_group):
    """30 MiB of vectors, in 240 row groups or in a single one; at no time a third of them is in memory."""
    columns = head(0, rows=120_000, width=64, context=256, documents=500)
    path = put(tmp_path, "l00h00q", table_of(columns), row_group_size=row_group)
    assert pq.ParquetFile(path).num_row_groups == (240 if row_group else 1)
    size, rows, before = columns["vector"].nbytes, 0, pa.total_allocated_bytes()
    found = scan.scan_tokens(HeadName(0, 0, "q"), (path,))[0]
    for _, vectors in scan.vector_batches(found):
        assert len(vectors) <= scan.BATCH_ROWS
        assert pa.total_allocated_bytes() - before < size / 3
        rows += len(vectors)
    assert rows == found.rows == 120_000


def test_kept_tokens_come_in_order_whatever_the_order_of_rows(tmp_path):
    """Queries in two files and out of order, keys in order: the same tokens, each with its own vectors."""
    queries, keys = head(1), head(2)
    keys = {**queries, "vector": keys["vector"]}
    order = np.random.default_rng(0).permutation(400)
    for i, part in enumerate(np.split(order, [150])):
        put(tmp_path, "l00h00q", table_of({name: of[part] for name, of in queries.items()}), f"{i}.parquet")
    put(tmp_path, "l00h00k", table_of(keys))
    kept = kept_layer(tmp_path, 0, [0], [0], low=8, high=40)
    inside = (queries["position"] >= 8) & (queries["position"] < 40)
    for found, expected in (
        (kept.document, queries["example_id"]), (kept.position, queries["position"]),
        (kept.q[0], queries["vector"]), (kept.k[0], keys["vector"]),
    ):  # fmt: skip
        np.testing.assert_array_equal(found, expected[inside])
    some = kept_layer(tmp_path, 0, [0], [0], most=30, draw=np.random.default_rng(0))
    rows = [np.flatnonzero((queries["vector"] == vector).all(axis=1))[0] for vector in some.q[0]]
    assert len(rows) == 30
    assert rows == sorted(rows)
    np.testing.assert_array_equal(some.k[0], keys["vector"][rows])
    put(tmp_path, "l00h01q", table_of(head(3)))
    with pytest.raises(VectorsError, match="l00h01q: has other tokens than the rest of its layer"):
        kept_layer(tmp_path, 0, [0, 1], [0])


# -- which key a query reads ------------------------------------------------------------------------------


def folders_of(tmp_path, queries, keys):
    """`queries` and `keys`: one list of heads per layer. Pairing looks at names only."""
    names = [HeadName(layer, i, "q") for layer, of in enumerate(queries) for i in of]
    names += [HeadName(layer, i, "k") for layer, of in enumerate(keys) for i in of]
    return VectorFolders(tmp_path, dict.fromkeys(sorted(names), ()))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_a_whole_model_shows_its_group_size(group, kv_heads, layers):
    folders = folders_of(Path(), [range(group * kv_heads)] * layers, [range(kv_heads)] * layers)
    assert infer_group_size(folders) == group
    pairs, unread = pair_heads(folders, dict.fromkeys(range(layers), group))
    assert all(key == number // group for of in pairs.values() for number, key in of.items())
    assert not unread


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(16, 4), (32, 8), (16, 16), (9, 3), (28, 4)]))
def test_a_sample_shows_its_group_size_or_is_refused_but_is_never_mispaired(seed, shape):
    q_heads, kv_heads = shape
    group = q_heads // kv_heads
    rng = np.random.default_rng(seed)
    queries = [sorted(rng.choice(q_heads, rng.integers(1, q_heads), replace=False).tolist()) for _ in range(12)]
    keys = [sorted({number // group for number in of}) for of in queries]
    folders = folders_of(Path(), queries, keys)
    try:
        size = infer_group_size(folders)
    except VectorsError as refused:
        assert "give group_size" in str(refused)
        return
    inferred, true = (pair_heads(folders, dict.fromkeys(range(12), each)) for each in (size, group))
    assert inferred == true


def test_the_published_sample_of_heads_shows_its_group_size(tmp_path):
    """300 of 36 x 16 heads over 4 keys: a group size of 5, the next best, would be wrong about 22 key heads."""
    chosen = random.Random(0).sample([(layer, number) for layer in range(36) for number in range(16)], 300)
    queries = [[number for at, number in chosen if at == layer] for layer in range(36)]
    keys = [{number // 4 for number in of} for of in queries]
    assert infer_group_size(folders_of(tmp_path, queries, keys)) == 4


@pytest.mark.parametrize(
    ("queries", "keys", "message"),
    [
        # Two query heads per key, and one key file was lost: layer 1 alone would look like four per key.
        ([[0, 1, 2, 3]] * 3, [[0, 1], [0], [0, 1]], r"12 query and 5 key heads fit no single group size: some are mis"),
        # Three queries over two keys: 2 per key with a query left out, or 1 per key with a key lost.
        ([[0, 1, 2]], [[0, 1]], r"fits a group size of 2, but 1 is too close to rule out; give group_size"),
        # All keys kept, queries sampled.
        ([[0, 5, 9]], [[0, 1, 2, 3]], r"3 query and 4 key heads fit no single group size.*give group_size"),
        ([[0, 1], [0]], [[0], []], r"3 query and 1 key heads fit no single group size: some are missing"),
    ],
)
def test_an_uncertain_group_size_is_refused(tmp_path, queries, keys, message):
    with pytest.raises(VectorsError, match=message):
        infer_group_size(folders_of(tmp_path, queries, keys))


def test_a_given_group_size_decides(tmp_path):
    for name in ("l00h00q", "l00h01q", "l00h02q", "l00h00k", "l00h01k"):
        put(tmp_path, name, table_of(head(1)))
    with pytest.raises(VectorsError, match="too close to rule out"):
        open_vectors(tmp_path)
    assert open_vectors(tmp_path, group_size=2).pairs == {0: {0: 0, 1: 0, 2: 1}}
    with pytest.raises(VectorsError, match=r"query head l00h02q has no key partner: l00h02k is missing; add the key"):
        open_vectors(tmp_path, group_size=1)
    with pytest.warns(QkscopeWarning, match="1 key head without a query head here, not read, first l00h01k"):
        assert open_vectors(tmp_path, group_size=3).pairs == {0: {0: 0, 1: 0, 2: 0}}
    with pytest.raises(VectorsError, match="at least 1, not 0"):
        open_vectors(tmp_path, group_size=0)


# -- what is refused --------------------------------------------------------------------------------------


def test_names():
    assert parse_head("l03h11q") == HeadName(3, 11, "q")
    assert parse_head("l103h02k") == HeadName(103, 2, "k")
    assert HeadName(103, 2, "k").folder == "l103h02k"
    for other in ("README", "l03h11", "l03h11v", "x/l03h11q", "all_q", "l٠٣h١١q", "l03h11q\n"):
        assert parse_head(other) is None
    for near in ("l3h1q", "l003h11q", "L03H11Q", "l03h99999q"):
        with pytest.raises(VectorsError, match="rename it"):
            parse_head(near)


def bad(**changes):
    columns = head(5)
    for name, change in changes.items():
        columns[name] = change(columns[name].copy())
    return columns


def setting(index, value):
    def change(array):
        array[index] = value
        return array

    return change


def ragged():
    vectors = [[1.0] * WIDTH] * 7 + [[1.0] * (WIDTH - 1)] + [[1.0] * WIDTH] * 392
    return pa.array(vectors, pa.list_(pa.float32()))


BAD_TABLES = {
    "no position": (table_of(head(5), drop=["position"]), r"data\.parquet: no column position \(there is: bucket, "),
    "no window": (table_of(head(5), drop=["sliding_window"]), r"no column sliding_window"),
    "float position": (table_of(head(5), position=pa.array(np.ones(400))), "column position is double, not an integer"),
    "text window": (table_of(head(5), sliding_window=pa.array(["x"] * 400)), "column sliding_window is string"),
    "part of a window": (table_of(head(5), sliding_window=pa.array([0.5] * 400)), "0.5 is not a number of tokens"),
    "scalar vector": (table_of(head(5), vector=pa.array(np.ones(400))), "column vector is double, not a list"),
    "text vector": (table_of(head(5), vector=pa.array([["a"]] * 400)), "not a list of floats"),
    "integer vector": (table_of(head(5), vector=pa.array([[1]] * 400)), "not a list of floats"),
    "ragged": (table_of(head(5), vector=ragged()), r"row 7: a vector of width 11 among vectors of 12"),
    "empty vectors": (table_of(head(5), vector=pa.array([[]] * 400, pa.list_(pa.float32()))), "first vector is empty"),
    "nan": (table_of(bad(vector=setting((17, 3), np.nan))), r"data\.parquet, row 17: nan in component 3"),
    "inf": (table_of(bad(vector=setting((399, 0), -np.inf))), r"row 399: -inf in component 0"),
    "negative": (table_of(bad(position=setting(9, -1))), r"row 9: position -1 is negative; padding was captured"),
    "null id": (
        table_of(head(5), example_id=pa.array([0, None] * 200, pa.int32())),
        r"row 1: example_id is null",
    ),
    "null vector": (
        table_of(head(5), vector=pa.array([[1.0] * WIDTH, None] * 200, pa.list_(pa.float32()))),
        "row 1: vector is null",
    ),
    "two windows": (table_of(head(5), sliding_window=pa.array([4] * 399 + [None])), r"sliding windows \(4, null\)"),
    "no rows": (table_of(head(5)).slice(0, 0), r"l00h00q: holds no rows"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
@pytest.mark.parametrize("where", ["l00h00q", "l00h00k"])
def test_bad_rows_are_told_with_file_and_row(tmp_path, case, where):
    table, message = BAD_TABLES[case]
    for name in ("l00h00q", "l00h00k"):
        put(tmp_path, name, table if name == where else table_of(head(6)))
    with pytest.raises(InputError, match=message.replace("l00h00q", where)) as told:
        table_at(tmp_path)
    assert where in str(told.value)


def test_duplicates_are_named(tmp_path):
    put(tmp_path, "l00h00k", table_of(head(6)))
    columns = head(5)
    columns["example_id"][[30, 100]], columns["position"][[30, 100]] = 3, 7
    put(tmp_path, "l00h00q", table_of(columns))
    with pytest.raises(VectorsError, match=r"data\.parquet, row 100: example_id 3, position 7 is a repetition"):
        open_vectors(tmp_path)
    put(tmp_path, "l00h00q", table_of(head(5)))
    put(tmp_path, "l00h00q", table_of(head(5)).slice(10, 3), "more.parquet")
    with pytest.raises(VectorsError, match=r"more\.parquet, row 0: example_id"):
        open_vectors(tmp_path)


def test_torn_files(tmp_path):
    put(tmp_path, "l00h00k", table_of(head(6)))
    path = put(tmp_path, "l00h00q", table_of(head(5)), compression="none", write_page_checksum=True)
    whole = path.read_bytes()
    for torn in (whole[:-100], whole[:1000], b"", b"PAR1", b"not parquet at all"):
        path.write_bytes(torn)
        with pytest.raises(
            VectorsError, match=r"l00h00q/data\.parquet: is not a complete parquet file \(.*write it again"
        ):
            open_vectors(tmp_path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF  # inside the vectors; a page's checksum tells
    path.write_bytes(bytes(flipped))
    with pytest.raises(VectorsError, match="is not a complete parquet file"):
        table_at(tmp_path)


def test_heads_that_do_not_belong_together(tmp_path):
    put(tmp_path, "l00h00q", table_of(head(5)))
    put(tmp_path, "l00h00k", table_of(head(6, width=8)))
    with pytest.raises(VectorsError, match=r"l00h00k has width 8, l00h00q has 12; heads of one layer"):
        open_vectors(tmp_path)
    put(tmp_path, "l00h00k", table_of(head(6), window=16))
    with pytest.raises(VectorsError, match="l00h00k has sliding_window 16, l00h00q has None"):
        open_vectors(tmp_path)
    put(tmp_path, "l00h00k", table_of(head(6)))
    put(tmp_path, "l00h00k", table_of(head(6, width=8)), "more.parquet")
    with pytest.raises(VectorsError, match=r"l00h00k: its files hold vectors of different widths \[8, 12\]; keep"):
        open_vectors(tmp_path)


def test_folders_that_are_no_dataset(tmp_path):
    with pytest.raises(VectorsError, match="there is no such folder"):
        open_vectors(tmp_path / "missing")
    with pytest.raises(VectorsError, match="no head folder such as l00h00q"):
        open_vectors(tmp_path)
    (tmp_path / "l00h00q").mkdir()
    with pytest.raises(VectorsError, match="l00h00q: has no parquet file"):
        open_vectors(tmp_path)
    (tmp_path / "l00h00q").rename(tmp_path / "l0h0q")
    with pytest.raises(VectorsError, match=r"folder 'l0h0q' is not named like l03h11q: rename it"):
        open_vectors(tmp_path)
    (tmp_path / "l0h0q").rmdir()
    put(tmp_path, "l00h00k", table_of(head(1)))
    with pytest.raises(VectorsError, match="has key heads only"):
        open_vectors(tmp_path)


def test_fewer_layers_than_there_are_is_refused(tmp_path):
    dataset(tmp_path)
    with pytest.raises(InputError, match="n_layers 1 was given, but there is a layer 1"):
        open_vectors(tmp_path, n_layers=1)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (b"{", "cannot be understood"),
        (b"[]", "cannot be understood"),
        (b'{"layer": {"layer": "../../etc"}}', "cannot be understood"),
        ({"layer": 1}, "of another head than l00h00q"),
        ({"head_dim": 13}, "vectors of width 12, but its metadata says 13"),
    ],
)
def test_metadata_of_a_file_is_not_trusted(tmp_path, told, message):
    if isinstance(told, dict):
        layer = {"layer": 0, "q_heads": 1, "kv_heads": 1, "head_dim": 12, **told}
        told = json.dumps({"layer": layer, "n_layers": 4, "context": 64, "rate": 1.0, "seed": 0}).encode()
    put(tmp_path, "l00h00q", table_of(head(1)).replace_schema_metadata({b"qkscope": told}))
    put(tmp_path, "l00h00k", table_of(head(2)))
    with pytest.raises(VectorsError, match=message):
        open_vectors(tmp_path)


# -- the Hub (never reached from here) --------------------------------------------------------------------


def test_a_hub_dataset_is_a_snapshot_of_its_parquet_files(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **arguments):
        asked.update(arguments, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(VectorsError, match=r"dataset a/b, revision c: has no parquet files at that revision"):
        download_vectors("a/b", "c")
    dataset(tmp_path, layers=1)
    assert download_vectors("a/b", "c") == tmp_path
    assert asked == {"repo_id": "a/b", "repo_type": "dataset", "revision": "c", "allow_patterns": ["*.parquet"]}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "its owner asks for consent first: accept on its page"),
        ("RepositoryNotFoundError", "there is no such dataset, or it is private"),
        ("RevisionNotFoundError", "there is no such revision"),
        ("LocalEntryNotFoundError", "not in the cache and the Hub cannot be reached"),
        ("OfflineModeIsEnabled", "unset HF_HUB_OFFLINE"),
    ],
)
def test_hub_errors_say_the_way_out(monkeypatch, kind, message):
    from huggingface_hub import errors

    error = getattr(errors, kind)
    raised = error.__new__(error)  # their constructors want a whole HTTP response

    def snapshot_download(*_, **__):
        raise raised

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(VectorsError, match=message):
        download_vectors("a/b", "main")


def test_a_name_that_is_no_hub_name():
    with pytest.raises(VectorsError, match="cannot be downloaded: "):
        download_vectors("../../etc/passwd")


def test_other_tables_of_an_earlier_analysis_are_removed(tmp_path):
    """Else a report would combine their measures with these components."""
    dataset(tmp_path / "vectors", layers=1)
    out = tmp_path / "results"
    out.mkdir()
    for name in ("heads.csv", "buckets.parquet", "notes.csv"):
        (out / name).write_text("model\nm\n")
    analyze_vectors([f"m={tmp_path / 'vectors'}"], out, Events(), "test")
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith(".")) == [
        "notes.csv", "provenance.json", "qk.csv",
    ]  # fmt: skip


def test_undefined_correlations_are_warned_about_for_present_heads_only(tmp_path):
    """Heads 1 … 3 of layer 0 are absent; nothing is said of them."""
    for name in ("l00h00q", "l00h00k"):
        put(tmp_path, name, table_of(head(1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = table_at(tmp_path, group_size=4)
    assert set(table["head"]) == {0}
    put(tmp_path, "l00h00q", table_of(head(1, rows=5)))
    with pytest.warns(QkscopeWarning, match=r"for 1 of 1 head, first layer 0 head 0: 5 tokens are fewer"):
        table_at(tmp_path, group_size=4)
