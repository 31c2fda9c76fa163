"""Several models in one study: who they are is kept, one network under two names is noticed, figures tell them."""

import pytest
import yaml

from families import tiny
from qkscope.capture.identity import attention_hashes, count_parameters
from qkscope.errors import StudyError
from qkscope.results.provenance import CheckpointRecord
from qkscope.results.twins import shared_attention
from qkscope.study.load import load_study


def record(name, hashes):
    return CheckpointRecord.of({"name": name, "attention_hashes": hashes})


def study(tmp_path, **entry):
    (tmp_path / "a.txt").write_text("some words " * 50, encoding="utf-8")
    first = {"name": "one", "model": "here", "context": 16, **entry}
    text = {"study": "models", "kind": "models", "documents": {"files": "*.txt"}, "checkpoints": [first]}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(text), encoding="utf-8")
    return path


def test_a_study_says_family_parameters_and_tags(tmp_path):
    entry = load_study(
        study(tmp_path, family="Llama", parameters=3_000_000_000, tags={"data": "web"})
    ).study.checkpoints[0]
    assert (entry.family, entry.parameters, entry.tags) == ("Llama", 3_000_000_000, {"data": "web"})


@pytest.mark.parametrize("entry", [{"parameters": 0}, {"parameters": "3B"}, {"tags": {"a": 1}}, {"famly": "Llama"}])
def test_what_is_not_a_family_a_count_or_a_tag_is_refused(tmp_path, entry):
    with pytest.raises(StudyError):
        load_study(study(tmp_path, **entry))


def test_one_network_under_two_names_is_noticed_and_others_are_not():
    whole = [f"{i:016x}" for i in range(8)]
    more = [*whole, *(f"{i:016x}" for i in range(100, 110))]  # the same text layers, and layers between them
    other = [f"{i:016x}" for i in range(50, 58)]
    said = shared_attention([record("text", whole), record("vision", more), record("other", other), record("none", [])])
    assert len(said) == 1
    assert "'text' and 'vision' share 8 of 8 projections" in said[0]
    assert shared_attention([record("a", whole), record("b", [*whole[:3], *other[:5]])]) == []  # fewer than half


def test_hashes_are_those_of_numbers_and_not_of_names_or_precision():
    import torch

    model = tiny("llama")
    same = attention_hashes(model)
    assert len(same) == 2 * model.config.num_hidden_layers
    assert attention_hashes(tiny("llama")) == same  # the fixture is seeded
    changed = tiny("llama")
    with torch.no_grad():
        next(p for name, p in changed.named_parameters() if name.endswith("q_proj.weight")).add_(0.01)
    assert len(set(same) & set(attention_hashes(changed))) == len(same) - 1
    halved = tiny("llama").to(torch.bfloat16)
    assert attention_hashes(halved) == attention_hashes(halved.to(torch.float32))
    assert count_parameters(model) == sum(p.numel() for p in model.parameters())
