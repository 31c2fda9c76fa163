"""GGUF files: parsed once for config, tokenizer and weights, after every path has been checked, and not in silence."""

import json
import sys

import gguf
import numpy as np
import pytest

from qkscope.capture.load import load_tokenizer
from qkscope.capture.source import find_source
from qkscope.capture.weights import shared_gguf_reader
from qkscope.cli.main import main
from qkscope.errors import ModelError
from qkscope.run.execute import run_study
from qkscope.run.plan import make_plan
from qkscope.run.progress import Events
from qkscope.study.load import load_study

WIDTH, HEADS, LAYERS, INNER = 32, 4, 2, 48


def write_gguf(path, seed=0, add_bos=None, leave=(), add=None):
    """A whole tiny model as llama.cpp would write it, with one token for each byte and two more.

    Tensors whose names begin as `leave` says are left out; `add` has shapes of further ones.

    Llama: of its kind transformers has no faster reader, so that the slow one is at work here.
    """
    from test_documents import byte_tokenizer

    random = np.random.default_rng(seed)
    bytes_alone = byte_tokenizer().get_vocab()
    vocabulary = [*sorted(bytes_alone, key=bytes_alone.get), "th", "the"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)

    def store(name, *shape):
        values = random.standard_normal(shape).astype(np.float32) * 0.2
        if not name.startswith(tuple(leave)):
            writer.add_tensor(name, values)

    store("token_embd.weight", len(vocabulary), WIDTH)
    store("output.weight", len(vocabulary), WIDTH)
    store("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            store(f"blk.{layer}.{name}.weight", WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            store(f"blk.{layer}.{name}.weight", WIDTH, WIDTH)
        store(f"blk.{layer}.ffn_gate.weight", INNER, WIDTH)
        store(f"blk.{layer}.ffn_up.weight", INNER, WIDTH)
        store(f"blk.{layer}.ffn_down.weight", WIDTH, INNER)
    for name, shape in (add or {}).items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def parses(monkeypatch):
    """The files that were parsed, in order."""
    seen = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path, mode="r"):
            seen.append(str(path))
            super().__init__(path, mode)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    return seen


class Told(Events):
    def __init__(self):
        self.notes = []

    def noted(self, message):
        self.notes.append(message)


def entry(name, **changes):
    return {"name": name, "model": f"{name}.gguf", "context": 64, **changes}


@pytest.mark.slow
def test_a_gguf_file_is_parsed_once_by_a_whole_run_and_that_is_said(world, tmp_path, parses):
    write_gguf(tmp_path / "a.gguf")
    told = Told()
    out = run_study(world(checkpoints=[entry("a")]), tmp_path / "out", told)
    assert (out / "qk.csv").is_file()
    assert parses == [str(tmp_path / "a.gguf")]
    assert [note for note in told.notes if note.startswith("reading a.gguf (")]


def test_several_gguf_files_are_parsed_once_each_though_the_next_is_read_ahead(world, tmp_path, parses):
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", seed=1)
    study = world(checkpoints=[entry("a"), entry("b")], shard_tokens=128)
    run_study(study, tmp_path / "out")
    assert sorted(parses) == [str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf")]


@pytest.mark.parametrize("stated", [True, False, None])
def test_the_header_says_whether_a_text_begins_with_the_bos_token(tmp_path, stated):
    write_gguf(tmp_path / "a.gguf", add_bos=stated)
    tokenizer, _ = load_tokenizer(find_source("a.gguf", None, tmp_path))
    text = tokenizer("ab", add_special_tokens=False).input_ids
    assert tokenizer("ab").input_ids == ([tokenizer.bos_token_id] if stated else []) + text
    assert tokenizer.convert_ids_to_tokens(text) == ["a", "b"]


@pytest.mark.parametrize(("stated", "begin"), [(True, ["!"]), (False, [])])
def test_the_provenance_says_what_texts_begin_with(world, tmp_path, stated, begin):
    write_gguf(tmp_path / "a.gguf", add_bos=stated)
    documents = {"files": "docs/*.txt", "special_tokens": "default"}
    out = run_study(world(checkpoints=[entry("a")], documents=documents), tmp_path / "out")
    # the file's BOS is its token 0
    record = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    assert [each["texts_begin_with"] for each in record["checkpoints"]] == [begin]


def test_a_gguf_file_that_was_replaced_is_parsed_again(world, tmp_path, parses):
    write_gguf(tmp_path / "a.gguf")
    study = world(checkpoints=[entry("a")])
    before = make_plan(load_study(study)).checkpoints[0].fingerprint()
    write_gguf(tmp_path / "a.gguf", seed=1)
    assert make_plan(load_study(study)).checkpoints[0].fingerprint() != before
    assert len(parses) == 2


def test_a_gguf_file_is_read_as_its_own_library_reads_it_but_not_through_a_memory_map(tmp_path):
    """Each slice of a numpy.memmap runs Python code, and a vocabulary takes a million slices."""
    write_gguf(tmp_path / "a.gguf")
    theirs = gguf.GGUFReader(tmp_path / "a.gguf")
    with shared_gguf_reader("a.gguf"):
        ours = gguf.GGUFReader(tmp_path / "a.gguf")
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert [bytes(part) for part in ours.fields[name].parts] == [bytes(part) for part in field.parts]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        np.testing.assert_array_equal(mine.data, other.data)
    assert isinstance(theirs.data, np.memmap)  # else there is nothing to avoid any more
    assert type(ours.data) is np.ndarray
    assert not ours.data.flags.owndata  # nothing was copied
    with shared_gguf_reader("a.gguf"), shared_gguf_reader("a.gguf"):
        assert gguf.GGUFReader(tmp_path / "a.gguf") is ours


def test_every_path_is_checked_before_a_gguf_file_is_parsed(world, tmp_path, parses, checkpoints):
    write_gguf(tmp_path / "a.gguf")
    with pytest.raises(ModelError, match=r"'b': there is no GGUF file .*b\.gguf \(did you mean a\.gguf\?\)"):
        make_plan(load_study(world(checkpoints=[entry("a"), entry("b")])))
    local = {"name": "b", "model": str(checkpoints / "short"), "context": 64, "expect": {"rope_theta": 3.0}}
    with pytest.raises(ModelError, match=r"'b': expect: rope_theta should be 3.0"):
        make_plan(load_study(world(checkpoints=[entry("a"), local])))
    assert parses == []


def test_the_same_gguf_file_under_two_names_is_noticed(world, tmp_path):
    write_gguf(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes())
    assert main(["inspect", str(world(checkpoints=[entry("a"), entry("b")]))]) == 2
    write_gguf(tmp_path / "b.gguf", seed=1)
    assert make_plan(load_study(world(checkpoints=[entry("a"), entry("b")]))).remarks == []


def test_without_the_extra_the_command_that_installs_it_is_told(world, tmp_path, monkeypatch):
    write_gguf(tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"'a': a GGUF file needs .*pip install 'qkscope\[gguf\]'"):
        make_plan(load_study(world(checkpoints=[entry("a")])))
