"""What docs/safety.md guarantees, one by one, with real files: pickles that leave marks, links, hostile names."""

import csv
import io
import json
import os
import pickle
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import yaml
from markdown_it import MarkdownIt

from families import tiny
from published_table import invented
from qkscope.capture.load import load_backbone, load_config
from qkscope.capture.source import find_source
from qkscope.cli.main import main
from qkscope.errors import DocumentError, InputError, ModelError, QkscopeWarning, StudyError
from qkscope.join.write import JoinRequest, join_scores
from qkscope.lenses.views import build_tables, write_tables
from qkscope.report.write import write_report
from qkscope.results.csv_files import csv_text, write_csv, write_csv_pieces
from qkscope.results.read import load_results
from qkscope.run.execute import run_study
from qkscope.study.load import parse_study
from reports import FIGURES, Cards, drawing
from test_documents import byte_tokenizer
from test_study import checkpoint as study_of
from test_study import text as study_text
from warm import run_warm
from written import put

# --- code of a checkpoint ---------------------------------------------------------------------------

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaModel

Path({marker!r}).write_text("ran")


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnModel(LlamaModel):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path):
    """`plain`: a small Llama. `own`: the same weights under code of their own, which leaves a mark when it runs."""
    plain, own, marker = tmp_path / "plain", tmp_path / "own", tmp_path / "ran"
    tiny("llama", vocab_size=256).save_pretrained(plain)
    byte_tokenizer().save_pretrained(plain)
    shutil.copytree(plain, own)
    config = json.loads((own / "config.json").read_text())
    config["model_type"] = "own_llama"
    config["auto_map"] = {"AutoConfig": "modeling.OwnConfig", "AutoModel": "modeling.OwnModel"}
    (own / "config.json").write_text(json.dumps(config))
    (own / "modeling.py").write_text(CODE.format(marker=str(marker)))
    return marker


def run(tmp_path, *arguments):
    """Another process, so that the code a model brings along stays there; its copies go to the test's folder."""
    places = {"HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "home/modules")}
    return run_warm(*arguments, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1", **places})


def one_checkpoint(world, model, **changes):
    return world(checkpoints=[{"name": "one", "model": model, "context": 64, **changes}])


@pytest.mark.slow
def test_code_of_a_checkpoint_runs_with_the_flag_only(world, tmp_path, own_code, monkeypatch, capsys):
    one_checkpoint(world, "own")
    monkeypatch.chdir(tmp_path)
    for arguments in (["run", "study.yaml", "--out", "out"], ["inspect", "study.yaml"], ["inspect", "own"]):
        assert main(arguments) == 2
        refused = capsys.readouterr().err
        assert "needs remote code" in refused
        assert "--trust-remote-code" in refused
        assert "anything you can do on this machine" in refused
    assert not own_code.exists()
    assert not (tmp_path / "out").exists()
    done = run(tmp_path, "run", "study.yaml", "--out", "out", "--trust-remote-code")
    assert done.returncode == 0, done.stderr
    assert own_code.exists()
    assert run(tmp_path, "inspect", "own", "--trust-remote-code").returncode == 0
    told = json.loads((tmp_path / "out/provenance.json").read_text())
    assert told["checkpoints"][0]["trust_remote_code"] is True
    assert "--trust-remote-code" in told["command"]

    one_checkpoint(world, "plain")
    assert run(tmp_path, "run", "study.yaml", "--out", "plain-out").returncode == 0
    plain = json.loads((tmp_path / "plain-out/provenance.json").read_text())
    assert plain["checkpoints"][0]["trust_remote_code"] is False
    assert plain["checkpoints"][0]["fingerprint"] != told["checkpoints"][0]["fingerprint"]
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out/qk.csv"), pd.read_csv(tmp_path / "plain-out/qk.csv"))


@pytest.mark.slow
def test_changed_code_is_captured_again(world, tmp_path, own_code):
    one_checkpoint(world, "own")
    arguments = ["capture", "study.yaml", "--out", "out", "--trust-remote-code"]
    assert run(tmp_path, *arguments).returncode == 0
    assert "moments already exist" in run(tmp_path, *arguments).stderr
    with (tmp_path / "own/modeling.py").open("a") as file:
        file.write("\n# another version\n")
    assert "moments already exist" not in run(tmp_path, *arguments).stderr


def test_the_flag_does_not_change_what_an_ordinary_run_is_known_by(world, checkpoints):
    from qkscope.run.plan import make_plan
    from qkscope.study.load import load_study

    file = load_study(one_checkpoint(world, str(checkpoints / "short")))
    (without,), (trusted,) = (make_plan(file, trust_remote_code=flag).checkpoints for flag in (False, True))
    assert (without.trust_remote_code, trusted.trust_remote_code) == (False, True)
    assert without.fingerprint() != trusted.fingerprint()
    assert without.source.arguments["trust_remote_code"] is False


def test_code_beside_a_type_that_transformers_has_is_not_run_and_that_is_said(tmp_path, own_code):
    config = json.loads((tmp_path / "own/config.json").read_text())
    (tmp_path / "own/config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    source = find_source("own", None, tmp_path)
    with pytest.warns(QkscopeWarning, match="comes with Python code of its own, which is not run"):
        loaded = load_config(source)
    assert type(load_backbone(source, loaded)).__name__ == "LlamaModel"
    assert not own_code.exists()


def test_a_tokenizer_with_code_of_its_own(world, tmp_path, own_code):
    shutil.copytree(tmp_path / "plain", tmp_path / "words")
    (tmp_path / "words/tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["modeling.Own", None]}})
    )
    shutil.copy(tmp_path / "own/modeling.py", tmp_path / "words/modeling.py")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run_study(one_checkpoint(world, "plain", tokenizer="words"), tmp_path / "out")
        except ModelError as error:
            assert "trust_remote_code=True" in str(error) or "tokenizer" in str(error)
    assert not own_code.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"trust_remote_code": True},
        {"documents": {"files": "*.txt", "trust_remote_code": True}},
        {"checkpoints": [{"name": "a", "context": 9, "trust_remote_code": True}]},
        {"checkpoints": [{"name": "a", "context": 9, "config": {"trust_remote_code": True}}]},
        {"phases": {"p": {"config": {"auto_map": {"AutoModel": "x.Y"}}}}},
    ],
)
def test_a_study_file_cannot_ask_for_code(change):
    with pytest.raises(StudyError, match="trust_remote_code=True"):
        parse_study(study_text(**change))


def test_kernels_that_would_be_downloaded_are_code_too(tmp_path, own_code):
    config = json.loads((tmp_path / "plain/config.json").read_text())
    (tmp_path / "plain/config.json").write_text(json.dumps({**config, "attn_implementation": "someone/kernel"}))
    with pytest.raises(ModelError, match="asks for the kernel 'someone/kernel'"):
        load_config(find_source("plain", None, tmp_path))


# --- weights ----------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.write_text, (self.marker, "unpickled"))


@pytest.fixture
def model(tmp_path):
    tiny("llama", vocab_size=256).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def bomb(tmp_path):
    """Writes a pickle that leaves a mark when it is opened; afterwards there must be none."""
    marker = tmp_path / "unpickled"

    def write(path: Path) -> None:
        path.write_bytes(pickle.dumps(Bomb(marker)))

    yield write
    assert not marker.exists()


def test_the_bomb_works(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "mark")))
    assert (tmp_path / "mark").read_text() == "unpickled"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt", "x.pkl"])
def test_pickles_alone_are_refused(world, tmp_path, model, bomb, name):
    (model / "model.safetensors").unlink()
    bomb(model / name)
    with pytest.raises(ModelError, match=f"only as pickles .{name}.*convert"):
        run_study(one_checkpoint(world, "model"), tmp_path / "out")


def test_pickles_beside_safetensors_are_never_opened(world, tmp_path, model, bomb):
    bomb(model / "pytorch_model.bin")
    bomb(model / "training_args.bin")
    run_study(one_checkpoint(world, "model"), tmp_path / "out")


def index(model, shards):
    named = {f"layer.{i}": shard for i, shard in enumerate(shards)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))


@pytest.mark.parametrize(
    "shard",
    ["pytorch_model.bin", "../elsewhere.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", 5, None,
     "C:\\x.safetensors", "a\x00.safetensors"],
)  # fmt: skip
def test_an_index_that_leads_elsewhere(world, tmp_path, model, bomb, shard):
    shutil.copy(model / "model.safetensors", tmp_path / "elsewhere.safetensors")
    (model / "model.safetensors").rename(model / "part.safetensors")
    bomb(model / "pytorch_model.bin")
    index(model, ["part.safetensors", shard])
    with pytest.raises(ModelError, match=r"index\.json lists .* never from pickles or other folders"):
        run_study(one_checkpoint(world, "model"), tmp_path / "out")


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 5}', '{"weight_map": {"a": ["x"]}}', "[" * 100_000])
def test_an_index_that_is_none(world, tmp_path, model, text):
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json (is not an index|lists)"):
        run_study(one_checkpoint(world, "model"), tmp_path / "out")


@pytest.mark.slow
def test_shards_and_links_that_are_right_are_read(world, tmp_path, model):
    """A snapshot of the Hub's cache is a folder of links; a sharded model has an index."""
    tiny("llama", vocab_size=256).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert (tmp_path / "sharded/model.safetensors.index.json").exists()
    byte_tokenizer().save_pretrained(tmp_path / "sharded")
    (tmp_path / "linked").mkdir()
    for path in (tmp_path / "sharded").iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    for name in ("sharded", "linked"):
        run_study(one_checkpoint(world, name), tmp_path / name / "out")


def test_files_that_are_no_safetensors(world, tmp_path, model, bomb):
    weights = model / "model.safetensors"
    whole = weights.read_bytes()

    def refused(message):
        with pytest.raises(ModelError, match=message):
            run_study(one_checkpoint(world, "model"), tmp_path / "out")

    for content in (b"", whole[:4], b"\xff" * 64, whole[:8]):
        weights.write_bytes(content)
        refused("not a safetensors file, or truncated")
    bomb(weights)
    refused("not a safetensors file, or truncated")
    weights.write_bytes(whole[: len(whole) // 2])
    refused("cannot be loaded")
    weights.unlink()
    weights.symlink_to(tmp_path / "nowhere")
    refused("is not a file")
    weights.unlink()
    os.mkfifo(weights)
    refused("is not a file")
    weights.unlink()
    weights.mkdir()
    refused("is not a file")


@pytest.mark.parametrize("named", ["adapter_model.bin", "../elsewhere.safetensors", "other.safetensors.index.json"])
def test_a_config_does_not_choose_its_weight_file(world, tmp_path, model, bomb, named):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_weights": named}))
    bomb(model / "adapter_model.bin")
    with pytest.raises(ModelError, match="names a weight file of its own"):
        run_study(one_checkpoint(world, "model"), tmp_path / "out")


def test_an_adapter_is_refused(world, tmp_path, model, bomb):
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    bomb(model / "adapter_model.bin")
    with pytest.raises(ModelError, match="holds an adapter"):
        run_study(one_checkpoint(world, "model"), tmp_path / "out")


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, b"\x80\x04" + b"x" * 99,
     b"GGUF\x03\x00\x00\x00" + (1 << 40).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little") + b"\x00" * 64],
    ids=["empty", "magic alone", "no version", "endless counts", "a pickle", "large counts"],
)  # fmt: skip
def test_gguf_files_that_are_none(world, tmp_path, checkpoints, content):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.gguf"):
        run_study(one_checkpoint(world, "x.gguf", tokenizer=str(checkpoints / "short")), tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": 10**9}, {"num_hidden_layers": -1}, {"head_dim": 10**7}, {"hidden_size": -5},
     {"hidden_size": 10**18}, {"num_attention_heads": 0}, {"vocab_size": -1}],
)  # fmt: skip
def test_absurd_configs_are_refused_before_anything_is_built(world, tmp_path, model, change):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError):
        run_study(one_checkpoint(world, "model"), tmp_path / "out")


def test_models_that_cannot_be_looked_for(tmp_path):
    for name in ("~nobody-here/x", "a\0b", "x" * 5000, "\ud800"):
        with pytest.raises(ModelError):
            find_source(f"./{name}" if not name.startswith("~") else name, None, tmp_path)


def test_a_dataset_name_that_is_a_reader_of_pickles(world, tmp_path, monkeypatch, bomb):
    """`pandas` names a reader of pickled frames in the datasets library, over the files of the current folder."""
    bomb(tmp_path / "x.pkl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DocumentError, match="dataset pandas names a file format"):
        run_study(world(documents={"dataset": "pandas", "split": "train"}), tmp_path / "out")


# --- names ------------------------------------------------------------------------------------------

BAD_NAMES = [
    "../a", "..", ".", "/etc/x", "a/b", "a\\b", "C:x", "a\0b", "x" * 300, "x" * 101, "", " ", "a ", "a.", ".hidden",
    "con", "CON", "nul.txt", "Aux", "com1", "LPT9.x", "prn.", "=1+1", "+1", "-1", "@x", "\t=1", "a\nb", "a\rb",
    "<b>", "a|b", "a`b", "[x](y)", "$x$", "ä", "а", "a\u202eb", "a\u200bb", "\ud800", "~", "a*b", "a?b", 'a"b',
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_no_names(name):
    for text in (study_of(name=name), study_text(study=name)):
        with pytest.raises(StudyError):
            parse_study(text)


def test_names_that_differ_in_case_only():
    with pytest.raises(StudyError, match="2 checkpoints are named"):
        parse_study(study_text(checkpoints=[{"name": "Step", "context": 9}, {"name": "sTEP", "context": 9}]))


@pytest.mark.parametrize(
    "label", ["a\u202eb", "a\u2066b", "a\u200bb", "\ufeffa", "a\x1b[31m", "a\x7f", "a\x85b", "\u2028", "\u3164", "\0",
              "a\u034fb", " ", "x" * 201, "\ud800"],
)  # fmt: skip
def test_labels_with_unseen_characters(label):
    for change in ({"label": label}, {"phase": label}):
        with pytest.raises(StudyError):
            parse_study(study_of(**change))
    with pytest.raises(StudyError):
        parse_study(study_text(title=label))


@pytest.mark.parametrize("place", ["a\0b", "\ud800", "a\nb", "", "x" * 5000, "a\x1bb"])
def test_places_that_no_system_has(place):
    for change in ({"model": place}, {"documents": {"files": place}}, {"documents": {"files": ["a", place]}}):
        with pytest.raises(StudyError, match="printable text"):
            parse_study(study_text(**change))


# --- YAML -------------------------------------------------------------------------------------------

BOMBS = {
    "aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "merge": "a: &a {x: 1}\nb: {<<: *a}",
    "nesting": "a: " + "[" * 5000,
    "nested maps": "".join(f"{' ' * i}a:\n" for i in range(200)),
    "minutes and seconds": "a: 1" + ":1" * 1_000_000,
    "a fraction of them": "a: 1" + ":1" * 300 + ".5",
    "digits": "a: " + "1" * 100_000,
    "hexadecimal": "a: 0x" + "f" * 100_000,
    "a date of no calendar": "a: 2001-02-31",
    "a zone of no world": "a: 2001-02-03T04:05:06+99:99",
    "binary": "a: !!binary 'x'",
    "python": "a: !!python/name:os.system",
    "object": "a: !!python/object/new:os.system [ls]",
    "bool": "a: !!bool maybe",
    "int": "a: !!int ''",
    "float": "a: !!float x",
    "timestamp": "a: !!timestamp x",
    "a list as a key": "? [a]\n: b",
    "nul": "a: \0",
}


def test_yaml_of_many_values_is_refused_when_there_are_too_many(monkeypatch):
    """A smaller limit: PyYAML takes ten seconds for the real one, and what happens there is the same."""
    monkeypatch.setattr("qkscope.study.load.MAX_NODES", 1000)
    with pytest.raises(StudyError, match="more than 1000 keys and values"):
        parse_study("a: [" + "1," * 1000 + "1]")
    with pytest.raises(StudyError, match="unknown key 'a'"):
        parse_study("a: [" + "1," * 900 + "1]")


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_yaml_that_would_explode(name):
    with pytest.raises(StudyError) as caught:
        parse_study(BOMBS[name])
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    "value",
    ["2001-02-03", "!!binary aGk=", ".nan", ".inf", "{a: 2001-02-03}", "0x" + "f" * 40, "{1: 2}", "!!set {a}",
     "[" * 20 + "]" * 20],
)  # fmt: skip
def test_overrides_are_what_json_can_hold(value):
    for key in ("config", "expect"):
        with pytest.raises(StudyError, match=rf"checkpoints\[0\].{key}"):
            parse_study(study_of(**{key: {"x": "VALUE"}}).replace("VALUE", value))


def test_overrides_that_reach_too_far():
    for key in ("_name_or_path", "__class__", "_attn_implementation"):
        with pytest.raises(StudyError, match="internal"):
            parse_study(study_of(config={key: "x"}))
    with pytest.raises(StudyError, match="64 KiB"):
        parse_study(study_of(config={"x": "y" * 70_000}))


def test_an_override_does_not_replace_what_a_config_does(world, tmp_path, checkpoints):
    study = one_checkpoint(world, str(checkpoints / "short"), config={"to_dict": 5})
    with pytest.raises(ModelError, match="no 'to_dict'"):
        run_study(study, tmp_path / "out")


def test_a_thousand_mistakes_are_not_a_thousand_lines():
    with pytest.raises(StudyError, match="and 981 more mistakes") as caught:
        parse_study(yaml.safe_dump({**yaml.safe_load(study_text()), **{f"k{i:04}": 1 for i in range(1001)}}))
    assert len(str(caught.value).splitlines()) == 21


# --- tables, cards, pictures ------------------------------------------------------------------------

HOSTILE = [
    "=HYPERLINK(1)", "+1", "-0.3", "@x", "\t=1", "\r=1", " =1", "\uff1d1", "<script>alert(1)</script>",
    "![x](http://evil.example/x.png)", "[x](javascript:alert(1))", "<http://evil.example>", "http://evil.example",
    "www.evil.example", "a@evil.example", "a|b|c", "`code`", "``", "$x^2$", "$", r"\$", r"\frac{1}{0}$", "_x_", "# x",
    "---", "1. x", "- x", "> x", "~~x~~", "&lt;b&gt;", "\x1b[31m", "a\u202eb", "line\nbreak", "]]>", "--><b>", "\\",
    "{x}", "%s", "[red]x[/red]", "^x^", ":tada:", "'=1", '"', ",", "\ufeff=1", "NA", "x" * 300,
]  # fmt: skip


def cells_of(text):
    """As a spreadsheet would read them."""
    return [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]


def is_number(cell):
    try:
        float(cell)
    except ValueError:
        return False
    return True


def test_cells_are_never_formulas_and_numbers_stay_numbers():
    table = pd.DataFrame({"model": HOSTILE, "r_q": np.linspace(-1, 1, len(HOSTILE)), "n": -5})
    table["mixed"] = pd.Series(["=1", -2, None] + ["x"] * (len(table) - 3), dtype=object)
    text = csv_text(table)
    for cell in cells_of(text):
        assert is_number(cell) or not cell.lstrip("\ufeff \t\r\n").startswith(("=", "+", "-", "@", "\uff1d")), cell
        assert cell.isprintable()
    back = pd.read_csv(io.StringIO(text), keep_default_na=False)
    np.testing.assert_allclose(back["r_q"], table["r_q"])
    assert set(back["n"]) == {-5}
    assert back["model"][2] == "'-0.3"


def test_column_names_are_never_formulas(tmp_path):
    names = ["=cmd|' /C calc'!A0", "+1", "-1", "@x", "\t=1", "\r=1", " =1", "\uff1d1", "model", "r_q"]
    table = pd.DataFrame([range(len(names))] * 2, columns=names)
    write_csv(table, tmp_path / "whole.csv")
    write_csv_pieces([lambda: table.head(1), lambda: table.tail(1)], tmp_path / "pieces.csv")
    assert (tmp_path / "whole.csv").read_bytes() == (tmp_path / "pieces.csv").read_bytes()
    header = cells_of((tmp_path / "whole.csv").read_text())[: len(names)]
    for name in header:
        assert not name.lstrip().startswith(("=", "+", "-", "@", "\uff1d")), name
        assert name.isprintable()
    assert header[-2:] == ["model", "r_q"]  # ours stay as they are
    assert pd.read_csv(tmp_path / "whole.csv").to_numpy().tolist() == table.to_numpy().tolist()


def test_a_join_copies_no_formula_from_the_header_of_a_strangers_table(tmp_path):
    rows = "".join(f"m{i},{i},{i * i % 7}\n" for i in range(6))
    (tmp_path / "measures.csv").write_text(f'model,"=HYPERLINK(""http://x"")",+1\n{rows}')
    (tmp_path / "scores.csv").write_text("model,score\n" + "".join(f"m{i},{i + i % 2}\n" for i in range(6)))
    join_scores(JoinRequest(str(tmp_path / "measures.csv"), str(tmp_path / "scores.csv")), tmp_path / "out")
    for path in (tmp_path / "out").glob("*.csv"):
        for cell in cells_of(path.read_text()):
            assert is_number(cell) or not cell.startswith(("=", "+", "-", "@")), (path.name, cell)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A results folder from a stranger: hostile in every name, and in every value of its provenance that is shown."""
    folder = tmp_path_factory.mktemp("hostile")
    rng = np.random.default_rng(0)
    rows = [
        {"model": name, "layer": layer, "head": 0, "pc": 0, "explained_variance": 0.3, "r_q": rng.uniform(),
         "r_k": rng.uniform(-1, 1), "window": window, "rotary": "nope" if layer == 1 else "rotary"}
        for name in HOSTILE for layer in range(3) for window in (64,)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    table.to_csv(folder / "qk.csv", index=False)
    put(folder, "components", table.assign(window=32))
    heads = table.assign(attention="full", attention_window=None)
    put(folder, "heads", pd.concat([heads, heads.assign(window=32)]))
    evil = "<img src=x onerror=alert(1)>_a_ [l](http://e.example)"
    names = pd.read_csv(folder / "qk.csv", keep_default_na=False)["model"].unique()
    layers = [{"layer": 0, "q_heads": evil, "kv_heads": evil, "rotary": "rotary"}]
    record = {
        "study": {"study": evil, "title": evil, "heads": {"sample": 3, "seed": evil}, "figure_checkpoints": [evil]},
        "corpus": {"source": evil, "fingerprint": evil},
        "checkpoints": [
            {"name": names[i], "label": HOSTILE[-i - 1],
             "phase": HOSTILE[i], "model": evil, "dtype": evil, "rope_theta": {evil: evil, "x": 1e4},
             "max_position_embeddings": evil, "layers": layers, "n_layers": 3, "model_type": evil, "context": 64}
            for i in range(len(HOSTILE))
        ],
        "analysis": {"skip_positions": evil, "common_window": 32},
    }  # fmt: skip
    (folder / "provenance.json").write_text(json.dumps(record))
    return folder


def require_plain(card):
    """As a real Markdown parser sees the card: headings, lists, tables, emphasis and code, nothing else."""
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    allowed = {
        "heading_open", "heading_close", "paragraph_open", "paragraph_close", "inline", "ordered_list_open",
        "ordered_list_close", "bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close",
        "table_open", "table_close", "thead_open", "thead_close", "tbody_open", "tbody_close", "tr_open", "tr_close",
        "th_open", "th_close", "td_open", "td_close",
    }  # fmt: skip
    for token in parser.parse(card):
        assert token.type in allowed, token
        for part in token.children or ():
            assert part.type in {"text", "code_inline", "strong_open", "strong_close", "softbreak", "text_special"}, (
                part
            )
    # Bare links, which this parser leaves alone but others make clickable, are broken by a backslash.
    outside_code = "".join(card.split("`")[::2])
    for start in ("http://", "www.", "a@evil"):
        assert start not in outside_code


@pytest.mark.slow
def test_cards_of_hostile_results_hold_no_markup(hostile):
    results = load_results(hostile)
    cards = Cards(build_tables(results))
    for name in FIGURES:
        require_plain(cards.text(name))


@pytest.mark.slow
def test_tables_of_hostile_results_hold_no_formula(hostile):
    for path in write_tables(build_tables(load_results(hostile)), hostile):
        text = path.read_text(encoding="utf-8")
        for cell in cells_of(text):
            assert is_number(cell) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")), (path, cell)


@pytest.mark.slow
def test_pictures_of_hostile_results_are_drawn_as_text(hostile, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # a user's own setting must not make LaTeX of it
    results = load_results(hostile)
    tables = build_tables(results)
    from qkscope.report.figures import write_figure

    for entry in FIGURES.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QkscopeWarning)  # letters that no font here has, which are drawn as numbers
            picture, vectors, _ = write_figure(entry, tables, hostile)
        assert picture.is_file()
        tree = ElementTree.parse(vectors)
        tags = {element.tag.split("}")[1] for element in tree.iter()}
        assert not tags & {"script", "a", "foreignObject", "iframe", "animate", "set"}
        assert not any(key.lower().startswith("on") for element in tree.iter() for key in element.attrib)


MATHEMATICS = ("$", "$$", "$x", r"\$x$", r"$\frac{", "_hidden", "%$#", "\\")


def require_drawable(tables, names):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for name in names:
            figure = drawing(tables, name)
            if figure is not None:
                figure.canvas.draw()


@pytest.mark.slow
@pytest.mark.parametrize("labels", [MATHEMATICS[:4], MATHEMATICS[4:]])
def test_every_picture_of_labels_that_look_like_mathematics(tmp_path, labels):
    """Each is a checkpoint's label and its phase's name; no picture has room for all eight."""
    invented(tmp_path, len(labels))
    path = tmp_path / "provenance.json"
    record = json.loads(path.read_text())
    for checkpoint, label in zip(record["checkpoints"], labels, strict=True):
        checkpoint.update(label=label, phase=label)
    path.write_text(json.dumps(record))
    results = load_results(tmp_path)
    assert tuple(results.study.labels.values()) == labels
    require_drawable(build_tables(results), FIGURES)


@pytest.mark.slow
@pytest.mark.parametrize("title", MATHEMATICS)
def test_a_title_that_looks_like_mathematics(tmp_path, title):
    """Every picture writes its title in the same way."""
    results, _ = invented(tmp_path, 2)
    require_drawable(build_tables(replace(results, study=replace(results.study, title=title))), ["taxonomy"])


@pytest.mark.slow
def test_comparing_hostile_results(hostile, tmp_path):
    from qkscope.compare.write import compare_results

    shutil.copytree(hostile, tmp_path / "<b>")
    found = compare_results(hostile, str(tmp_path / "<b>"))
    require_plain((found.folder / "README.md").read_text(encoding="utf-8"))
    assert all(line.isprintable() for line in found.lines)
    for path in found.files:
        if path.suffix == ".csv":
            cells = cells_of(path.read_text(encoding="utf-8"))
            assert not any(cell.startswith(("=", "+", "@", "\t")) for cell in cells if not is_number(cell))


# --- links ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_report_does_not_follow_links_out_of_its_folder(tmp_path, sketches):
    results, outside = tmp_path / "results", tmp_path / "outside"
    results.mkdir()
    outside.mkdir()
    invented(results, 2)
    precious = outside / "precious"
    precious.write_text("mine")
    figure = results / "figures/01_position_signal"
    for link in (
        results / "tables", results / "tables/means.csv", results / "figures", figure, figure / "README.md",
        figure / "figure.png", figure / "figure.svg", results / "report.html",
    ):  # fmt: skip
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside if link.suffix == "" else precious)
        with pytest.raises(InputError, match="is a symbolic link"):
            write_report(results)
        link.unlink()
    assert precious.read_text() == "mine"
    assert [path.name for path in outside.iterdir()] == ["precious"]


# --- messages ---------------------------------------------------------------------------------------


def test_messages_do_not_steer_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text('"\\x1b[2J": 1\n"\\u202Ekey": 2\n')
    assert main(["run", "study.yaml"]) == 2
    shown = capsys.readouterr().err
    assert "\\x1b[2J" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_moments_of_a_stranger_do_not_name_themselves_as_they_like(tmp_path):
    from qkscope.run.events import Events
    from qkscope.tables.from_moments import analyze_files
    from test_moments_file import example

    for name in ("=1+1", "../x", "con"):
        moments = example()
        moments.provenance["name"] = name
        moments.save(tmp_path / "a.safetensors")
        with pytest.raises(InputError, match="is of a checkpoint named"):
            analyze_files([tmp_path / "a.safetensors"], Events(), "x", out=tmp_path / "o", components=None)
    assert not (tmp_path / "o").exists()
