"""Documents from every kind of file, and each way in which they can be wrong."""

import gc
import json
import os
import pickle
import tempfile

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from qkscope.documents.encode import Encoder, encode
from qkscope.documents.sources import read_documents
from qkscope.documents.tokens import batches, group_of, survey
from qkscope.errors import DocumentError, QkscopeWarning, StorageError
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
    assert corpus.usable(200) == [1, 3]
    assert corpus.usable(10) == [0, 1, 3]
    with pytest.raises(DocumentError, match=r"no document has the 301 tokens.*longest of 4, 1.txt, has 300"):
        corpus.usable(301)


def test_min_tokens_gives_every_context_the_same_documents(tmp_path, corpus):
    settings = corpus.settings.model_copy(update={"min_tokens": 250})
    assert survey(settings, tmp_path, byte_tokenizer(), [10]).usable(10) == [1]


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
        chosen = corpus.usable(context)
        for copy in (corpus, pickle.loads(pickle.dumps(corpus))):  # as another process gets it
            windows = list(copy.windows(NoTokenizer(), context, chosen))
            assert [(w.index, len(w.ids)) for w in windows] == [(index, context) for index in chosen]


def test_a_process_that_does_not_see_the_kept_tokens_reads_the_documents(corpus):
    kept = list(corpus.windows(NoTokenizer(), 8, [0, 1]))
    corpus.kept.path.unlink()  # as on another machine
    elsewhere = pickle.loads(pickle.dumps(corpus))
    read = list(elsewhere.windows(byte_tokenizer(), 8, [0, 1]))
    assert [(w.index, w.name, w.ids.tolist()) for w in read] == [(w.index, w.name, w.ids.tolist()) for w in kept]


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


def test_kept_tokens_stay_at_a_place_of_their_own(tmp_path, temporary):
    (tmp_path / "a.txt").write_text("x" * 20)
    settings = Documents(files="a.txt", special_tokens="none")
    corpus = survey(settings, tmp_path, byte_tokenizer(), [8], keep_in=tmp_path / "tokens")
    assert len(next(corpus.windows(NoTokenizer(), 8, [0])).ids) == 8
    del corpus
    gc.collect()
    assert (tmp_path / "tokens").stat().st_size == 8 * 4
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
    assert all(len({group_of(w.index, 4) for w in batch}) == 1 and len(batch) <= 2 for batch in found)
    assert sorted(w.index for batch in found for w in batch) == list(range(23))


def test_no_documents_at_all(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DocumentError, match="no documents found"):
        survey(Documents(files="*.jsonl"), tmp_path, byte_tokenizer(), [8])


def test_ids_are_what_the_text_is(corpus):
    window = next(corpus.windows(byte_tokenizer(), 5, [1]))
    assert byte_tokenizer().decode(window.ids) == "xxxxx"
    assert window.ids.dtype == np.int64
