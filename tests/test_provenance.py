"""The provenance as a typed record: what is written is right, what is read may be anything, and nothing is lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from qkscope.results.provenance import CheckpointRecord, Provenance, write_provenance

WRITTEN = {
    "command": "qkscope run",
    "schema": 1,
    "study": {"title": "A\nstudy", "heads": {"sample": 2, "seed": 0}, "buckets": 16},
    "corpus": {"source": "docs", "fingerprint": "sha256:0"},
    "checkpoints": [{"tokens": 192, "name": "a", "context": 64, "from_the_future": [1]}],
    "kind": "seeds",
    "another": {"key": None},
}


def test_what_is_read_is_written_again_as_it_was(tmp_path):
    path = write_provenance(tmp_path, Provenance.read(WRITTEN))
    assert path.read_text() == json.dumps(WRITTEN, indent=1) + "\n"  # unknown keys and the order as well


def test_values_have_their_types():
    found = Provenance.read(WRITTEN)
    (first,) = found.by_name().values()
    assert (first.name, first.context, first.tokens, first.documents) == ("a", 64, 192, None)
    assert (found.schema_, found.kind, found.study.title) == (1, "seeds", "A study")
    assert found.study.heads == {"sample": 2, "seed": 0}


@pytest.mark.parametrize("value", [True, 1.5, "7", [7], {"n": 7}])
def test_a_wrong_type_is_not_recorded_where_it_is_read_and_an_error_where_it_is_written(value):
    assert CheckpointRecord.read({"tokens": value}).tokens is None
    with pytest.raises(ValidationError):
        CheckpointRecord.of({"tokens": value})


def test_of_a_list_only_the_wrong_entries_are_lost():
    found = Provenance.read({"checkpoints": [5, {"name": "a"}, {"name": " "}, {"name": "a", "label": "second"}, None]})
    assert list(found.by_name()) == ["a"]
    assert found.by_name()["a"].label is None
    assert CheckpointRecord.read({"layers_without_attention": [1, "x", 3]}).layers_without_attention == [1, None, 3]


def test_a_folder_without_provenance_says_nothing():
    assert not Provenance().says_something
    assert Provenance.read([]) == Provenance.read("x") == Provenance()


trees = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
KEYS = sorted({field.alias or name for name, field in Provenance.model_fields.items()})


@given(
    st.dictionaries(st.sampled_from(KEYS), trees),
    st.dictionaries(st.sampled_from([*CheckpointRecord.model_fields]), trees),
)
def test_anything_can_be_read_and_is_kept(top, checkpoint):
    assert Provenance.read(top).to_json() == top
    whole = {**top, "checkpoints": [checkpoint]}
    assert Provenance.read(whole).to_json() == whole


@pytest.mark.slow
def test_a_runs_own_provenance_passes_as_it_would_be_written(finished):
    stored = json.loads((finished() / "provenance.json").read_text())
    strict = Provenance.of(stored)
    assert strict.to_json() == stored
    assert [each.name for each in strict.checkpoints] == ["one", "two"]
    assert all(each.environment and each.settings and each.seconds for each in strict.checkpoints)
