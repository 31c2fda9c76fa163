"""Documents from every kind of file, and each way in which they can be wrong."""

import gc
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import qkscope
from qkscope.cli.describe import describe_plan
from qkscope.documents import encode as encoding
from qkscope.documents import sources
from qkscope.documents.encode import Encoder
from qkscope.documents.sources import read_documents
from qkscope.documents.tokens import Choice, batches, survey
from qkscope.errors import DocumentError, InputError, QkscopeWarning, StorageError
from qkscope.lenses.position import LEADING
from qkscope.lenses.registry import registered
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.run.execute import run_study
from qkscope.run.plan import make_plan
from qkscope.study.load import load_study
from qkscope.study.schema import Documents


def byte_tokenizer(**special):
    """One token per byte, as the real library builds it; BOS is number 256 where there is one."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def encode(tokenizer, text, special_tokens):
    return Encoder(tokenizer, special_tokens).whole(text)


def texts(folder, **settings):
    return [(d.name, d.text) for d in read_documents(Documents(**settings), folder)]


def test_text_jsonl_and_parquet(tmp_path):
    (tmp_path / "b.txt").write_text("plain ä", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    pd.DataFrame({"text": ["x", "y"], "other": [1, 2]}).to_parquet(tmp_path / "c.parquet")
    assert texts(tmp_path, files="*") == [
        ("a.jsonl:1", "one"),
        ("a.jsonl:3", "two"),
        ("b.txt", "plain ä"),
        ("c.parquet:0", "x"),
        ("c.parquet:1", "y"),
    ]
    assert texts(tmp_path, files=["c.parquet", "*.jsonl"], limit=3) == [
        ("a.jsonl:1", "one"),
        ("a.jsonl:3", "two"),
        ("c.parquet:0", "x"),
    ]


def test_another_column_and_nested_globs(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.jsonl").write_text(json.dumps({"content": "hello"}))
    assert texts(tmp_path, files="**/*.jsonl", text="content") == [("sub/a.jsonl:1", "hello")]
    assert texts(tmp_path, files=str(tmp_path / "sub/*.jsonl"), text="content") == [("sub/a.jsonl:1", "hello")]


def test_a_dataset_that_the_datasets_library_loads(tmp_path):
    (tmp_path / "corpus").mkdir()
    pd.DataFrame({"text": ["x", "y"]}).to_parquet(tmp_path / "corpus/test.parquet")
    assert texts(tmp_path, dataset="corpus", split="test") == [("test:0", "x"), ("test:1", "y")]
    with pytest.raises(DocumentError, match=r"dataset corpus: no text column 'body' \(there is: text\)"):
        texts(tmp_path, dataset="corpus", split="test", text="body")
    with pytest.raises(DocumentError, match="dataset corpus cannot be loaded"):
        texts(tmp_path, dataset="corpus", split="train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"body": "x"}', r"a.jsonl, line 1: no text column 'text' \(there is: body\); set documents.text"),
        ("a.jsonl", b'{"text": "x"}\n{oops', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": 5}', "holds int, not text"),
        ("a.jsonl", b"[1]", "line 1: no text column"),
        ("a.jsonl", b'{"text": "\xff"}', "not UTF-8"),
        ("a.txt", b"abc\xff\xfe", "a.txt is not UTF-8 text .* at byte 3"),
        ("a.parquet", b"PAR1 no", "not a readable parquet"),
    ],
)
def test_files_that_are_wrong(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DocumentError, match=message):
        texts(tmp_path, files=name)


def test_parquet_without_the_column(tmp_path):
    pd.DataFrame({"body": ["x"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DocumentError, match=r"no text column 'text' \(there is: body\)"):
        texts(tmp_path, files="a.parquet")


def test_an_empty_glob(tmp_path):
    with pytest.raises(DocumentError, match=r"nothing matches '\*\.md' in"):
        texts(tmp_path, files="*.md")
    with pytest.raises(DocumentError, match=r"nothing matches 'missing\.txt'"):
        texts(tmp_path, files="missing.txt")


def test_a_folder_is_not_its_files(tmp_path):
    (tmp_path / "docs/deep").mkdir(parents=True)
    (tmp_path / "docs/deep/a.txt").write_text("x")
    for folder in ("docs", "docs/", str(tmp_path / "docs")):
        with pytest.raises(
            DocumentError, match=r"is a folder; name its files, for instance '.*docs/\*' or, .*docs/\*\*/\*'"
        ):
            texts(tmp_path, files=folder)
    assert texts(tmp_path, files="docs/**/*") == [("docs/deep/a.txt", "x")]


def test_hidden_files_are_read_only_where_they_are_named(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config.txt").write_text("secret")
    (tmp_path / ".DS_Store").write_bytes(b"\xff")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "a.txt").write_text("plain")
    assert texts(tmp_path, files="*") == [("a.txt", "plain")]
    assert texts(tmp_path, files="**/*.txt") == [("a.txt", "plain")]
    assert texts(tmp_path, files=str(tmp_path / "*")) == [("a.txt", "plain")]
    assert texts(tmp_path, files=".h*") == [(".hidden.txt", "hidden")]
    assert texts(tmp_path, files=".git/*.txt") == [(".git/config.txt", "secret")]
    assert texts(tmp_path, files=[".hidden.txt", "a.txt"]) == [(".hidden.txt", "hidden"), ("a.txt", "plain")]
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/b.txt").write_text("below a hidden folder")
    assert texts(tmp_path / ".cache", files="*.txt") == [("b.txt", "below a hidden folder")]
    with pytest.raises(DocumentError, match="nothing matches"):
        texts(tmp_path, files="*Store")


def test_special_tokens_are_explicit():
    tokenizer = byte_tokenizer(bos_token="<s>")
    plain = encode(tokenizer, "aé", "none")
    assert len(plain) == 3  # one per byte
    assert encode(tokenizer, "aé", "bos") == [tokenizer.bos_token_id, *plain]
    assert encode(tokenizer, "aé", "default") == plain  # this tokenizer adds none by itself
    with pytest.raises(DocumentError, match="no BOS token"):
        encode(byte_tokenizer(), "a", "bos")


def test_what_stands_before_every_text_is_known_and_not_what_stands_behind_it():
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>")
    assert Encoder(tokenizer, "none").opening() == Encoder(tokenizer, "default").opening() == []
    assert Encoder(tokenizer, "bos").opening() == [tokenizer.bos_token_id]
    around = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> <s> $A </s>", special_tokens=around)
    assert Encoder(tokenizer, "default").opening() == [tokenizer.bos_token_id] * 2
    assert Encoder(tokenizer, "none").opening() == []


@pytest.fixture
def corpus(tmp_path):
    for i, length in enumerate([10, 300, 5, 200]):
        (tmp_path / f"{i}.txt").write_text("wxyz"[i] * length)
    return survey(Documents(files="*.txt", special_tokens="none"), tmp_path, byte_tokenizer(), CONTEXTS)


CONTEXTS = [5, 8, 9, 10, 200, 301]


def test_short_documents_are_left_out(corpus):
    assert [d.tokens for d in corpus.documents] == [10, 300, 5, 200]
    assert corpus.choose(200).documents == [1, 3]
    assert corpus.choose(10).documents == [0, 1, 3]
    with pytest.raises(DocumentError, match=r"no document has the 301 tokens.*longest of 4, 1.txt, has 300"):
        corpus.choose(301)


def test_min_tokens_gives_every_context_the_same_documents(tmp_path, corpus):
    settings = corpus.settings.model_copy(update={"min_tokens": 250})
    assert survey(settings, tmp_path, byte_tokenizer(), [10]).choose(10).documents == [1]


def test_tokens_are_counted_only_as_far_as_a_study_needs(tmp_path, corpus):
    assert [d.tokens for d in survey(corpus.settings, tmp_path, byte_tokenizer(), [8, 20]).documents] == [10, 20, 5, 20]
    settings = corpus.settings.model_copy(update={"min_tokens": 250})
    assert [d.tokens for d in survey(settings, tmp_path, byte_tokenizer(), [8]).documents] == [10, 250, 5, 200]


def test_windows_are_the_first_tokens(corpus):
    windows = list(corpus.windows(byte_tokenizer(), 8, [0, 3]))
    assert [(w.index, w.name, len(w.ids)) for w in windows] == [(0, "0.txt", 8), (3, "3.txt", 8)]
    assert (windows[0].ids == encode(byte_tokenizer(), "w", "none")[0]).all()


def test_a_document_that_changes_or_vanishes_is_noticed(tmp_path, corpus):
    (tmp_path / "3.txt").write_text("y" * 200)
    with pytest.raises(DocumentError, match=r"3\.txt changed"):
        list(corpus.windows(byte_tokenizer(), 8, [3]))
    (tmp_path / "3.txt").unlink()
    with pytest.raises(DocumentError, match="1 document vanished"):
        list(corpus.windows(byte_tokenizer(), 8, [3]))


def test_a_file_that_was_touched_but_says_the_same_is_no_change(tmp_path, corpus):
    os.utime(tmp_path / "3.txt", ns=(1, 1))
    assert len(next(corpus.windows(byte_tokenizer(), 8, [3])).ids) == 8


class NoTokenizer:
    """Stands where nothing may be tokenized."""

    bos_token_id = None

    def __call__(self, text, **options):
        raise AssertionError("tokenized again")


def test_what_the_survey_tokenized_is_not_tokenized_again(corpus):
    for context in (5, 8, 200):
        chosen = corpus.choose(context).documents
        for copy in (corpus, pickle.loads(pickle.dumps(corpus))):  # as another process gets it
            windows = list(copy.windows(NoTokenizer(), context, chosen))
            assert [(w.index, len(w.ids)) for w in windows] == [(index, context) for index in chosen]


def test_a_process_that_does_not_see_the_kept_tokens_reads_the_documents(corpus):
    kept = list(corpus.windows(NoTokenizer(), 8, [0, 1]))
    corpus.kept.path.unlink()  # as on another machine
    elsewhere = pickle.loads(pickle.dumps(corpus))
    read = list(elsewhere.windows(byte_tokenizer(), 8, [0, 1]))
    assert [(w.index, w.name, w.ids.tolist()) for w in read] == [(w.index, w.name, w.ids.tolist()) for w in kept]


def test_a_tokenizer_that_encodes_differently_elsewhere_is_noticed(corpus):
    corpus.kept.path.unlink()
    other = byte_tokenizer(bos_token="<s>")
    other.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    corpus = replace(corpus, settings=corpus.settings.model_copy(update={"special_tokens": "default"}))
    with pytest.raises(DocumentError, match=r"0\.txt: the tokenizer encodes it differently from when the study began"):
        list(corpus.windows(other, 8, [0]))


def test_kept_tokens_that_somebody_wrote_over_are_refused(corpus):
    corpus.kept.path.write_bytes(bytes(corpus.kept.path.stat().st_size))
    with pytest.raises(StorageError, match="is damaged, or was changed while the study was running: delete it"):
        list(corpus.windows(NoTokenizer(), 8, [0]))


def temporary_files(folder):
    return list(folder.glob("qkscope-*.tokens"))


@pytest.fixture
def temporary(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_kept_tokens_are_removed_with_the_last_that_needs_them(tmp_path, temporary):
    (tmp_path / "a.txt").write_text("x" * 20)
    corpus = survey(Documents(files="a.txt", special_tokens="none"), tmp_path, byte_tokenizer(), [8])
    assert temporary_files(temporary) == [corpus.kept.path]
    copy = pickle.loads(pickle.dumps(corpus))
    del copy  # a worker's copy is not what the file belongs to
    gc.collect()
    assert len(temporary_files(temporary)) == 1
    del corpus
    gc.collect()
    assert not temporary_files(temporary)


def test_kept_tokens_are_removed_when_a_survey_fails(tmp_path, temporary):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DocumentError, match="not UTF-8"):
        survey(Documents(files="*.txt", special_tokens="none"), tmp_path, byte_tokenizer(), [2])
    assert not temporary_files(temporary)


def test_without_room_for_tokens_documents_are_tokenized_again(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x" * 20)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.warns(QkscopeWarning, match=r"tokens cannot be kept .*No such file.*TMPDIR"):
        corpus = survey(Documents(files="a.txt", special_tokens="none"), tmp_path, byte_tokenizer(), [8])
    assert len(next(corpus.windows(byte_tokenizer(), 8, [0])).ids) == 8


def test_fingerprints_follow_text_and_tokenizer(tmp_path, corpus):
    again = survey(corpus.settings, tmp_path, byte_tokenizer(), CONTEXTS)
    assert (again.fingerprint, again.tokens_fingerprint(10)) == (corpus.fingerprint, corpus.tokens_fingerprint(10))
    assert corpus.tokens_fingerprint(10) != corpus.tokens_fingerprint(9)
    with_bos = corpus.settings.model_copy(update={"special_tokens": "bos"})
    other = survey(with_bos, tmp_path, byte_tokenizer(bos_token="<s>"), CONTEXTS)
    assert other.fingerprint == corpus.fingerprint
    assert other.tokens_fingerprint(10) != corpus.tokens_fingerprint(10)
    (tmp_path / "0.txt").write_text("z" * 10)
    assert survey(corpus.settings, tmp_path, byte_tokenizer(), CONTEXTS).fingerprint != corpus.fingerprint


def test_a_fingerprint_of_tokens_depends_on_what_is_shown_alone(tmp_path, corpus):
    other_contexts = survey(corpus.settings, tmp_path, byte_tokenizer(), [8, 11])
    assert other_contexts.tokens_fingerprint(8, [1, 3]) == corpus.tokens_fingerprint(8, [1, 3])
    (tmp_path / "1.txt").write_text("x" * 8 + "and now something else")
    changed_behind = survey(corpus.settings, tmp_path, byte_tokenizer(), [8, 9])
    assert changed_behind.tokens_fingerprint(8, [1, 3]) == corpus.tokens_fingerprint(8, [1, 3])
    assert changed_behind.tokens_fingerprint(9, [1, 3]) != corpus.tokens_fingerprint(9, [1, 3])
    assert changed_behind.fingerprint != corpus.fingerprint


def test_batches_hold_one_group_each_and_lose_nothing(tmp_path):
    for i in range(23):
        (tmp_path / f"{i:02}.txt").write_text("x" * 16)
    corpus = survey(Documents(files="*.txt", special_tokens="none"), tmp_path, byte_tokenizer(), [8])
    windows = corpus.windows(byte_tokenizer(), 8, range(23))
    found = list(batches(windows, context=8, batch_tokens=16, groups=4))
    assert all(len({w.index % 4 for w in batch}) == 1 and len(batch) <= 2 for batch in found)
    assert sorted(w.index for batch in found for w in batch) == list(range(23))


def test_no_documents_at_all(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DocumentError, match="no documents found"):
        survey(Documents(files="*.jsonl"), tmp_path, byte_tokenizer(), [8])


def test_ids_are_what_the_text_is(corpus):
    window = next(corpus.windows(byte_tokenizer(), 5, [1]))
    assert byte_tokenizer().decode(window.ids) == "xxxxx"
    assert window.ids.dtype == np.int64


# -- bounds --------------------------------------------------------------------------------------------------


def test_every_kind_of_source_reads_the_same_beginning_of_a_long_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_TEXT", 62)
    text = "ab字🙂é" * 20  # 11 bytes: the 62nd is within a character
    whole = text.encode()
    kept = whole[:62].decode(errors="ignore")
    assert len(kept.encode()) == 60
    (tmp_path / "a.txt").write_bytes(whole)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    (tmp_path / "corpus").mkdir()
    for path in (tmp_path / "a.parquet", tmp_path / "corpus/test.parquet"):
        pd.DataFrame({"text": [text, "short"]}).to_parquet(path)
    assert [read for _, read in texts(tmp_path, files="a.*")] == [kept, kept, "short", kept]
    assert [read for _, read in texts(tmp_path, dataset="corpus", split="test")] == [kept, "short"]
    for size in range(60, 70):  # wherever the bound is within a character, and where the text is as long as it
        monkeypatch.setattr(sources, "MAX_TEXT", size)
        (tmp_path / "b.txt").write_bytes(whole[:size])
        expected = whole[:size].decode(errors="ignore")
        assert texts(tmp_path, files="a.txt") == [("a.txt", expected)]
        if expected.encode() == whole[:size]:
            assert texts(tmp_path, files="b.txt") == [("b.txt", expected)]


def test_broken_text_at_the_bound_is_still_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_TEXT", 64)
    (tmp_path / "a.txt").write_bytes(b"x" * 50 + b"\xff" + b"y" * 50)
    with pytest.raises(DocumentError, match=r"not UTF-8 text .* at byte 50"):
        texts(tmp_path, files="a.txt")
    (tmp_path / "a.txt").write_bytes(b"x" * 55 + b"\x80" * 50)
    with pytest.raises(DocumentError, match=r"not UTF-8 text .* at byte 55"):
        texts(tmp_path, files="a.txt")


def test_line_ends_are_those_of_text_files(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n\r\n")
    assert texts(tmp_path, files="a.txt") == [("a.txt", "one\ntwo\nthree\n\n")]


def test_a_line_of_json_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE", 1000)
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n{{"text": "{"x" * 1000}"}}\n')
    found = read_documents(Documents(files="a.jsonl"), tmp_path)
    assert next(found).text == "fine"
    with pytest.raises(DocumentError, match=r"a\.jsonl, line 2: longer than .*is it one document\?"):
        next(found)


LONG_ROW = 100_000_000
READ = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from qkscope.documents.sources import read_documents
from qkscope.study.schema import Documents

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print([len(each.text) for each in read_documents(Documents(files=sys.argv[2], limit=3), Path(sys.argv[1]))])
"""


def repeated_row(path, rows):
    """A small Parquet file whose rows are all one long text: each is a number that stands for it."""
    text = pa.array(["x" * LONG_ROW])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), text)
    pq.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 100_000
    assert pq.ParquetFile(path).schema_arrow.field("text").type == pa.string()


@pytest.mark.slow
def test_long_rows_of_a_small_parquet_file_need_little_memory(tmp_path):
    """Rows in batches of 16 would need 1.6 GB before the first of them is there."""
    repeated_row(tmp_path / "a.parquet", 64)
    command = [sys.executable, "-c", READ, str(tmp_path), "a.parquet", str(1_000_000_000)]
    pool = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # others reserve addresses that they do not use
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **pool})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [sources.MAX_TEXT] * 3


def test_a_parquet_column_that_decompresses_without_measure_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_COLUMN", 100_000)
    rows = pa.table({"n": [1, 2], "text": ["x" * 1_000_000, "y"]})
    pq.write_table(rows, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(DocumentError, match=r"a\.parquet, row group 0: .* bytes of column 'text' decompress to 1,000,"):
        texts(tmp_path, files="a.parquet")
    other = pa.table({"n": ["x" * 1_000_000, "y"], "text": ["fine", "too"]})
    pq.write_table(other, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    assert [text for _, text in texts(tmp_path, files="a.parquet")] == ["fine", "too"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_texts_of_every_type(tmp_path, kind):
    column = pa.array(["one", "zwei ü", "one"]).cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=2)
    assert [text for _, text in texts(tmp_path, files="a.parquet")] == ["one", "zwei ü", "one"]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1, 2], "column 'text' holds int64, not text"),
        ([["a"], ["b"]], "column 'text' holds list<.*>, not text"),
        (["a", None], "row 1: column 'text' holds NoneType, not text"),
        ([b"a", b"b"], "column 'text' holds binary, not text"),
    ],
)
def test_parquet_columns_that_are_not_text(tmp_path, column, message):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DocumentError, match=message):
        texts(tmp_path, files="a.parquet")


def test_a_file_whose_name_is_not_text_is_refused(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    with pytest.raises(DocumentError, match="the name of this file is not valid text; rename it"):
        texts(tmp_path, files="*")


def test_what_is_not_a_file_is_called_what_it_is(tmp_path):
    (tmp_path / "device.txt").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.txt").mkdir()
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket.txt"))
    kinds = {"device": "a device", "pipe": "a pipe", "socket": "a socket", "gone": "a link to a file that does not"}
    for name, kind in kinds.items():
        for pattern in (f"{name}.txt", str(tmp_path / f"{name}.txt")):
            with pytest.raises(DocumentError, match=rf"{name}\.txt' is {kind}.*; documents are plain files"):
                texts(tmp_path, files=pattern)
        with pytest.raises(DocumentError, match=rf"'{name}\*' matches '{name}\.txt', which is {kind}"):
            texts(tmp_path, files=f"{name}*")
    with pytest.raises(DocumentError, match=r"'folder.txt' is a folder; name its files"):
        texts(tmp_path, files="folder.txt")


# -- copies --------------------------------------------------------------------------------------------------


def test_documents_with_the_same_tokens_count_once_wherever_they_lie(tmp_path):
    (tmp_path / "a.txt").write_text("one text and more")
    (tmp_path / "b.txt").write_text("another one")
    (tmp_path / "c.txt").write_text("one text and different behind it")  # the same as a.txt in its first 8 tokens
    (tmp_path / "d.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "e.jsonl").write_text(json.dumps({"text": "another text"}) + "\n" + json.dumps({"text": "short"}))
    corpus = survey(Documents(files="*", special_tokens="none"), tmp_path, byte_tokenizer(), [8, 10, 15])
    assert corpus.choose(15) == Choice([0, 2], {})  # they differ from the 14th token on
    assert corpus.choose(10) == Choice([0, 1, 4], {2: 0, 3: 1})
    assert corpus.choose(8) == Choice([0, 1], {2: 0, 3: 1, 4: 1})


def test_a_repeated_document_is_measured_once_and_reported(world, tmp_path):
    for path in (tmp_path / "docs").iterdir():
        path.unlink()
    for number in range(16):
        (tmp_path / f"docs/{number:02}.txt").write_text("the same words over and over again\n" * 40)
    study = world(groups=8)
    plan = make_plan(load_study(study))
    assert [each.documents for each in plan.checkpoints] == [[0], [0]]
    assert [len(each.shards()) for each in plan.checkpoints] == [1, 1]
    notes = " | ".join(plan.notes())
    assert "15 of 16 documents are left out at checkpoint 'one' for having the same tokens as an earlier" in notes
    assert "(docs/01.txt = docs/00.txt, docs/02.txt = docs/00.txt, docs/03.txt = docs/00.txt, ...)" in notes
    assert "reads 1 document in 1 of 8 document groups: it has no standard errors, which need documents in 4" in notes
    assert "fewer than" not in notes
    described = " ".join(describe_plan(plan, tmp_path / "out"))
    assert "documents: 16 documents in docs/*.txt, all long enough, 15 duplicates" in described
    with pytest.warns(QkscopeWarning, match="tokens are fewer than the head's 16 dimensions"):
        out = run_study(study, tmp_path / "out")
    rows = pd.read_csv(out / "qk.csv")
    assert rows["r_q"].notna().all()
    assert rows[["r_q_se", "r_k_se", "category_share", "sign_sure"]].isna().all(axis=None)
    one = json.loads((out / "provenance.json").read_text())["checkpoints"][0]
    assert (one["documents"], one["documents_duplicate"], one["documents_too_short"]) == (1, 15, 0)
    assert one["duplicates"] == [[number, 0] for number in range(1, 16)]
    assert one["documents_uncertain"] == 0


def test_documents_that_only_a_longer_context_distinguishes_are_read_and_reported(world, tmp_path):
    for path in (tmp_path / "docs").iterdir():
        path.unlink()
    for number in range(12):
        start = "a licence that all files begin with " * 3 if number % 2 else f"{number} " * 50
        (tmp_path / f"docs/{number:02}.txt").write_text(start + f"{number} and more words\n" * 40)
    plan = make_plan(load_study(world(groups=6)))
    assert [each.documents for each in plan.checkpoints] == [list(range(12))] * 2
    [note] = plan.notes()
    assert note.startswith("checkpoint 'one': 5 of 12 documents begin with the same 64 tokens as another")
    apart = make_plan(load_study(world(groups=6, same_documents=False)))
    assert [each.documents for each in apart.checkpoints] == [[0, 1, 2, 4, 6, 8, 10], list(range(12))]


def test_documents_whose_tokens_are_uncertain_are_reported(world, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "FEWEST_TOKENIZED", 290)
    monkeypatch.setattr(encoding, "MOST_CHARACTERS", 1)
    for path in (tmp_path / "docs").iterdir():
        path.write_text(path.read_text()[:280])
    (tmp_path / "docs/one_word.txt").write_text("x" * 4000)  # 254 tokens are certain: enough for one checkpoint
    world = partial(world, same_documents=False)
    plan = make_plan(load_study(world()))
    assert [each.uncertain for each in plan.checkpoints] == [1, 0]
    assert any(note.startswith("checkpoint 'one': 1 document had to be cut where") for note in plan.notes())
    out = run_study(world(), tmp_path / "out")
    one = json.loads((out / "provenance.json").read_text())["checkpoints"][0]
    assert (one["documents_uncertain"], one["documents_duplicate"], one["duplicates"]) == (1, 0, [])
    kept = make_plan(load_study(world()), results=out)
    assert [each.uncertain for each in kept.checkpoints] == [1, 0]


def test_groups_that_copies_empty_are_counted(world, tmp_path):
    for path in (tmp_path / "docs").iterdir():
        path.unlink()
    for number in range(12):
        (tmp_path / f"docs/{number:02}.txt").write_text(f"{number // 2} words\n" * 80)
    plan = make_plan(load_study(world(groups=10)))
    assert plan.checkpoints[0].documents == [0, 2, 4, 6, 8, 10]  # groups 0, 2, 4, 6, 8 and 0 again
    assert any("6 documents in 5 of 10 document groups: standard errors rest on 5 groups" in n for n in plan.notes())


def test_copies_in_memory_are_reported(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "short")
    rng = np.random.default_rng(0)
    different = rng.integers(0, 128, (16, 64))
    for copies in ([different[0]] * 16, (np.append(different[0], number) for number in range(16))):
        with pytest.warns(QkscopeWarning, match=r"15 of 16 windows have the same tokens .*\(window 1 is window 0\)"):
            moments = qkscope.capture_moments(model, copies, context=64)
        with pytest.warns(QkscopeWarning, match=r"checkpoint 'model': standard errors are 0 in .*r_q_se \(\d+ heads\)"):
            table = qkscope.analyze(moments, components=2)
        assert table[["category_share", "sign_sure"]].isna().all(axis=None)
    table = qkscope.analyze(qkscope.capture_moments(model, different, context=64), components=2)
    assert (table["r_q_se"] > 0).all()
    assert table[["category_share", "sign_sure"]].notna().all(axis=None)


def test_a_window_within_which_all_documents_are_alike_is_reported(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "short")
    windows = np.random.default_rng(0).integers(0, 128, (16, 64))
    windows[:, :32] = windows[0, :32]
    moments = qkscope.capture_moments(model, windows)
    assert (qkscope.analyze(moments, components=2)["r_q_se"] > 0).all()
    with pytest.warns(QkscopeWarning, match=r"standard errors are 0 in .*r_q_se \(16 heads\)"):
        checkpoint_rows(moments, [LEADING], RowSettings(), model="model")


def test_texts_that_all_begin_alike_have_errors(checkpoints):
    """BOS is the same in all documents: what is measured at position 0 alone has no error, and needs no warning."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "short")
    windows = np.random.default_rng(0).integers(0, 128, (16, 64))
    windows[:, 0] = 5
    moments = qkscope.capture_moments(model, windows)
    tables = [table for lens in registered() for table in lens.tables if table.rows is not None]
    rows = checkpoint_rows(moments, tables, RowSettings(), model="model")
    assert set(rows) > {"qk", "heads", "buckets"}
    buckets = rows["buckets"]
    assert (buckets.loc[buckets["bucket"] == 0, "rms_q_se"] <= 1e-12).any()


def test_token_windows_name_what_is_too_short_and_leave_copies_out():
    tokenizer = byte_tokenizer()
    with pytest.raises(InputError, match=r"no text has 512 tokens: the longest of 3 has 300; give longer texts or a"):
        qkscope.token_windows(tokenizer, ["a", "b" * 300, "c" * 20], 512)
    with pytest.raises(InputError, match="texts is empty"):
        qkscope.token_windows(tokenizer, [], 512)
    with pytest.warns(QkscopeWarning, match="2 of 5 texts with enough tokens are left out for repeating"):
        windows = qkscope.token_windows(tokenizer, ["bcd", "abc", "xyz", "short"[:2], "abcd", "bcde"], 3)
    assert [tokenizer.decode(window) for window in windows] == ["bcd", "abc", "xyz"]
