"""A common window in characters: as many tokens of each tokenizer as these characters are on average, or a clear no."""

import json

import numpy as np
import pandas as pd
import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from families import tiny
from qkscope.cli.describe import describe_plan
from qkscope.draw.style import window_note
from qkscope.errors import QkscopeError, StudyError
from qkscope.moments.moments import Moments
from qkscope.run.execute import run_study
from qkscope.run.plan import make_plan
from qkscope.study.load import load_study
from test_documents import byte_tokenizer
from written import table_of

CHARACTERS = 40


def pair_tokenizer():
    """One token per byte, but `ab` is one token."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab={**vocabulary, "ab": 256}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two models: of the one every character is a token; of the other half of the documents are half as many tokens."""
    folder = tmp_path_factory.mktemp("two")
    for seed, (name, tokenizer) in enumerate({"bytes": byte_tokenizer(), "pairs": pair_tokenizer()}.items()):
        tiny("llama", seed, vocab_size=257, num_hidden_layers=1).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for number, (pair, other) in enumerate([("ab", "cd"), ("xy", "ab")] * 4):  # the other one makes them different
        (folder / f"{number}.txt").write_text(pair * (1 + number // 2) + other + pair * 100, encoding="utf-8")
    return folder


def study(folder, pairs=48, **changes):
    """The study file; the contexts are 64 tokens and `pairs`."""
    entries = [{"name": name, "model": name, "context": context} for name, context in (("bytes", 64), ("pairs", pairs))]
    said = {"study": "s", "kind": "models", "documents": {"files": "*.txt"}, "checkpoints": entries, "components": 2}
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**said, "common_window": {"characters": CHARACTERS}, **changes}))
    return path


@pytest.fixture(scope="module")
def out(two):
    """The study, run."""
    return run_study(study(two), two / "out")


def test_each_tokenizer_has_its_own_window_and_tables_are_over_it(two, out, tmp_path, monkeypatch):
    """Of `abcdab…` 40 characters are 21 tokens under the second tokenizer, of `xyabxy…` 39: 30 on average."""
    common = table_of(out, "components")
    assert dict(common.groupby("model")["window"].first()) == {"bytes": 40, "pairs": 30}
    assert Moments.load(out / "moments/pairs.safetensors").layout.common == 30
    assert np.isfinite(table_of(out, "heads").query("window == 30")["position_r"]).all()
    told = json.loads((out / "provenance.json").read_text())["analysis"]
    assert (told["common_window"], told["common_characters"]) == (None, CHARACTERS)
    # The same numbers as a study that is asked for these tokens outright.
    alone = study(two, checkpoints=[{"name": "pairs", "model": "pairs", "context": 30}], common_window=30)
    fresh = pd.read_csv(run_study(alone, tmp_path / "alone") / "qk.csv")
    both = common[common["model"] == "pairs"].reset_index(drop=True)
    np.testing.assert_allclose(both["r_q"], fresh["r_q"], atol=1e-6)
    # And once more from what was kept: nothing is tokenized.
    monkeypatch.delattr("qkscope.run.plan.survey")
    plan = make_plan(load_study(study(two)), results=out)
    assert [each.layout.common for each in plan.checkpoints] == [40, 30]
    assert "common window 40 characters; in tokens, on average 40 for bytes, 30 for pairs" in "\n".join(
        describe_plan(plan, out)
    )


def test_tokenizers_without_a_common_window_are_told(two):
    """30 tokens do not fit into 24; 32 characters would be 24 tokens."""
    with pytest.raises(QkscopeError, match=r"'pairs'.*40 characters.*30 tokens on average.*context of 24.*about 32"):
        make_plan(load_study(study(two, pairs=24)))
    with pytest.raises(QkscopeError, match=r"'bytes'.*40 tokens on average, all of which skip_positions 39 would skip"):
        make_plan(load_study(study(two, skip_positions=39, pairs=64)))
    with pytest.raises(QkscopeError, match=r"fewer than the 300 characters of common_window"):
        make_plan(load_study(study(two, common_window={"characters": 300})))


def test_moments_that_were_made_for_other_characters_are_not_taken(two, out):
    with pytest.raises(QkscopeError, match="common window"):
        run_study(study(two, common_window={"characters": 48}), out)


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ({"character": 40}, "unknown key 'common_window.character'; did you mean 'characters'"),
        ({"characters": 1}, r"common_window.characters: .*greater than or equal to 2"),
        ({"characters": "40"}, r"common_window.characters: .*integer"),
        ({}, "missing key 'common_window.characters'"),
        ("40 characters", r"common_window: should be a number of tokens, or of characters such as"),
        (True, r"common_window: should be a number of tokens"),
        (1, r"common_window: .*greater than or equal to 2"),
    ],
)
def test_what_is_no_window_is_refused(two, window, said):
    with pytest.raises(StudyError, match=said) as refused:
        load_study(study(two, common_window=window))
    assert str(refused.value).count("Input should") <= 1  # what else the key could be is not told as a mistake


def test_figures_say_that_windows_are_as_many_characters():
    assert window_note([30, 40], common=True) == "common window: 30–40 tokens (equally many characters)"
    assert window_note([40, 40], common=True) == "common window: 40 tokens"
