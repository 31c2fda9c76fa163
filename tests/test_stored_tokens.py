"""Token ids that a run keeps in its results folder: nothing is tokenized twice, nothing stale or damaged is used."""

import os
import shutil
import warnings

import numpy as np
import pytest

from qkscope.cli.main import main
from qkscope.documents import tokens
from qkscope.documents.encode import Encoder
from qkscope.documents.tokens import load_corpus, survey, tokens_key
from qkscope.errors import InputError, QkscopeWarning, StorageError
from qkscope.run.execute import run_study
from qkscope.run.plan import make_plan
from qkscope.run.progress import Events
from qkscope.study.load import load_study
from qkscope.study.schema import Documents
from test_documents import NoTokenizer, byte_tokenizer

LONG_AGO = 1_000_000_000  # nanoseconds since 1970
SETTINGS = Documents(files="*.txt", special_tokens="none")
KEY = tokens_key(SETTINGS, "bytes", [5, 8])


@pytest.fixture
def encoded(monkeypatch):
    """The names of documents that were tokenized, in order."""
    seen, plain = [], Encoder.start

    def start(self, text, needed, name="a text"):
        seen.append(name)
        return plain(self, text, needed, name)

    monkeypatch.setattr(tokens.Encoder, "start", start)
    return seen


@pytest.fixture
def read(monkeypatch):
    """The names of documents whose text was read, in order."""
    seen, plain = [], tokens.read_documents

    def reading(settings, folder):
        for document in plain(settings, folder):
            seen.append(document.name)
            yield document

    monkeypatch.setattr(tokens, "read_documents", reading)
    return seen


def aged(folder):
    """Files of long ago: of one that has just been written nobody can tell by its time whether it changed."""
    for path in folder.glob("*.txt"):
        os.utime(path, ns=(LONG_AGO, LONG_AGO))


# -- runs --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_finished_study_is_run_again_without_tokenizing_or_reading_a_document(world, tmp_path, encoded, read):
    aged(tmp_path / "docs")
    out = run_study(world(), tmp_path / "out")
    assert len(encoded) == 7  # once each, for both contexts
    first = (out / "qk.csv").read_bytes()
    encoded.clear()
    read.clear()
    run_study(world(), tmp_path / "out")
    assert (encoded, read) == ([], [])
    assert (out / "qk.csv").read_bytes() == first


@pytest.mark.slow
def test_shard_commands_tokenize_once_and_make_the_same_bytes(world, tmp_path, encoded, read, finished):
    aged(tmp_path / "docs")
    study = str(world(shard_tokens=512, batch_tokens=256))
    out = tmp_path / "out"
    for number in range(4):
        assert main(["shard", study, str(number), "--out", str(out)]) == 0
    assert len(encoded) == len(read) == 7
    assert main(["analyze", str(out)]) == 0
    expected = finished(shard_tokens=512, batch_tokens=256) / "qk.csv"
    assert (out / "qk.csv").read_bytes() == expected.read_bytes()


@pytest.mark.slow
def test_inspect_and_plan_use_kept_tokens_and_write_none(world, tmp_path, encoded, capsys):
    aged(tmp_path / "docs")
    study, out = str(world()), tmp_path / "out"
    assert main(["inspect", study, "--out", str(out)]) == 0
    assert main(["plan", study, "--count", "--out", str(out)]) == 0
    assert not out.exists()
    run_study(world(), out)
    encoded.clear()
    assert main(["inspect", study, "--out", str(out)]) == 0
    assert main(["plan", study, "--count", "--out", str(out)]) == 0
    assert encoded == []


@pytest.mark.slow
def test_tokens_that_the_study_no_longer_needs_are_removed_and_nothing_else_is(world, tmp_path):
    out = run_study(world(), tmp_path / "out")
    [before] = (out / ".tokens").iterdir()
    (out / ".tokens/notes.txt").write_text("mine")
    other = world(documents={"files": "docs/*.txt", "limit": 5, "special_tokens": "none"})
    with pytest.raises(InputError, match="was made with other documents"):
        run_study(other, out)
    assert before.exists()
    from qkscope.run.execute import CaptureOptions

    run_study(other, out, options=CaptureOptions(overwrite=True))
    assert not before.exists()
    assert (out / ".tokens/notes.txt").read_text() == "mine"
    shutil.rmtree(out / ".tokens")  # all of it may be deleted
    run_study(other, out)
    assert len(list((out / ".tokens").iterdir())) == 1


def test_a_link_in_the_place_of_tokens_is_refused(world, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.tokens").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"\.tokens is a symbolic link"):
        run_study(world(), tmp_path / "out")


class Told(Events):
    def __init__(self):
        self.documents = 0

    def surveying(self, documents):
        self.documents = documents


@pytest.mark.slow
def test_a_plan_from_kept_tokens_is_the_plan_from_documents(world, tmp_path):
    shutil.copy(tmp_path / "docs/emitter.txt", tmp_path / "docs/a_copy.txt")
    aged(tmp_path / "docs")
    study = load_study(world())
    told = Told()
    run_study(study, tmp_path / "out", told)
    assert told.documents == 8
    fresh, kept = make_plan(study), make_plan(study, results=tmp_path / "out")
    for one, other in zip(fresh.checkpoints, kept.checkpoints, strict=True):
        assert other.corpus.stored
        assert one.duplicates == other.duplicates
        assert len(one.duplicates) == 1
        assert one.fingerprint() == other.fingerprint()
        assert one.settings() == other.settings()
        assert [one.fingerprint(shard) for shard in one.shards()] == [other.fingerprint(s) for s in other.shards()]


# -- the file ----------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path):
    """A corpus of four documents in `kept.tokens`."""
    for number, length in enumerate([10, 300, 5, 4]):
        (tmp_path / f"{number}.txt").write_text("".join(chr(97 + (number + i) % 26) for i in range(length)))
    aged(tmp_path)
    corpus = survey(SETTINGS, tmp_path, byte_tokenizer(), [5, 8], key=KEY)
    corpus.stored_at(tmp_path / "kept.tokens")
    return tmp_path / "kept.tokens"


def load(path):
    return load_corpus(path, KEY, SETTINGS, path.parent)


def test_what_is_loaded_is_what_was_surveyed(kept, read):
    corpus = load(kept)
    assert read == []
    fresh = survey(SETTINGS, kept.parent, byte_tokenizer(), [5, 8])
    assert corpus.documents == fresh.documents
    assert corpus.index.looked_for == fresh.index.looked_for
    for context in (5, 8):
        windows = corpus.windows(NoTokenizer(), context, corpus.choose(context).documents)
        expected = fresh.windows(byte_tokenizer(), context, fresh.choose(context).documents)
        for one, other in zip(windows, expected, strict=True):
            assert (one.index, one.name) == (other.index, other.name)
            np.testing.assert_array_equal(one.ids, other.ids)
    assert byte_tokenizer().decode(next(corpus.windows(NoTokenizer(), 5, [1])).ids) == "bcdef"


@pytest.mark.parametrize("change", ["text", "added", "removed", "renamed"])
def test_documents_that_changed_are_not_taken_from_the_file(kept, change):
    folder = kept.parent
    if change == "text":
        (folder / "2.txt").write_text("other")  # as long as before
    elif change == "added":
        (folder / "0a.txt").write_text("new")
    elif change == "removed":
        (folder / "3.txt").unlink()
    else:
        (folder / "3.txt").rename(folder / "4.txt")
    assert load(kept) is None


def test_a_text_that_changed_within_the_same_moment_is_noticed(tmp_path):
    """The clock of a file system is coarse: a file can change twice and keep its size and time."""
    path = tmp_path / "a.txt"
    path.write_text("before")
    corpus = survey(SETTINGS, tmp_path, byte_tokenizer(), [5], key=KEY)
    corpus.stored_at(tmp_path / "kept.tokens")
    time = path.stat().st_mtime_ns
    path.write_text("behind")
    os.utime(path, ns=(time, time))
    assert load(tmp_path / "kept.tokens") is None


def test_files_that_were_copied_are_read_but_not_tokenized(kept, read, encoded):
    os.utime(kept.parent / "1.txt", ns=(LONG_AGO + 5, LONG_AGO + 5))
    corpus = load(kept)
    assert read == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert [len(w.ids) for w in corpus.windows(NoTokenizer(), 8, [0, 1])] == [8, 8]
    assert not corpus.stored
    again = corpus.stored_at(kept)  # what a run does then
    read.clear()
    assert load(kept).stored
    assert again.kept.there
    assert again.stored_at(kept) is again
    assert (read, encoded) == ([], [])


def test_another_key_does_not_fit(kept):
    other = tokens_key(SETTINGS, "other tokenizer", [5, 8])
    with pytest.warns(QkscopeWarning, match="does not hold what its name says; documents are tokenized again"):
        assert load_corpus(kept, other, SETTINGS, kept.parent) is None
    assert len({KEY, other, tokens_key(SETTINGS, "bytes", [5]), tokens_key(Documents(files="*"), "bytes", [5, 8])}) == 4


def test_no_truncation_and_no_flipped_bit_gets_through(kept):
    """Either the file is refused, or the ids are: their digests are in the index, and its checksum behind it."""
    good = kept.read_bytes()
    ids = 4 * (8 + 8 + 5)
    broken = [good[:size] for size in (*range(0, len(good), 37), len(good) - 1)]
    broken += [good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :] for at in range(ids, len(good), 11)]
    for contents in broken:
        kept.write_bytes(contents)
        with pytest.warns(QkscopeWarning, match="tokenized again"):
            assert load(kept) is None
    for at in range(0, ids, 5):
        kept.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        corpus = load(kept)
        with pytest.raises(StorageError, match=r"is damaged, .* delete it"):
            [list(corpus.windows(NoTokenizer(), context, corpus.choose(context).documents)) for context in (5, 8)]


def test_a_missing_file_is_no_news(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path / "kept.tokens") is None
