"""Libraries in Rust that give up while they load something: what they raise is no Exception, so handlers miss it."""

import json
import shutil

import pytest
from tokenizers import Tokenizer

from qkscope.capture.load import load_backbone, load_config, load_tokenizer
from qkscope.capture.source import find_source
from qkscope.cli.main import main
from qkscope.errors import ModelError

# A prefix that is longer than what it is cut from: tokenizers takes a slice beyond the end.
PANICS = {
    "version": "1.0",
    "added_tokens": [],
    "model": {
        "type": "BPE",
        "continuing_subword_prefix": "####",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
    },
}


@pytest.fixture
def hostile(tmp_path, checkpoints):
    """A checkpoint whose tokenizer panics when it is read."""
    shutil.copytree(checkpoints / "short", tmp_path / "hostile")
    (tmp_path / "hostile/tokenizer.json").write_text(json.dumps(PANICS))
    return tmp_path / "hostile"


@pytest.fixture
def panic():
    """A panic as Python sees it."""
    try:
        Tokenizer.from_str(json.dumps(PANICS))
    except BaseException as error:
        assert not isinstance(error, Exception)  # else nothing here tests anything
        return error
    raise AssertionError("this version of tokenizers does not panic here: find another way to make it")


def test_a_tokenizer_that_panics_while_it_is_loaded_is_refused_by_name(hostile, tmp_path, panic):
    with pytest.raises(
        ModelError, match=r"no tokenizer: .*hostile cannot be loaded: .*out of (range|bounds).*`tokenizer:`"
    ):
        load_tokenizer(find_source("hostile", None, tmp_path))


def test_the_command_line_names_the_checkpoint_whose_tokenizer_panics(world, hostile, capsys):
    study = world(checkpoints=[{"name": "bad", "model": str(hostile), "context": 64}])
    assert main(["inspect", str(study)]) == 2
    said = capsys.readouterr().err
    assert f"checkpoint 'bad': no tokenizer: {hostile} cannot be loaded: " in said
    assert "unexpected" not in said


def test_weights_that_panic_while_they_are_loaded_are_refused_by_name(checkpoints, panic, monkeypatch):
    """No file is known at which the reader of safetensors panics, so it is made to where transformers opens one."""

    def safe_open(*_, **__):
        raise panic

    monkeypatch.setattr("transformers.modeling_utils.safe_open", safe_open)
    source = find_source("short", None, checkpoints)
    with pytest.raises(ModelError, match=r"short cannot be loaded: .*out of (range|bounds)"):
        load_backbone(source, load_config(source), device="cpu")
