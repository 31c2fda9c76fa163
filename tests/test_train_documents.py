"""Probe documents from whatever a training script has: the same token windows, of one length."""

import json

import numpy as np
import pytest
import torch

from qkscope.errors import DocumentError, InputError, QkscopeWarning
from qkscope.train.documents import probe_documents
from test_documents import byte_tokenizer


def read(given, tokenizer=None, vocabulary=256, positions=128, **options):
    return probe_documents(given, tokenizer, vocabulary=vocabulary, positions=positions, **options)


def encoded(text):
    return byte_tokenizer()(text, add_special_tokens=False)["input_ids"]


def ids(documents):
    return [window.tolist() for window in documents.windows]


WINDOWS = [[1, 2, 3, 4], [5, 6, 7, 8]]


class TorchDataset(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return {"input_ids": torch.tensor(WINDOWS[number])}


@pytest.mark.parametrize(
    "given",
    [
        WINDOWS,
        np.array(WINDOWS),
        torch.tensor(WINDOWS),
        {"input_ids": WINDOWS},
        {"input_ids": [[1, 2, 3, 4, 0], [5, 6, 7, 8, 0]], "attention_mask": [[1, 1, 1, 1, 0]] * 2},
        [{"input_ids": each} for each in WINDOWS],
        [{"input_ids": [*each, 0], "attention_mask": [1, 1, 1, 1, 0], "labels": [0]} for each in WINDOWS],
        iter(WINDOWS),
        TorchDataset(),
    ],
    ids=["lists", "array", "tensor", "encoding", "padded encoding", "rows", "padded rows", "iterator", "torch dataset"],
)
def test_token_ids_come_in_many_shapes(given):
    assert ids(read(given)) == WINDOWS


def test_texts_are_tokenized():
    found = read(["abcd", "efgh"], byte_tokenizer(), special_tokens="none")
    assert ids(found) == [encoded("abcd"), encoded("efgh")]
    assert found.special_tokens == "none"


def test_a_dataset_gives_its_texts_or_its_token_ids():
    from datasets import Dataset

    texts = Dataset.from_dict({"body": ["abcd", "efgh", "ijkl"]})
    found = read(texts, byte_tokenizer(), text="body", limit=2, special_tokens="none")
    assert ids(found) == [encoded("abcd"), encoded("efgh")]
    assert ids(read(Dataset.from_dict({"input_ids": WINDOWS}))) == WINDOWS


def test_a_file_gives_its_documents(tmp_path):
    path = tmp_path / "probe.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abcd", "efgh")))
    found = read(path, byte_tokenizer(), special_tokens="none")
    assert ids(found) == [encoded("abcd"), encoded("efgh")]
    assert found.source == str(path)


def test_without_a_context_half_of_the_documents_are_long_enough():
    lengths = [3, 5, 9, 7]  # from long to short 9, 7, 5, 3: two of the four have 7
    found = read([list(range(length, 2 * length)) for length in lengths])
    assert ids(found) == [list(range(9, 16)), list(range(7, 14))]
    assert found.too_short == 2


def test_no_document_is_longer_than_the_model():
    assert read([list(range(200)), list(range(1, 201))], positions=100).context == 100
    with pytest.raises(InputError, match="context 200 is more than the model's 100 positions"):
        read([list(range(200))], positions=100, context=200)


def test_copies_of_one_document_are_reported():
    with pytest.warns(QkscopeWarning, match=r"2 of 4 windows have the same tokens as another \(window 1 is window 0\)"):
        found = read([[1, 2, 3], [1, 2, 3, 4], [4, 5, 6], [4, 5, 6]], context=3)
    assert len(found.windows) == 4


def test_documents_have_one_fingerprint_however_they_came():
    assert read(WINDOWS).fingerprint == read(np.array(WINDOWS)).fingerprint
    assert read(WINDOWS).fingerprint != read(WINDOWS[::-1]).fingerprint


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "there are no probe documents"),
        (7, "should be texts, token ids, a dataset or the path of a file, not int"),
        (["a text"], "texts need a tokenizer"),
        ([[1, 2], "a text"], "document 0 is list, not text; do not mix texts and token ids"),
        (["a text", [1, 2]], "document 1 is list, not text"),
        ([[1, 2, 300]], "the model has ids 0 to 255"),
        ([[1]], r"no probe document has 2 tokens \(the longest has 1\)"),
        ([{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}], "hold several documents each"),
        ([{"body": "a text"}], "neither input_ids nor 'text' .there is: body."),
        ({"body": ["a"]}, "without input_ids"),
        ("", "an empty path"),
        ("no/such/file.txt", "nothing matches"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_to_give(given, message):
    with pytest.raises(InputError, match=message):
        read(given)


def test_documents_that_are_all_too_short_say_how_long_they_are():
    with pytest.raises(DocumentError, match=r"no probe document has 50 tokens \(the longest has 4\)"):
        read(WINDOWS, context=50)
