"""The notebook functions refuse what they cannot use, each with what to write instead; what is clear is accepted."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from transformers import BatchEncoding

import qkscope
from families import tiny, tokens
from qkscope.capture.hub import needs_remote_code
from qkscope.capture.source import ModelSource
from qkscope.errors import DocumentFailure, InputError
from qkscope.files import writing
from qkscope.study.load import parse_study
from test_documents import byte_tokenizer

IDS = tokens().tolist()  # two windows of 48 tokens


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def moments(model):
    return qkscope.capture_moments(model, IDS)


def padded(side):
    """Two texts of 48 and 40 tokens as a tokenizer returns them."""
    row, zeros = IDS[1][:40], [0] * 8
    ids, mask = (row + zeros, [1] * 40 + zeros) if side == "right" else (zeros + row, zeros + [1] * 40)
    return BatchEncoding({"input_ids": [IDS[0], ids], "attention_mask": [[1] * 48, mask]}, tensor_type="pt")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (tokens(), IDS),
        (tokens().numpy().astype(np.uint16), IDS),
        (list(tokens()), IDS),
        (iter(IDS), IDS),
        ({"input_ids": IDS}, IDS),
        (padded("right"), [IDS[0], IDS[1][:40]]),
        (padded("left"), [IDS[0], IDS[1][:40]]),
    ],
)
def test_what_can_mean_one_thing_only_is_accepted(model, given, meant):
    found, expected = (qkscope.analyze(qkscope.capture_moments(model, each)) for each in (given, meant))
    pd.testing.assert_frame_equal(found, expected)


def test_whole_numbers_may_be_numpys(model, moments):
    same = qkscope.capture_moments(model, IDS, context=np.int64(48), buckets=np.int32(16))
    assert same.layout == moments.layout
    assert len(qkscope.analyze(moments, components=np.int64(2), window=np.int64(24))) == 4 * 4 * 2


HOLES = {"input_ids": [IDS[0]], "attention_mask": [[1, 0] * 24]}
WINDOWS = [
    (["some text", "more"], "window 0 is text, not token ids; qkscope.token_windows"),
    ("some text", "windows are token ids, not text; qkscope.token_windows"),
    (IDS[0], r"window 0 is a single number; put the ids of one window in a list: \[ids\]"),
    (tokens()[0], r"1 dimensions, not 2; put it in a list, \[ids\]"),
    (tokens()[None], "3 dimensions, not 2"),
    (BatchEncoding({"input_ids": IDS[0]}), "window 0 is a single number"),
    (HOLES, "attention_mask leaves out tokens between others"),
    ({"input_ids": IDS, "attention_mask": [[1] * 48]}, "2 rows of input_ids, but 1 of attention_mask"),
    ({"ids": IDS}, "not dict"),
    ([{"input_ids": IDS[0]}], "window 0 is what a tokenizer returned; give its input_ids"),
    ([IDS], "window 0 has 2 dimensions"),
    ([[1, 2, [3]]], "window 0 is not a list of token ids"),
    (tokens().float(), "window 0 holds float32 values; token ids are whole numbers"),
    ([IDS[0], [1.0, 2.0]], "window 1 holds float64 values"),
    ([[True, False]], "window 0 holds bool values"),
    ([IDS[0], [1, 2, 128]], "window 1 has the token id 128 at position 2; the model has ids 0 to 127"),
    ([[1, -2]], "window 0 has the token id -2 at position 1"),
    ([list(range(100)) * 2], "200 tokens exceed the model's 128 positions; give context=128"),
    ([], "at least one window"),
    ([[7]], "at least one window of two or more tokens"),
    ([IDS[0], []], "window 1 is empty"),
    (None, "not NoneType"),
    (5, "not int"),
    ([None], "window 0 is NoneType"),
]


@pytest.mark.parametrize(("windows", "message"), WINDOWS)
def test_windows_that_are_none_are_refused(model, windows, message):
    with pytest.raises(InputError, match=message):
        qkscope.capture_moments(model, windows)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("context", [0, 1, -5, 2.5, "8", True, 2**40, 129]),
        ("buckets", [0, -1, 1.5, 10**9]),
        ("groups", [0, "a", 10**9]),
        ("common_window", [-1, 1, 49, 1.5]),
        ("batch_size", [0, -1, 1.5, None]),
        ("stage", ["x", None]),
        ("progress", [5]),
    ],
)
def test_settings_out_of_range_are_refused(model, name, values):
    for value in values:
        with pytest.raises(InputError, match=rf"{name}|129 tokens are more"):
            qkscope.capture_moments(model, IDS, **{name: value})


@pytest.mark.parametrize("given", [None, "gpt2", nn.Linear(2, 2), object()])
def test_what_is_no_model_is_refused(given):
    with pytest.raises(InputError, match=r"not a (transformers )?model"):
        qkscope.capture_moments(given, IDS)


def test_weights_that_are_nan_are_refused_before_anything_runs():
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(qkscope.QkscopeError, match=r"layer 1, layers\.1\.mlp\.up_proj\.weight has 1 of 6144"):
        qkscope.capture_moments(model, IDS)


def test_a_model_that_fails_is_a_qkscope_error(model):
    broken = tiny("llama")
    broken.model.layers[0].self_attn.q_proj = nn.Linear(3, 3)
    with pytest.raises(qkscope.QkscopeError, match=r"the model fails on 16 tokens \(RuntimeError"):
        qkscope.capture_moments(broken, IDS)
    calls = []

    def fails_later(*_):
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("no more")

    late = tiny("llama")
    late.model.register_forward_pre_hook(fails_later)
    with pytest.raises(DocumentFailure, match=r"window \d+: .*no more.*; leave that window out"):
        qkscope.capture_moments(late, IDS * 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window should be a whole number"),
        ({"window": 7}, "not a sum of buckets"),
        ({"window": "a"}, "window should be"),
        ({"components": 0}, "components should be"),
        ({"components": 1.5}, "components should be"),
        ({"sample": 0}, "sample should be"),
        ({"sample": 3, "seed": "x"}, "seed should be"),
        ({"model": 5}, "model is the name"),
        ({"lens": "norm"}, "there is no lens 'norm' that moments are enough for; did you mean 'norms'"),
        ({"lens": "ablation"}, "there is no lens 'ablation'"),
    ],
)
def test_analyze_refuses(moments, arguments, message):
    with pytest.raises(InputError, match=message):
        qkscope.analyze(moments, **arguments)


def test_a_lens_alone_has_the_numbers_of_the_joint_table(moments):
    """Root mean square lengths, against the second moments themselves."""
    alone = qkscope.analyze(moments, "norms").set_index(["window", "layer", "head"])
    assert {"rms_q", "rms_q_se", "logit_std"} & set(alone.columns) >= {"rms_q", "rms_q_se"}
    own = alone.xs(moments.layout.context)
    for layer in moments.layers:
        of_window = moments.window(layer, "q").statistics(moments.layout.scale)
        squares = (of_window.mean_x**2).sum(axis=1) + of_window.cov_xx.trace(axis1=1, axis2=2)
        assert own.loc[layer, "rms_q"].to_numpy() == pytest.approx(squares**0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: qkscope.analyze("nowhere.safetensors"), "nowhere.safetensors: there is no such file"),
        (lambda _: qkscope.analyze([1]), "not list"),
        (lambda _: qkscope.Moments.load("nowhere"), "nowhere: there is no such file"),
        (lambda _: qkscope.Moments.load(None), "should be a path, not NoneType"),
        (lambda moments: moments.save(5), "should be a path, not int"),
        (lambda moments: moments.merge("other"), "not with str"),
        (lambda _: qkscope.run_study("nowhere.yaml"), "nowhere.yaml: there is no such study file"),
        (lambda _: qkscope.run_study(b"x"), "should be a path, not bytes"),
        (lambda _: qkscope.run_study("nowhere.yaml"), "nowhere.yaml: there is no such study file"),
        (lambda _: qkscope.run_study({"study": "x"}), "should be a path, not dict"),
        (lambda _: qkscope.run_study("x.yaml", options="fast"), r"CaptureOptions\(...\), not str"),
    ],
)
def test_files_and_studies_that_are_none_are_refused(moments, call, message):
    with pytest.raises(InputError, match=message):
        call(moments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, ["a"], 3), "NoneType is not a tokenizer"),
        (("gpt2", ["a"], 3), "str is not a tokenizer"),
        ((byte_tokenizer(), "one text", 3), r"a single text; put it in a list: \[text\]"),
        ((byte_tokenizer(), None, 3), "texts should be a list"),
        ((byte_tokenizer(), ["fine", 5], 3), "text 1 is int"),
        ((byte_tokenizer(), ["a"], 1), "context should be"),
        ((byte_tokenizer(), ["a"], "x"), "context should be"),
        ((byte_tokenizer(), ["a"], 3, "some"), "special_tokens should be"),
        ((lambda *_, **__: {}, ["a"], 3), "text 0: the tokenizer function fails on it"),
    ],
)
def test_token_windows_refuses(arguments, message):
    with pytest.raises(InputError, match=message):
        qkscope.token_windows(*arguments)


def failure_of_writing():
    with writing("x"):  # type: ignore[arg-type]
        raise OSError(13, "no")


def refused_study():
    parse_study("study: a\ntrust_remote_code: true\n")


def refused_code():
    raise needs_remote_code(ModelSource("hub", "a/b"))


@pytest.mark.parametrize("fail", [failure_of_writing, refused_study, refused_code])
def test_errors_advise_flags_on_the_command_line_only(fail):
    with pytest.raises(qkscope.QkscopeError) as failed:
        fail()
    error = failed.value.within("somewhere")
    assert not re.search(r"--[a-z]", str(error))
    assert re.search(r"--[a-z]", error.for_command_line())
    assert str(error).startswith("somewhere: ")
    assert type(error) is type(failed.value)


def test_advice_outlives_its_way_between_processes():
    import pickle

    error = DocumentFailure.of(3, "a.txt", "too odd").advised(python="this", command="--that").within("here")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.for_command_line()) == (
        "here: document a.txt: too odd; this",
        "here: document a.txt: too odd; --that",
    )
    assert (again.documents, again.name) == ((3,), "a.txt")


@pytest.mark.slow
def test_moments_in_memory_give_heads_figures_and_cards_without_a_study(tmp_path):
    """The same tables as those of the moments' files."""
    model = tiny("llama", num_hidden_layers=2)
    moments = qkscope.capture_moments(model, tokens(8, 64), context=64)
    results = qkscope.load_results(moments)
    table = qkscope.analyze(moments)
    heads = results.heads()
    np.testing.assert_allclose(heads["r_q"], table.loc[table["pc"] == 0, "r_q"], rtol=1e-5)
    name = results.figures[0]
    assert results.figure(name).axes
    assert results.card(name).startswith("# ")
    later = qkscope.capture_moments(tiny("llama", seed=1, num_hidden_layers=2), tokens(8, 64), context=64)
    both = qkscope.load_results({"step-1": moments, "step-2": later}).heads()
    assert list(both["model"].unique()) == ["step-1", "step-2"]
    assert "name" not in moments.provenance
    with pytest.raises(InputError, match="results are made of moments by name"):
        qkscope.load_results({"step-1": table})
