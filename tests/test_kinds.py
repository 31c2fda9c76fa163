"""Checkpoints of one run, seeds, or models: who says so, how it is read otherwise, and what is never said of them."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import yaml

from families import tiny, tokens
from qkscope.api import capture_moments
from qkscope.cli.main import main
from qkscope.errors import InputError, StudyError
from qkscope.kinds import Architecture, kind_sentence, require_kind
from qkscope.lenses.views import build_tables
from qkscope.report.summary import summarize
from qkscope.report.write import page_cards, write_report
from qkscope.results.read import load_results
from qkscope.run.plan import make_plan
from qkscope.run.progress import Events
from qkscope.study.load import load_study
from qkscope.tables.from_moments import analyze_files, natural_order
from qkscope.words.blocks import to_markdown
from reports import drawing
from written import put

TRAINING_WORDS = re.compile(
    r"raining|checkpoint|\bfrom (smollm-a|gpt-b)|widens|narrows|grow|shrink|turnover|monoton|lasting|[Ee]arlier",
    re.IGNORECASE,
)


class Heard(Events):
    """Keeps what is said."""

    def __init__(self):
        self.notes = []

    def noted(self, message):
        self.notes.append(message)


# --- who says what entries are ----------------------------------------------------------------------


def layers(heads=4, n=2, width=16):
    return [{"layer": i, "q_heads": heads, "kv_heads": 2, "head_dim": width} for i in range(n)]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ({}, {}, True),
        ({"model_type": "llama"}, {}, True),  # what one does not record cannot differ
        ({"model_type": "llama"}, {"model_type": "qwen3"}, False),
        ({"n_layers": 4}, {"n_layers": 6}, False),
        ({"layers": layers()}, {"layers": layers()}, True),
        ({"layers": layers()}, {"layers": layers(heads=8)}, False),
        ({"layers": layers()}, {"layers": layers(width=32)}, False),
        ({"layers": layers()}, {"layers": "damaged"}, True),
    ],
)
def test_different_architectures_are_models_only_where_that_is_said(one, other, alike):
    entries = [("one", Architecture.of_record(one)), ("two", Architecture.of_record(other))]
    require_kind("models", entries)
    if alike:
        require_kind(None, entries)
        return
    with pytest.raises(InputError, match=r"'one' \(.*\) and 'two' \(.*\) are of different architectures") as refused:
        require_kind(None, entries)
    assert "write `kind: models` in the study" in str(refused.value)
    if "model_type" in one:
        require_kind("checkpoints", entries)  # somebody renamed it; the heads are the same
    else:
        with pytest.raises(InputError, match="kind: seeds, but 'one'"):
            require_kind("seeds", entries)


def test_an_architecture_is_named_as_far_as_it_is_recorded():
    record = {"model_type": "llama", "n_layers": 2, "layers": layers()}
    assert Architecture.of_record(record).words == "llama, 2 layers, 4 query and 2 key heads of width 16"
    assert Architecture.of_record({}).words == "architecture not recorded"
    mixed = {"layers": [{**each, "q_heads": 2 + 2 * i} for i, each in enumerate(layers(n=4))]}
    assert Architecture.of_record(mixed).words.endswith("or 4 query and 2 key heads of width 16 …")


def test_the_sentence_names_the_way_out():
    assert kind_sentence("checkpoints", 3, stated=False).endswith(
        "because nothing says otherwise; `kind: seeds` or `kind: models` in the study (or --kind of analyze) would"
    )
    assert "as `kind: seeds` says" in kind_sentence("seeds", 2, stated=True)


@pytest.mark.slow
def test_inspect_says_how_entries_are_read_and_a_wrong_kind_is_refused(world, checkpoints, tmp_path, capsys):
    assert main(["inspect", str(world())]) == 0
    assert "kind: the 2 entries are read as checkpoints of one training run, in this order" in capsys.readouterr().out
    plan = make_plan(load_study(world(kind="seeds")))
    assert plan.kind == "seeds"
    with pytest.raises(StudyError, match="kind"):
        load_study(world(kind="seed"))
    other = tmp_path / "other"
    tiny("smollm3", vocab_size=256, num_hidden_layers=2).save_pretrained(other)
    entries = [{"name": "one", "model": str(checkpoints / "short"), "context": 64},
               {"name": "two", "model": str(other), "context": 64}]  # fmt: skip
    tokenizer = str(checkpoints / "short")
    assert make_plan(load_study(world(checkpoints=entries, tokenizer=tokenizer, kind="models"))).kind == "models"
    with pytest.raises(InputError, match=r"'one' \(smollm3, 4 layers.*'two' \(smollm3, 2 layers.*`kind: models`"):
        make_plan(load_study(world(checkpoints=entries, tokenizer=tokenizer)))
    with pytest.raises(InputError, match=r"differ in their layers.*`kind: models`"):
        make_plan(load_study(world(checkpoints=entries, tokenizer=tokenizer, kind="checkpoints")))


@pytest.mark.slow
def test_a_run_records_the_kind_and_the_report_reads_it(world, tmp_path, capsys):
    assert main(["run", str(world(kind="seeds")), "--out", str(tmp_path / "out")]) == 0
    assert "are read as seeds of one architecture, as `kind: seeds` says" in capsys.readouterr().err
    record = json.loads((tmp_path / "out/provenance.json").read_text())
    assert (record["kind"], record["kind_stated"], record["study"]["kind"]) == ("seeds", True, "seeds")
    assert load_results(tmp_path / "out").study.kind == "seeds"
    assert main(["analyze", str(tmp_path / "out"), "--kind", "models", "--out", str(tmp_path / "again")]) == 0
    assert load_results(tmp_path / "again").study.kind == "models"


# --- loose files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ordered"),
    [
        (["step-100", "step-20", "step-5"], ["step-5", "step-20", "step-100"]),
        (["late", "early"], ["late", "early"]),  # no numbers: as they were given
        (["a-2", "b-1", "a-1"], ["a-1", "a-2", "b-1"]),
        (["s1-e10", "s1-e9", "s0-e11"], ["s0-e11", "s1-e9", "s1-e10"]),
        (["x", "7", "07"], ["x", "7", "07"]),
    ],
)
def test_names_that_differ_in_numbers_are_ordered_by_them(given, ordered):
    assert natural_order(given) == ordered


@pytest.fixture(scope="module")
def loose(tmp_path_factory):
    """Moments as a notebook saves them: no name, no context recorded; in the shell's order 100 comes before 20."""
    folder = tmp_path_factory.mktemp("loose")
    for step in (20, 100, 5):
        windows = tokens(rows=4, length=32, seed=step).tolist()
        capture_moments(tiny("llama", seed=step), windows, groups=2, buckets=2).save(
            folder / f"step-{step}.safetensors"
        )
    return folder


@pytest.mark.slow
def test_loose_files_are_ordered_by_number_and_know_their_context(loose, tmp_path):
    heard = Heard()
    paths = sorted(loose.glob("*.safetensors"))
    assert [path.stem for path in paths] == ["step-100", "step-20", "step-5"]
    analyze_files(paths, heard, "analyze", out=tmp_path, components=None)
    study = load_results(tmp_path).study
    assert [(c.name, c.context) for c in study.checkpoints] == [("step-5", 32), ("step-20", 32), ("step-100", 32)]
    assert "ordered by the numbers in their names: step-5, step-20, step-100" in heard.notes
    assert any("read as checkpoints of one training run" in note for note in heard.notes)


def test_loose_files_can_be_called_seeds(loose, tmp_path):
    paths = sorted(loose.glob("*.safetensors"))
    analyze_files(paths, Heard(), "analyze", out=tmp_path, components=None, kind="seeds")
    results = load_results(tmp_path)
    assert results.study.kind == "seeds"
    assert results.study.span == "across seeds"


def test_labels_that_repeat_are_made_their_own(tmp_path):
    rows = [(m, layer, 0, 0, 0.3, 0.5, 0.1) for m in ("a", "b", "c") for layer in range(4)]
    columns = ["model", "layer", "head", "pc", "explained_variance", "r_q", "r_k"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "qk.csv", index=False)
    records = [{"name": "a", "label": "1"}, {"name": "b", "label": "1"}, {"name": "c", "label": "1 (a)"}]
    (tmp_path / "provenance.json").write_text(json.dumps({"checkpoints": records}))
    labels = [c.label for c in load_results(tmp_path).study.checkpoints]
    assert labels[1] == "1 (b)"
    assert len(set(labels)) == 3


# --- what is said and drawn of seeds and models -----------------------------------------------------


def results_of(folder, kind, contexts=(128, 128)):
    """Two entries of 12 layers whose heads differ in every respect; 33 % of the second's are K-positional."""
    rng = np.random.default_rng(0)
    rows = []
    for i, (name, context) in enumerate(zip(("smollm-a", "gpt-b"), contexts, strict=True)):
        for layer, head in np.ndindex(12, 3):
            k_positional = i == 1 and head == 0
            r_q = 0.1 if k_positional else 0.85 - 0.3 * i + rng.normal(0, 0.02)
            r_k = 0.8 if k_positional else rng.normal(0, 0.4)
            sliding = layer % 3 != 2
            rows.append((name, layer, layer / 11, head, 0, 0.3 + 0.1 * i, r_q, np.clip(r_k, -1, 1), "rotary",
                         "sliding" if sliding else "full", 512 if sliding else None, context))  # fmt: skip
    columns = ["model", "layer", "depth", "head", "pc", "explained_variance", "r_q", "r_k", "rotary", "attention",
               "attention_window", "window"]  # fmt: skip
    table = pd.DataFrame(rows, columns=columns)
    table.to_csv(folder / "qk.csv", index=False)
    if contexts[0] != contexts[1]:
        put(folder, "components", table.assign(window=min(contexts)))
    put(folder, "heads", pd.concat([table.assign(window=w, r_q=table["r_q"] * f) for w, f in ((64, 0.5), (128, 1.0))]))
    record = {"kind": kind, "study": {"title": "Study"}, "checkpoints": [{"name": "smollm-a"}, {"name": "gpt-b"}]}
    (folder / "provenance.json").write_text(json.dumps(record))
    return load_results(folder)


@pytest.mark.parametrize("kind", ["seeds", "models"])
@pytest.mark.parametrize("contexts", [(128, 128), (128, 256)])
def test_no_card_of_seeds_or_models_speaks_of_training(tmp_path, kind, contexts):
    tables = build_tables(results_of(tmp_path, kind, contexts))
    for card in page_cards(tables):
        spoken = re.sub(r"`[^`]*`", "", to_markdown(card.blocks))  # names of functions and files
        found = TRAINING_WORDS.search(spoken)
        assert found is None, f"{card.figure}: {spoken[max(0, found.start() - 60) : found.end() + 40]}"
        assert "Gpt-b" not in spoken
        assert "Smollm-a" not in spoken
    assert not TRAINING_WORDS.search(str(summarize(tables)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "joined"), [("checkpoints", True), ("seeds", False), ("models", False)])
def test_no_line_joins_seeds_or_models(tmp_path, kind, joined):
    results = results_of(tmp_path, kind)
    tables = build_tables(results)
    assert tables.own.has("transitions") == joined
    for name in ("position_signal", "explained_variance"):
        figure = drawing(tables, name)
        lines = [
            line
            for axes in figure.axes
            for line in axes.lines
            if line.get_gid() in ("r_q", "r_k", "r_k_abs", "explained_variance", "discordant")
        ]
        assert lines
        assert all((line.get_linestyle() != "None") == joined for line in lines), name
        assert all(len(line.get_xdata()) == 2 for line in lines)


def test_sliding_layers_have_panels_of_their_own(tmp_path):
    tables = build_tables(results_of(tmp_path, "models"))
    assert tables.own.layer_types == ["rotary, full", "rotary, sliding 512"]
    titles = [axes.get_title("left") for axes in drawing(tables, "position_signal").axes]
    assert titles == ["12 rotary, full heads", "24 rotary, sliding 512 heads"]


def test_tables_and_figures_of_earlier_names_go_away(tmp_path):
    results_of(tmp_path, "models")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/rope_vs_nope.csv").write_text("old")
    write_report(tmp_path, figures=False)
    assert not (tmp_path / "tables/rope_vs_nope.csv").exists()


def test_a_study_file_may_state_its_kind(tmp_path):
    study = {"study": "s", "kind": "models", "documents": {"files": "*.txt"},
             "checkpoints": [{"name": "a", "model": "m", "context": 64}]}  # fmt: skip
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(study))
    assert load_study(path).study.kind == "models"
