"""Who is joined: one model per network, notes about these models only, and heads that published values are about."""

import json

import pandas as pd
import pytest

from qkscope.errors import InputError
from qkscope.join.card import join_card
from qkscope.join.inputs import scores_of
from qkscope.join.lengths import joined_lengths
from qkscope.join.published import load_published_models, published_scores
from qkscope.join.table import join
from qkscope.join.words import terminal_lines
from qkscope.join.write import JoinRequest, join_scores
from qkscope.words.blocks import to_markdown

NOTHING = pd.DataFrame()


def write_models(folder, hashes):
    """A results folder with one head per layer, whose r_q rises from model to model."""
    rows = [(f"m{i}", layer, 0, 0, 0.4, 0.1 * (i + 1) ** 2, 0.3, 128) for i in range(len(hashes)) for layer in (0, 1)]
    columns = ["model", "layer", "head", "pc", "explained_variance", "r_q", "r_k", "window"]
    pd.DataFrame(rows, columns=columns).assign(r_q=lambda t: t["r_q"] / 10).to_csv(folder / "qk.csv", index=False)
    records = [{"name": f"m{i}", "attention_hashes": [each * 16]} for i, each in enumerate(hashes)]
    record = {"kind": "models", "study": {"title": "Models"}, "checkpoints": records}
    (folder / "provenance.json").write_text(json.dumps(record), encoding="utf-8")
    return str(folder)


def write_scores(path, models):
    path.write_text("model,score\n" + "".join(f"{m},{i**2 + 1}\n" for i, m in enumerate(models)), encoding="utf-8")
    return str(path)


def test_two_names_of_one_network_count_once(tmp_path):
    folder = write_models(tmp_path, "abcbd")
    request = JoinRequest(folder, write_scores(tmp_path / "s.csv", ["m0", "m1", "m2", "m3", "m4"]), ["r_q"])
    found = join_scores(request, tmp_path / "out")
    assert list(found.joined.points["model"]) == ["m0", "m1", "m2", "m4"]
    assert found.joined.table.iloc[0]["n"] == 4
    note = "'m3' is left out: it has the attention weights of 'm1', and the two count as one model."
    assert f"note: {note}" in found.lines
    assert "is left out: it has the attention weights of" in (tmp_path / "out/README.md").read_text()


def test_the_name_that_has_a_score_stays(tmp_path):
    folder = write_models(tmp_path, "abcbd")
    request = JoinRequest(folder, write_scores(tmp_path / "s.csv", ["m0", "m2", "m3", "m4"]), ["r_q"])
    found = join_scores(request, tmp_path / "out")
    assert list(found.joined.points["model"]) == ["m0", "m2", "m3", "m4"]
    assert not [line for line in found.lines if "left out" in line]


def test_three_names_of_which_two_are_one_network_are_too_few(tmp_path):
    folder = write_models(tmp_path, "aba")
    request = JoinRequest(folder, write_scores(tmp_path / "s.csv", ["m0", "m1", "m2"]), ["r_q"])
    with pytest.raises(
        InputError, match="a correlation needs at least 3.* 'm2' is left out: it has the attention weights of 'm0'"
    ):
        join_scores(request, tmp_path / "out")


def test_a_second_name_does_not_count_at_lengths_either():
    shipped = load_published_models().measures
    rows = [("llama3.1-8b", 4096, 90), ("llama3.2-11b", 4096, 91), ("llama3.1-8b", 8192, 80)]
    table = scores_of(pd.DataFrame(rows, columns=["model", "length", "score"]), "bench", "bench")
    found = join(shipped, table)
    assert list(found.points["model"]) == ["llama3.2-11b"]  # the first listed of the two
    assert joined_lengths(found.measures, found.scores).empty


def test_notes_are_about_the_models_of_the_join():
    found = join(load_published_models().measures, published_scores("longbench-pro"))
    said = " ".join(terminal_lines(found)) + to_markdown(join_card(found, NOTHING, NOTHING))
    assert "Qwen3 models were measured post-trained" in said
    for absent in ("11b", "llama3.1", "Mistral v0.2"):
        assert absent not in said
