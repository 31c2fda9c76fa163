"""Whatever is in a file: a typed error or a valid result, in bounded time and memory, and no file anywhere else.

Study files, moments files, results folders and documents are built or broken by hypothesis. The examples are the same
in every run; QKSCOPE_FUZZ_EXAMPLES=20000 tries so many of each, other ones every time.
"""

import copy
import datetime
import json
import os
import signal
import subprocess
import sys
import tracemalloc
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkscope.documents.sources import read_documents
from qkscope.errors import DocumentError, MomentsFileError, QkscopeError, StudyError, TableError
from qkscope.lenses.position import qk_table
from qkscope.lenses.registry import head_tables
from qkscope.lenses.views import build_tables, write_tables
from qkscope.moments.moments import Moments
from qkscope.report.write import write_long_tables
from qkscope.results.read import load_results
from qkscope.study.load import load_study, parse_study
from qkscope.study.schema import Documents, Study
from reports import FIGURES, Cards
from test_moments_file import checksum_of, example

ASKED = os.environ.get("QKSCOPE_FUZZ_EXAMPLES")
SECONDS, MEBIBYTES = 20, 256  # of one example; a hang or a bomb is far beyond


def fuzz(examples):
    return settings(
        max_examples=int(ASKED) if ASKED else examples,
        derandomize=not ASKED,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@contextmanager
def bounded(folder):
    """An alarm for hangs, a limit for Python's memory, and a look at the folder above for files that do not belong."""

    def hang(*_):
        raise AssertionError(f"more than {SECONDS} s")

    around = listing(folder.parent)
    previous = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert listing(folder.parent) == around


def listing(folder):
    return sorted(entry.name for entry in os.scandir(folder))


# --- study files ------------------------------------------------------------------------------------

BASE = {
    "study": "tiny",
    "title": "Tiny",
    "model": "some/model",
    "documents": {"files": ["*.txt"], "limit": 3, "special_tokens": "none"},
    "phases": {"early": {"context": 64, "config": {"rope_theta": 1e4}}},
    "checkpoints": [
        {"name": "a", "phase": "early", "expect": {"x": {"y": [1, 2.5, "z", None, True]}}},
        {"name": "b", "context": 512, "label": "B", "revision": "r"},
    ],
    "heads": {"sample": 3, "seed": 0},
    "layers": [0, 1],
    "common_window": 64,
    "figure_checkpoints": ["a"],
}

words = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["../x", "/etc/passwd", "~", "~nobody/x", "=1+1", "con", "a" * 300, "\x00", "\u202e", "<b>", "$x$",
         "trust_remote_code",
         "auto_map", "_x", "__class__", "published", "all", "full", "**", "[", "a", "b", "early", "\ud800"]
    ),
)  # fmt: skip
numbers = st.one_of(
    st.integers(-5, 70), st.integers(), st.sampled_from([2**24, 2**53, 2**63, -(2**70), 10**400]), st.floats()
)
scalars = st.one_of(
    st.none(), st.booleans(), numbers, words, st.binary(max_size=4), st.dates(), st.datetimes(),
    st.just(datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)),
)  # fmt: skip
keys = st.one_of(
    words, st.sampled_from(sorted(Study.model_fields)), st.integers(-3, 3), st.booleans(), st.floats(), st.none()
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


def places_in(tree, path=()):
    yield path
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield from places_in(value, (*path, key))


def changed_at(tree, path, change):
    if not path:
        return change(tree)
    tree[path[0]] = changed_at(tree[path[0]], path[1:], change)
    return tree


@st.composite
def studies(draw):
    """The base study with a few places replaced, removed, nested or extended."""
    study = copy.deepcopy(BASE)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places_in(study))[1:]))
        how = draw(st.sampled_from(["replace", "remove", "extend", "nest", "double"]))
        if how == "remove":
            changed_at(study, path[:-1], lambda parent, key=path[-1]: without(parent, key))
        elif how == "extend":
            key, value = draw(keys), draw(trees)
            changed_at(study, path, lambda old, key=key, value=value: extended(old, key, value))
        elif how == "nest":
            levels = draw(st.sampled_from([1, 5, 17, 40, 300]))
            changed_at(study, path, lambda old, levels=levels: nested(old, levels))
        elif how == "double":
            changed_at(study, path, lambda old: old + old if isinstance(old, list | str) else old)
        else:
            value = draw(trees)
            changed_at(study, path, lambda old, value=value: value)
        if not isinstance(study, dict):
            break
    return study


def without(parent, key):
    if isinstance(parent, dict):
        return {each: value for each, value in parent.items() if each != key}
    return [value for i, value in enumerate(parent) if i != key]


def extended(old, key, value):
    if isinstance(old, dict):
        return {**old, key: value}
    return [*old, value] if isinstance(old, list) else value


def nested(value, levels):
    for _ in range(levels):
        value = [value]
    return value


def check_study(study):
    """What everything after it relies on."""
    names = [checkpoint.name for checkpoint in study.resolved_checkpoints()]
    assert len({name.lower() for name in names}) == len(names)
    for name in [study.study, *names]:
        assert Path(name).name == name
        assert name.isascii()
        assert name[0].isalnum()
    for checkpoint in study.resolved_checkpoints():
        assert 2 <= checkpoint.context <= 2**24
        assert checkpoint.label.isprintable()
        assert not {"trust_remote_code", "auto_map"} & set(checkpoint.config)
    assert study.window_in_common() <= min(checkpoint.context for checkpoint in study.resolved_checkpoints())
    json.dumps(study.model_dump(mode="json"), allow_nan=False).encode()  # the provenance will hold it


@pytest.mark.slow
@fuzz(250)
@given(study=studies())
def test_study_documents(place, study):
    path = place / "study.yaml"
    try:
        text = yaml.safe_dump(study, allow_unicode=True)
        path.write_bytes(text.encode("utf-8", "replace"))
    except (yaml.YAMLError, RecursionError, ValueError):  # there are trees that no file can hold
        return
    with bounded(place):
        try:
            loaded = load_study(path)
        except StudyError as error:
            assert len(str(error)) < 20_000
            return
    check_study(loaded.study)


PIECES = [
    "study: a\n", "checkpoints:\n", "- name: x\n", "  context: 9\n", "documents: {files: x}\n", "model: m\n",
    "&a ", "*a",
    "<<: ", "!!python/name:os.system ", "!!binary ", "!!set ", "!!omap ", "!!pairs ", "!!int ", "!!float ",
    "!!timestamp ",
    "!!bool ", "!!null ", "!!str ", "? ", ": ", "- ", "[", "]", "{", "}", ",", "|\n", ">\n", "'", '"',
    '"\\ud800"', "%YAML 9.9\n",
    "%TAG ! x\n", "---\n", "...\n", "\t", " ", "\n", "#", "1:1:1", "1:1:1.5", "0x_", "0b2", "0o9", "1e999",
    ".inf", ".nan",
    "2001-99-99", "2001-01-01T00:00:00+99:99", "~", "null", "=", "\x00", "\x85", "\u2028", "\ufeff",
]  # fmt: skip


@fuzz(300)
@given(text=st.one_of(st.lists(st.sampled_from(PIECES), max_size=25).map("".join), st.text(max_size=60)))
def test_study_text(place, text):
    with bounded(place):
        try:
            study = parse_study(text)
        except StudyError:
            return
    check_study(study)


@fuzz(150)
@given(data=st.binary(max_size=80), at=st.floats(0, 1), cut=st.integers(0, 20))
def test_study_bytes(place, data, at, cut):
    whole = yaml.safe_dump(BASE).encode()
    begin = int(at * len(whole))
    path = place / "study.yaml"
    path.write_bytes(whole[:begin] + data + whole[begin + cut :])
    with bounded(place):
        try:
            study = load_study(path).study
        except StudyError:
            return
    check_study(study)


# --- moments files ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(place):
    example().save(place / "whole.safetensors")
    return (place / "whole.safetensors").read_bytes()


def taken_apart(whole):
    size = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + size]), whole[8 + size :]


def put_together(header, data):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def signed_again(path):
    """Recompute the checksum as the package would, where the file can still be read at all."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        header, data = taken_apart(path.read_bytes())
        metadata = header["__metadata__"]
        metadata["sha256"] = checksum_of(metadata["about"], load_file(path))
        path.write_bytes(put_together(header, data))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return


def load_or_refuse(path):
    """Load, and where that succeeds use it as the next stages do."""
    tracemalloc.start()
    try:
        with bounded(path.parent):
            try:
                moments = Moments.load(path)
            except MomentsFileError as error:
                assert str(path) in str(error)
                return
            try:
                table = qk_table(moments, model="x")
                moments.merge(moments).require_complete()
            except QkscopeError:
                return
            assert set(table["layer"]) == set(moments.layers)
            assert table["depth"].between(0, 1).all()
            assert table[["r_q", "r_k"]].abs().max().max() <= 1 or table["r_q"].isna().all()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEBIBYTES * 2**20


@pytest.mark.slow
@fuzz(150)
@given(
    edits=st.lists(
        st.tuples(
            st.sampled_from(["flip", "cut", "insert", "end"]), st.floats(0, 1), st.binary(min_size=1, max_size=9)
        ),
        min_size=1,
        max_size=4,
    ),
    signed=st.booleans(),
)
def test_moments_bytes(place, whole, edits, signed):
    data = bytearray(whole)
    for how, where, value in edits:
        at = int(where * (len(data) - 1)) if data else 0
        if how == "flip":
            data[at : at + len(value)] = value[: len(data) - at]
        elif how == "cut":
            del data[at : at + len(value)]
        elif how == "insert":
            data[at:at] = value
        else:
            del data[at:]
    path = place / "bytes.safetensors"
    path.write_bytes(bytes(data))
    if signed:
        signed_again(path)
    load_or_refuse(path)


odd = st.one_of(
    st.none(), st.booleans(), st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**30, 3.0,
    float("nan"), float("inf"), "3"]),
    st.integers(-3, 70), st.floats(), st.text(max_size=5), st.just([]), st.just({}), st.lists(st.integers(-2,
    70), max_size=5),
    st.sampled_from(["F32", "F64", "I64", "BF16", "nope", "sliding"]),
)  # fmt: skip


@pytest.mark.slow
@fuzz(200)
@given(data=st.data(), signed=st.booleans())
def test_moments_headers(place, whole, data, signed):
    header, arrays = taken_apart(whole)
    about = json.loads(header["__metadata__"]["about"])
    for _ in range(data.draw(st.integers(1, 2))):
        tree = data.draw(st.sampled_from([about, about, header]))
        path = data.draw(st.sampled_from([p for p in places_in(tree) if p]))
        how, value = data.draw(st.sampled_from(["replace", "remove", "extend", "nest"])), data.draw(odd)
        if how == "remove" and len(path) == 1:
            tree.pop(path[0])
        elif how == "remove":
            changed_at(tree, path[:-1], lambda parent, key=path[-1]: without(parent, key))
        elif how == "nest":
            changed_at(tree, path, lambda old: nested(old, 500))
        elif how == "extend":
            changed_at(tree, path, lambda old, value=value: extended(old, "more", value))
        else:
            changed_at(tree, path, lambda old, value=value: value)
    if isinstance(header.get("__metadata__"), dict) and "about" in header["__metadata__"]:
        header["__metadata__"]["about"] = json.dumps(about)
    path = place / "header.safetensors"
    path.write_bytes(put_together(header, arrays))
    if signed:
        signed_again(path)
    load_or_refuse(path)


@pytest.mark.slow
@fuzz(80)
@given(
    name=st.data(),
    at=st.floats(0, 1, exclude_max=True),
    value=st.one_of(st.floats(), st.sampled_from([-1.0, 0.5, 1e300])),
)
def test_moments_values(place, whole, name, at, value):
    """A file that is right in form and checksum, with one number that is not."""
    from safetensors.numpy import load_file, save_file

    path = place / "values.safetensors"
    path.write_bytes(whole)
    arrays = {key: array.copy() for key, array in load_file(path).items()}
    chosen = arrays[name.draw(st.sampled_from(sorted(arrays)))].reshape(-1)
    if chosen.dtype.kind == "i":  # a number of documents
        info = np.iinfo(chosen.dtype)
        value = int(np.clip(np.nan_to_num(value), max(info.min, -(2**62)), min(info.max, 2**62)))
    with np.errstate(over="ignore"):
        chosen[int(at * chosen.size)] = value
    metadata = taken_apart(whole)[0]["__metadata__"]
    metadata["sha256"] = checksum_of(metadata["about"], arrays)
    save_file(arrays, path, metadata=metadata)
    load_or_refuse(path)


def bomb_headers():
    """Files of a few hundred bytes that claim to be large."""
    metadata = {"format": "qkscope-moments", "schema": "1", "sha256": "0" * 64}
    layer = {"layer": 0, "q_heads": 10_000, "kv_heads": 10_000, "head_dim": 4096, "rotary": "nope", "rotary_dims": 0,
             "attention": "full", "attention_window": None}  # fmt: skip
    layout = {"edges": [0, 2**31], "groups": 65_536, "skip_positions": 0, "rate": 1.0, "seed": 0}
    about = {"layout": layout, "layers": [layer], "provenance": {}}
    claimed = {"dtype": "F64", "shape": [10_000, 4096], "data_offsets": [0, 10_000 * 4096 * 8]}
    yield "claims", put_together({"__metadata__": {**metadata, "about": json.dumps(about)}, "0.q.pivot": claimed}, b"")
    yield "nesting", put_together({"__metadata__": {**metadata, "about": "[" * 10**6}}, b"")
    yield "long", (2**63).to_bytes(8, "little") + b"{}"
    yield "half", (2**30).to_bytes(8, "little") + b"{}"
    twice = b'{"__metadata__": {"format": "x", "format": "qkscope-moments"}, "__metadata__": {}}'
    yield "twice", len(twice).to_bytes(8, "little") + twice
    yield "many", put_together({"__metadata__": {**metadata, "about": "[" + "[]," * 10**6 + "[]]"}}, b"")


LIMITED = """
import resource, sys
from qkscope.errors import MomentsFileError
from qkscope.moments.moments import Moments
import safetensors.numpy
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 256 * 2**20,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
for path in sys.argv[1:]:
    try:
        Moments.load(path)
    except MomentsFileError as error:
        print("refused", path)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_header_bombs_in_a_process_of_little_memory(tmp_path):
    paths = []
    for name, content in bomb_headers():
        paths.append(str(tmp_path / f"{name}.safetensors"))
        Path(paths[-1]).write_bytes(content)
    done = subprocess.run([sys.executable, "-c", LIMITED, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"refused {path}" for path in paths]


# --- results folders --------------------------------------------------------------------------------

COLUMNS = ["model", "layer", "head", "pc", "explained_variance", "r_q", "r_k", "window", "depth", "rotary"]
MEASURES = [name for each in head_tables() if each.has_row_per_head for name in each.names if name not in COLUMNS]
OF_HEADS = {"windows": "own", "attention": "full", "attention_window": "", "category": "mixed", "r_q_se": "0.1",
            **dict.fromkeys(MEASURES, "0.5")}  # fmt: skip
CELLS = ["a", "b", "=1+1", "0", "1", "2", "-1", "0.5", "-0.3", "nan", "", "inf", "1e300", "1e-300",
         "9999999999999999999", "x",
         "rotary", "nope", "64", "128", "0.25", '"', "\x00", "é", "True", "1_0", "0x1", " 1", "\ud7ff",
         "3:4"]  # fmt: skip


@st.composite
def tables(draw, windows=("64",)):
    """A right table with some cells, rows or the header changed; at several windows, with more of what heads have."""
    header = [*COLUMNS, *(OF_HEADS if len(windows) > 1 else {})]
    rows = [
        [model, str(layer), str(head), "0", "0.5", "0.25", "-0.5", window, "", "rotary" if layer else "nope",
         *(OF_HEADS.values() if len(windows) > 1 else ())]
        for window in windows for model in "ab" for layer in range(2) for head in range(2)
    ]  # fmt: skip
    for _ in range(draw(st.integers(0, 4))):
        row = draw(st.sampled_from([header, *rows])) if draw(st.booleans()) else draw(st.sampled_from(rows))
        what = draw(st.sampled_from(["cell", "cell", "cell", "more", "less", "again"]))
        if what == "cell" and row:
            row[draw(st.integers(0, len(row) - 1))] = draw(st.one_of(st.sampled_from(CELLS), st.text(max_size=4)))
        elif what == "more":
            row.append(draw(st.sampled_from(CELLS)))
        elif what == "less" and row:
            row.pop()
        else:
            rows.append(list(row))
    return "\n".join(",".join(row) for row in [header, *rows]) + "\n"


RECORD = {
    "study": {"study": "s", "title": "S", "heads": {"sample": 2, "seed": 0}, "figure_checkpoints": ["a"]},
    "corpus": {"source": "x", "fingerprint": "sha256:0"},
    "checkpoints": [
        {"name": name, "label": name.upper(), "phase": "p", "context": 64, "model": "m", "dtype": "float32",
         "rope_theta": 1e4, "max_position_embeddings": 64, "n_layers": 2, "model_type": "llama", "documents": 3,
         "tokens": 192, "layers": [{"layer": 0, "q_heads": 2, "kv_heads": 2, "rotary": "nope"}]}
        for name in "ab"
    ],
    "analysis": {"common_window": 64, "skip_positions": 0},
}  # fmt: skip

json_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.sampled_from([10**400, 2**64, 1e308]), st.floats(), words
)
json_trees = st.recursive(
    json_scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def provenances(draw):
    record = copy.deepcopy(RECORD)
    for _ in range(draw(st.integers(0, 4))):
        path = draw(st.sampled_from([p for p in places_in(record) if p]))
        value = draw(json_trees)
        changed_at(record, path, lambda old, value=value: value)
    return json.dumps(record)


@pytest.mark.slow
@fuzz(70)
@given(
    table=tables(),
    record=st.one_of(provenances(), st.text(max_size=20), st.just("[" * 100_000), st.just("1" * 5000)),
    common=st.one_of(st.none(), tables()),
    windows=st.one_of(st.none(), tables(("64", "32"))),
)
def test_results_folders(place, table, record, common, windows):
    folder = place / "results"
    folder.mkdir(exist_ok=True)
    files = {"qk.csv": table, "provenance.json": record, "components.csv": common, "heads.csv": windows}
    for name, text in files.items():
        (folder / name).unlink(missing_ok=True)
        if text is not None:
            (folder / name).write_bytes(text.encode("utf-8", "replace"))
    with bounded(folder):
        try:
            found = build_tables(load_results(folder))
        except TableError:
            return
        write_tables(found, folder)
        write_long_tables(found, folder)
        writer = Cards(found)
        for name, entry in FIGURES.items():
            if entry.exists(found.own):
                writer.text(name).encode()
    assert {entry.name for entry in folder.iterdir()} <= {*files, "tables"}


@fuzz(100)
@given(data=st.binary(max_size=200))
def test_results_bytes(place, data):
    folder = place / "bytes"
    folder.mkdir(exist_ok=True)
    (folder / "qk.csv").write_bytes(data)
    with bounded(folder):
        try:
            load_results(folder)
        except TableError:
            return


# --- documents --------------------------------------------------------------------------------------


def read_all(place, name, content):
    folder = place / "documents"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    with bounded(folder):
        try:
            found = list(read_documents(Documents(files=name), folder))
        except DocumentError as error:
            assert len(str(error)) < 2000
            return
    for document in found:
        document.text.encode()  # what a tokenizer takes


@fuzz(150)
@given(
    lines=st.lists(
        st.one_of(
            st.binary(max_size=20),
            json_trees.map(lambda tree: json.dumps(tree).encode()),
            st.dictionaries(st.sampled_from(["text", "x"]), json_trees, max_size=2).map(
                lambda d: json.dumps(d).encode()
            ),
            st.sampled_from(
                [b'{"text": "\\ud800"}', b"[" * 100_000, b'{"text": ' + b"1" * 5000 + b"}", b'{"text": "a", "text": 1}']
            ),
        ),
        max_size=4,
    ),
    name=st.sampled_from(["a.jsonl", "a.txt", "a.NDJSON"]),
)
def test_documents_of_lines(place, lines, name):
    read_all(place, name, b"\n".join(lines))


@pytest.fixture(scope="module")
def parquet(place):
    pd.DataFrame({"text": ["one", "two" * 50, "drei ä"], "n": [1, 2, 3]}).to_parquet(place / "whole.parquet")
    return (place / "whole.parquet").read_bytes()


@fuzz(150)
@given(
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 9),
)
def test_documents_of_parquet(place, parquet, edits, cut):
    data = bytearray(parquet)
    for where, value in edits:
        data[int(where * len(data))] = value
    read_all(place, "a.parquet", bytes(data[: len(data) - cut if cut > 6 else len(data)]))


@fuzz(100)
@given(
    pattern=words.filter(
        lambda text: text.strip() and text.isprintable() and "**" not in text and not text.startswith("/")
    )
)
def test_globs(place, pattern):
    with bounded(place):
        try:
            list(read_documents(Documents(files=pattern), place))
        except (DocumentError, ValueError) as error:
            assert isinstance(error, DocumentError) or "validation" in str(error)
