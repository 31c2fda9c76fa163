"""Who is joined: one model per network, notes about these models only, and heads that published values are about."""

import json

import numpy as np
import pandas as pd
import pytest

import entry_worlds
from qkscope.cli.main import main
from qkscope.errors import InputError
from qkscope.join.among import among
from qkscope.join.from_results import ComparedHeads, compared_heads
from qkscope.join.inputs import load_published_models, published_scores, scores_of
from qkscope.join.table import join, joined_lengths
from qkscope.join.write import JoinRequest, join_card, join_scores, terminal_lines
from qkscope.lenses.views import build_tables
from qkscope.results.read import load_results
from qkscope.stats.means import Part
from qkscope.words.blocks import to_markdown
from written import put


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
    assert note in found.lines
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
    with pytest.raises(InputError, match="'m2' is left out: it has the attention weights of 'm0'"):
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
    said = " ".join(terminal_lines(found)) + to_markdown(join_card(found))
    assert "Qwen3 models were measured post-trained" in said
    for absent in ("11b", "llama3.1", "Mistral v0.2"):
        assert absent not in said


# --- which heads ------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path):
    """Three models; the first has three sliding layers (r_q 0.1) and one full one (0.9), the last sliding ones only."""
    rows = []
    for i, name in enumerate(("gemma", "llama", "mistral")):
        for layer, head in np.ndindex(4, 2):
            sliding = name == "mistral" or (name == "gemma" and layer < 3)
            r = (0.1 if sliding else 0.9) - 0.02 * i
            kind = ("sliding", 16) if sliding else ("full", None)
            rows += [(name, layer, head, 0, 0.4, r, 0.3, window, "rotary", *kind) for window in (64, 128)]
    columns = ["model", "layer", "head", "pc", "explained_variance", "r_q", "r_k", "window", "rotary", "attention"]
    table = pd.DataFrame(rows, columns=[*columns, "attention_window"])
    table[table["window"] == 128].to_csv(tmp_path / "qk.csv", index=False)
    put(tmp_path, "heads", table)
    return tmp_path


def test_a_model_with_windows_stands_among_others_by_its_full_attention_heads(mixed, capsys):
    assert main(["among", str(mixed)]) == 0
    said = capsys.readouterr().out
    rows = pd.read_csv(mixed / "join/among/points.csv").query("measure == 'r_q'").set_index("model")
    assert rows.loc["gemma", "value"] == pytest.approx(0.9)
    assert tuple(rows.loc["gemma", ["heads", "heads_measured"]]) == (2, 8)
    assert rows.loc["llama", "value"] == pytest.approx(0.88)
    assert rows.loc["mistral", "value"] == pytest.approx(0.06)  # it has no other heads, and that is said
    assert "gemma: 2 of 8 heads: those of full-attention layers." in said
    assert "mistral: all heads, of which none has full attention." in said
    assert "llama:" not in said
    assert "(11 models)" in said  # not all thirteen have r_q
    assert "gemma: 2 of 8 heads: those of full-attention layers." in (mixed / "join/among/README.md").read_text()


def test_a_rank_counts_the_published_models_below(tmp_path):
    """Published at 131,072 tokens, sorted by hand: r_q .761 .767 .775 .785 .786 .787 .790 .793 .829 .834 .834 and
    r_k .252 .257 .478 .480 .512 .533 .536 .541 .560 .570 .627."""
    cases = {  # r_q, r_k, window: models with a smaller r_q, r_k
        "middle": ((0.788, 0.515, 131_072), (6, 5)),
        "lowest": ((0.1, 0.1, 131_072), (0, 0)),
        "highest": ((0.95, 0.95, 131_072), (11, 11)),
        "third": ((0.77, 0.3, 131_072), (2, 2)),
        "near": ((0.83, 0.6, 120_000), (9, 10)),
        "elsewhere": ((0.83, 0.6, 65_536), (None, None)),
    }
    columns = ["model", "layer", "head", "pc", "explained_variance", "r_q", "r_k", "window"]
    rows = [(name, 0, 0, 0, 0.4, *values) for name, (values, _) in cases.items()]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "qk.csv", index=False)
    table = among(build_tables(load_results(tmp_path)), load_published_models()).set_index(["model", "measure"])
    for name, (_, ranks) in cases.items():
        for measure, rank in zip(("r_q", "r_k"), ranks, strict=True):
            row = table.loc[(name, measure)]
            assert row["at_this_window"] == (0 if rank is None else 11), (name, measure)
            assert np.isnan(row["above"]) if rank is None else row["above"] == rank, (name, measure)


def test_a_join_takes_full_attention_heads_and_says_so(mixed, tmp_path):
    request = JoinRequest(str(mixed), write_scores(tmp_path / "s.csv", ["gemma", "llama", "mistral"]), ["r_q"])
    found = join_scores(request, tmp_path / "out")
    assert list(found.joined.points["r_q"]) == pytest.approx([0.9, 0.88, 0.06])
    assert "Means of gemma are over 2 of 8 heads: those of full-attention layers." in found.lines
    by_length = found.joined.measures.by_length.set_index(["model", "length"])["r_q"]
    assert by_length["gemma", 64] == pytest.approx(0.9)
    assert by_length["mistral", 64] == pytest.approx(0.06)


@pytest.mark.slow
def test_errors_over_documents_are_those_of_the_heads_that_are_compared():
    at = entry_worlds.tables_of("models").own
    heads = compared_heads(at, "gemma-x")
    of_full = Part(layer_kind="rotary, full")
    for panel, column in ((at.panel, "r_q"), (at.panel, "ap")):
        assert heads.mean(panel, column, "gemma-x") == panel.mean(column, "gemma-x", of_full)
        error = heads.error(panel, column, "gemma-x")
        assert error == panel.error(column, "gemma-x", of_full) > 0
        assert error != panel.error(column, "gemma-x")
        # Two kinds of full-attention layers together are all heads of a model that has no others.
        both = ComparedHeads((Part(layer_kind="rotary, full"), Part(layer_kind="NoPE, full")), 16, 16, limited=False)
        assert both.mean(panel, column, "smol-3") == pytest.approx(panel.mean(column, "smol-3"))
        assert both.error(panel, column, "smol-3") == pytest.approx(panel.error(column, "smol-3"))
