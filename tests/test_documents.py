"""Documents from every kind of file, and each way in which they can be wrong."""

import json

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qkscope.documents.sources import read_documents
from qkscope.documents.tokens import batches, encode, group_of, survey
from qkscope.errors import DocumentError
from qkscope.study.schema import Documents


def byte_tokenizer(**special):
    """One token per byte, as the real library builds it; BOS is number 256 where there is one."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


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


def test_special_tokens_are_explicit():
    tokenizer = byte_tokenizer(bos_token="<s>")
    plain = encode(tokenizer, "aé", "none")
    assert len(plain) == 3  # one per byte
    assert encode(tokenizer, "aé", "bos") == [tokenizer.bos_token_id, *plain]
    assert encode(tokenizer, "aé", "default") == plain  # this tokenizer adds none by itself
    with pytest.raises(DocumentError, match="no BOS token"):
        encode(byte_tokenizer(), "a", "bos")


@pytest.fixture
def corpus(tmp_path):
    for i, length in enumerate([10, 300, 5, 200]):
        (tmp_path / f"{i}.txt").write_text("x" * length)
    return survey(Documents(files="*.txt", special_tokens="none"), tmp_path, byte_tokenizer())


def test_short_documents_are_left_out(corpus):
    assert [d.tokens for d in corpus.documents] == [10, 300, 5, 200]
    assert corpus.usable(200) == [1, 3]
    assert corpus.usable(10) == [0, 1, 3]
    with pytest.raises(DocumentError, match=r"no document has the 301 tokens.*longest of 4, 1.txt, has 300"):
        corpus.usable(301)


def test_min_tokens_gives_every_context_the_same_documents(tmp_path, corpus):
    settings = corpus.settings.model_copy(update={"min_tokens": 250})
    assert survey(settings, tmp_path, byte_tokenizer()).usable(10) == [1]


def test_windows_are_the_first_tokens(corpus):
    windows = list(corpus.windows(byte_tokenizer(), 8, [0, 3]))
    assert [(w.index, w.name, len(w.ids)) for w in windows] == [(0, "0.txt", 8), (3, "3.txt", 8)]
    assert (windows[0].ids == encode(byte_tokenizer(), "x", "none")[0]).all()


def test_a_document_that_changes_or_vanishes_is_noticed(tmp_path, corpus):
    (tmp_path / "3.txt").write_text("y" * 200)
    with pytest.raises(DocumentError, match=r"3\.txt changed"):
        list(corpus.windows(byte_tokenizer(), 8, [3]))
    (tmp_path / "3.txt").unlink()
    with pytest.raises(DocumentError, match="1 documents vanished"):
        list(corpus.windows(byte_tokenizer(), 8, [3]))


def test_fingerprints_follow_text_and_tokenizer(tmp_path, corpus):
    again = survey(corpus.settings, tmp_path, byte_tokenizer())
    assert (again.fingerprint, again.tokens_fingerprint(10)) == (corpus.fingerprint, corpus.tokens_fingerprint(10))
    assert corpus.tokens_fingerprint(10) != corpus.tokens_fingerprint(9)
    with_bos = corpus.settings.model_copy(update={"special_tokens": "bos"})
    other = survey(with_bos, tmp_path, byte_tokenizer(bos_token="<s>"))
    assert other.fingerprint == corpus.fingerprint
    assert other.tokens_fingerprint(10) != corpus.tokens_fingerprint(10)
    (tmp_path / "0.txt").write_text("z" * 10)
    assert survey(corpus.settings, tmp_path, byte_tokenizer()).fingerprint != corpus.fingerprint


def test_batches_hold_one_group_each_and_lose_nothing(tmp_path):
    for i in range(23):
        (tmp_path / f"{i:02}.txt").write_text("x" * 16)
    corpus = survey(Documents(files="*.txt", special_tokens="none"), tmp_path, byte_tokenizer())
    windows = corpus.windows(byte_tokenizer(), 8, range(23))
    found = list(batches(windows, context=8, batch_tokens=16, groups=4))
    assert all(len({group_of(w.index, 4) for w in batch}) == 1 and len(batch) <= 2 for batch in found)
    assert sorted(w.index for batch in found for w in batch) == list(range(23))


def test_no_documents_at_all(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DocumentError, match="no documents found"):
        survey(Documents(files="*.jsonl"), tmp_path, byte_tokenizer())


def test_ids_are_what_the_text_is(corpus):
    window = next(corpus.windows(byte_tokenizer(), 5, [1]))
    assert byte_tokenizer().decode(window.ids) == "xxxxx"
    assert window.ids.dtype == np.int64
