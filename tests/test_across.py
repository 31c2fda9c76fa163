"""Several models in one study: who they are is kept, one network under two names is noticed, figures tell them."""

import json

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.lines import Line2D

from families import tiny
from qkscope.capture.fingerprint import attention_hashes, count_parameters
from qkscope.draw import style
from qkscope.errors import StudyError
from qkscope.lenses.kind_of_layer import unusual_layers
from qkscope.lenses.views import build_tables
from qkscope.results.provenance import CheckpointRecord, shared_attention
from qkscope.results.read import load_results
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


# --- figures and cards ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three models of two families with three components; the last two share their attention."""
    folder, rng, rows = tmp_path_factory.mktemp("models"), np.random.default_rng(0), []
    for i, name in enumerate(("a-1b", "a-3b", "b-2b")):
        for layer, head, pc in np.ndindex(2 + i, 4, 3):
            r = (0.8 - 0.1 * i, 0.3, 0.9 if i == 2 else 0.1)[pc]
            rows.append((name, layer, head, pc, (0.4, 0.1, 0.05)[pc], r, rng.choice([-r, r]), 128))
    columns = ["model", "layer", "head", "pc", "explained_variance", "r_q", "r_k", "window"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "qk.csv", index=False)
    hashes = [["1" * 16], ["2" * 16], ["2" * 16]]
    records = [
        {"name": name, "family": f"Family {name[0].upper()}", "parameters": int(name[2]) * 10**9,
         "tags": {"data": "web"}, "attention_hashes": each}
        for name, each in zip(("a-1b", "a-3b", "b-2b"), hashes, strict=True)
    ]  # fmt: skip
    record = {"kind": "models", "study": {"title": "Three"}, "checkpoints": records}
    (folder / "provenance.json").write_text(json.dumps(record), encoding="utf-8")
    return build_tables(load_results(folder))


def test_the_table_of_entries_says_who_they_are(three):
    table = three.own.table("entries").set_index("model")
    assert table.loc["a-3b", "family"] == "Family A"
    assert table.loc["a-3b", "parameters"] == 3e9
    assert json.loads(table.loc["b-2b", "tags"]) == {"data": "web"}
    assert list(table["heads"]) == [8, 12, 16]


def test_roles_are_means_over_heads_by_component_and_over_all_heads(three):
    table, heads = three.own.table("pc_roles"), three.own.components
    for model, pc in (("a-1b", 0), ("b-2b", 2)):
        mine = heads[(heads["model"] == model) & (heads["pc"] == pc)]
        row = table[(table["model"] == model) & (table["pc"] == pc)].iloc[0]
        assert row["r_k"] == pytest.approx(mine["r_k"].mean())
        assert row["r_k_abs"] == pytest.approx(mine["r_k"].abs().mean())
    whole = table[(table["model"] == "") & (table["pc"] == 0)].iloc[0]
    assert whole["heads"] == 36
    assert whole["r_q"] == pytest.approx((8 * 0.8 + 12 * 0.7 + 16 * 0.6) / 36)


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        (["rotary", "rotary", "NoPE"], {2: "NoPE"}),
        (["rotary, sliding 512", "rotary, full", "rotary, sliding 512"], {1: "full"}),
        (["rotary, chunked 8,192", "rotary, chunked 8,192", "NoPE, full"], {2: "NoPE full"}),
        (["rotary, sliding 512", "rotary, sliding 512", "rotary, sliding 64"], {2: "rotary, sliding 64"}),
        (["rotary", "rotary"], {}),
    ],
)
def test_layers_of_another_kind_than_most_are_named_by_what_tells_them_apart(kinds, told):
    heads = pd.DataFrame({"layer": np.repeat(range(len(kinds)), 2), "layer_kind": np.repeat(kinds, 2)})
    assert unusual_layers(heads) == told


def test_a_legend_does_not_lie_on_the_note_about_windows(three):
    """In a narrow figure three long keys take two columns."""
    keys = [Line2D([], [], label=f"a kind of layer with a long name {i}") for i in range(3)]
    for width, columns in ((5.6, 2), (14.0, 3)):
        figure = style.new_figure(
            width, 3.0, three.own.study, "Title", "native context length: 256–512 tokens; common window: 256"
        )
        style.header_legend(figure, keys, 3)
        (note,) = [text for text in figure.texts if text.get_gid() == "note"]
        figure.draw_without_rendering()
        assert len({round(text.get_window_extent().x0) for text in figure.legends[0].get_texts()}) == columns
        if columns == 3:
            assert not figure.legends[0].get_window_extent().overlaps(note.get_window_extent())
