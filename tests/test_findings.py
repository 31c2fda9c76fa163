"""The study of real models: findings claim what passes both errors and nothing else; its tokenizer reads and writes."""

import struct
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import findings
import findings_ablation
import study as real_study
import study_tables
import study_texts
from findings_numbers import Number, Tables
from study_tables import MEASURES, OF_TEXT, SHARES

from qkscope.stats.significance import Error

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks/results/study"
MODELS = {"stories15m": "stories15M", "b": "B-Instruct"}
CORPORA = ("speeches", "code", "novel")


def number(value, documents=0.01, heads=0.01, freedom=15.0):
    return Number(value, Error(documents, freedom), Error(heads, 100.0))


def study(folder, *, means=None, changes=None, verdicts=None, ablation=None):
    """Tables of two models on three corpora; each argument overrides numbers by what they are of."""
    places = [(corpus, model) for corpus in CORPORA for model in MODELS]
    entries = [{"part": part, "corpus": corpus, "model": model, "label": label, "parameters": 1e6, "window": 2048,
                "layers": 2, "heads": 8, "documents": 24, "groups": 16, "weights_kept": kept, "trained_context": 4096,
                "texts_begin_with": "", "dtype": "float32", "torch": "2", "transformers": "5"}
               for corpus in CORPORA
               for part, model, label, kept in (*(("main", m, text, "Q4_1") for m, text in MODELS.items()),
                                                ("quantized", "stories15m", "stories15M", "float32"),
                                                ("quantized", "stories15m-q4_0", "stories15M Q4_0", "Q4_0"))
              ]  # fmt: skip
    rows = [{"part": "main", "corpus": c, "model": m, "layer_type": "all", "window": window, "measure": measure,
             "heads": 8, "mean": (means or {}).get((m, measure), 0.5), "se": 0.01, "se_heads": 0.01}
            for c, m in places for window in (256, 2048) for measure in MEASURES]  # fmt: skip
    heads = [{"part": e["part"], "corpus": e["corpus"], "model": e["model"], "layer": layer, "head": head,
              "kv_head": head, "layer_type": "all", "window": 2048, "r_q": 0.5 + 0.1 * head, "r_q_se": 0.01,
              "r_k": 0.2 * head, "r_k_se": 0.01, "r_q_rope": 0.4 + 0.1 * head, "r_k_rope": 0.1 * head}
             for e in entries for layer in range(2) for head in range(4)]  # fmt: skip
    errors = {"se": 0.01, "freedom": 15, "se_heads": 0.01, "freedom_heads": 7}
    changed = changes or {}
    moves = [{"part": "main", "corpus": one, "what": "text", "from": one, "to": two, "model": m, "layer_type": "all",
              "measure": measure, "change": changed.get(("text", m, measure, one, two), 0.0), **errors}
             for one, two in combinations(CORPORA, 2) for m in MODELS for measure in OF_TEXT]  # fmt: skip
    moves += [{"part": "main", "corpus": c, "what": "window", "from": 256, "to": 2048, "model": m, "layer_type": "all",
               "measure": measure, "change": changed.get(("window", m, measure), 0.0), **errors}
              for c, m in places for measure in ("r_q", "r_k")]  # fmt: skip
    moves += [{**row, "part": "quantized"} for row in moves if row["what"] == "text" and row["model"] == "stories15m"]
    moves += [{"part": "quantized", "corpus": c, "what": "weights", "from": "stories15m", "to": "stories15m-q4_0",
               "model": "stories15m-q4_0", "layer_type": "all", "measure": measure,
               "change": changed.get(("weights", measure), 0.0), **errors}
              for c in CORPORA for measure in ("r_q", "r_k")]  # fmt: skip
    claims = [{"part": e["part"], "corpus": e["corpus"], "claim": claim, "model": e["model"],
               "verdict": (verdicts or {}).get((claim, e["corpus"]), "not significant"), "value": 0.0}
              for e in entries for claim in ("early_queries", "even_queries")]  # fmt: skip
    edits = [{"part": "main", "corpus": c, "model": m, "edit": edit, "group": "top 10 by r_q, dose-matched",
              "heads": 10, "documents": 8, "draws": 8, "tokens": 192, "chosen": 0.2, "controls": 0.2 - excess,
              "excess": excess, "excess_se": 0.04, "low": excess - 0.1, "high": excess + 0.1, "chosen_dose": 10.0,
              "controls_dose": dose}
             for (c, m, edit), (excess, dose) in (ablation or {}).items()]  # fmt: skip
    times = [{"part": "main", "corpus": "code", "command": "run", "wall": 7200, "processor": 3600, "cores": 2}]
    tables = {"entries": entries, "means": rows, "heads": heads, "changes": moves, "claims": claims, "times": times}
    for name, found in {**tables, **({"ablation": edits} if edits else {})}.items():
        pd.DataFrame(found).to_csv(folder / f"{name}.csv", index=False)
    return Tables(folder)


# --- numbers ------------------------------------------------------------------------------------------


def test_a_number_is_significant_under_both_errors_or_not_at_all():
    assert (number(0.3).sign, number(-0.3).sign, number(0.02).sign) == (1, -1, 0)
    assert number(0.3, heads=0.2).sign == 0 and number(0.3, documents=0.2).sign == 0
    assert number(0.03, freedom=2.0).sign == 0 and number(0.03, freedom=15.0).sign == 1  # Student's t
    assert Number(5.0).sign == 0 and str(Number()) == "–"


def test_a_number_exceeds_another_however_the_two_depend_on_each_other():
    assert number(1.05).exceeds(number(1.0)) and not number(1.04).exceeds(number(1.0))  # 2.1 x 0.02
    assert number(1.05).minus(number(1.0)).sign == 1 and number(1.0).half.value == 0.5


def test_numbers_show_both_errors_with_as_many_digits_as_they_allow():
    assert str(number(0.6349, 0.011, 0.003)) == "0.635 ± 0.011 (0.003)"
    assert str(number(-0.0012, 0.04, 0.02)) == "0.00 ± 0.04 (0.02)"
    assert number(0.41234, 0.02, 0.03).percent == "41 ± 2 (3)%"
    assert str(Number(0.5, Error(0.01, 15))) == "0.500 ± 0.010"  # no error over heads is known


# --- findings -----------------------------------------------------------------------------------------


def test_what_the_window_does_is_told_by_model_and_only_where_it_is_significant(tmp_path):
    found = study(tmp_path, changes={("window", "b", "r_q"): -0.3})
    lead, rest, text = findings.windows(found)
    assert lead.startswith("**r depends on the window.**")
    assert "to 2,048 tokens, mean r_q falls in B-Instruct; does not change significantly in stories15M." in rest
    assert "| B-Instruct | 256 → 2,048 | r_q | **−0.300 ± 0.010 (0.010)** |" in text
    assert findings.windows(study(tmp_path))[0] == "**No change between windows is significant.**"


def test_predictions_are_judged_by_their_excess(tmp_path):
    """In B the excess of r_k is as large as the prediction; in the other model it is small."""
    small = {(m, f"{r}_excess"): 0.01 for m in MODELS for r in ("r_q", "r_k")}
    lead, rest, text = findings.prediction(study(tmp_path, means={**small, ("b", "r_k_excess"): -0.5}))
    assert lead == "**RoPE and the average query and key predict most of r_q, but not always r_k.**"
    assert "in 6 of 6 cases and above half in 0; for mean r_k in 3 and 3 (B-Instruct)." in rest
    assert "98% (stories15M on speeches) to 98% (stories15M on speeches)" in rest and "1.00 to 1.00 (r_q)" in rest
    assert "| B-Instruct | code | 0.500 ± 0.010 (0.010) | 0.010 ± 0.010 (0.010) |" in text
    assert findings.prediction(study(tmp_path, means=small))[0].endswith("predict most of r.**")


def test_a_component_is_the_largest_only_at_both_bucket_widths(tmp_path):
    """B's position share leads at 16 buckets, its query share at one."""
    means = {("stories15m", f"{end}position_share"): 0.8 for end in ("", "line_")}
    means |= {("b", "position_share"): 0.8, ("b", "line_query_share"): 0.8}
    lead, rest, _ = findings.components(study(tmp_path, means=means))
    assert lead == "**No component of scores is significantly the largest in most cases.**"
    assert "the largest component is position in stories15M. Not decided: B-Instruct." in rest
    means |= {("b", f"{end}position_share"): 0.9 for end in ("", "line_")}
    assert findings.components(study(tmp_path, means=means))[0].startswith("**Position is the largest component of sc")
    means |= {("b", f"{end}query_share"): 0.9 for end in ("", "line_")}
    assert findings.components(study(tmp_path, means=means))[0].endswith("significantly the largest in most cases.**")
    assert findings.largest({name: number(0.25) for name in SHARES}) is None


def test_ablations_are_told_by_their_intervals_and_corrected_for_their_number(tmp_path):
    """Of six comparisons one is 2.5 intervals from 0, and one 1.1, which is lost among six (Holm)."""
    of = {(c, m, "kernel"): (0.02, 10.0) for c in CORPORA for m in MODELS}
    of |= {("speeches", "b", "kernel"): (0.25, 10.0), ("code", "b", "kernel"): (-0.11, 20.0)}
    lead, rest, text = findings_ablation.ablation(study(tmp_path, ablation=of))
    assert "more than editing others of the same dose in 1 of 6 comparisons, and less in 1.**" in lead
    assert "more than controls in 1 of 6 cases (B-Instruct (speeches)) and less in 1 (B-Instruct (code))" in rest
    assert "Holm), 1 of these 2 hold. The largest difference is 0.25 ± 0.04 nats" in rest
    assert "| **0.25 ± 0.04**† (0.20; 1.00) | **−0.11 ± 0.04** (0.20; 2.00) |" in text
    assert "Doses differ by more than 20% in B-Instruct (code)" in text
    most = {(c, m, "zero"): (-0.2, 10.0) for c in CORPORA for m in MODELS}
    assert "cost less than others" in findings_ablation.ablation(study(tmp_path, ablation=most))[0]
    (tmp_path / "ablation.csv").unlink()
    assert findings_ablation.ablation(Tables(tmp_path))[0] == "**Not measured.**"


def test_p_values_of_ablations_have_the_freedom_of_their_intervals():
    for freedom in (2.0, 5.3, 60.0):
        reach = 0.1 * stats.t.ppf(0.975, freedom)
        row = pd.Series({"excess": 0.3, "excess_se": 0.1, "high": 0.3 + reach})
        assert findings_ablation.p_value(row) == pytest.approx(2 * stats.t.sf(3.0, freedom), rel=1e-6)
    assert findings_ablation.holm([0.01, 0.04, float("nan"), 0.024]) == [True, True, False, True]
    assert findings_ablation.holm([0.01, 0.04, float("nan"), 0.026]) == [True, False, False, False]


def test_texts_and_rounding_are_compared_with_each_other(tmp_path):
    changes = {("text", "stories15m", "r_q", "speeches", "code"): 0.2, ("weights", "r_q"): 0.05}
    lead, rest, text = findings.texts(study(tmp_path, changes=changes))
    assert lead == "**Some measures depend on the text.**"
    assert "1 of 10 between speeches and code, 0 of 10 between speeches and the novel and 0 of 10" in rest
    assert "mean r by at most 0.050 ± 0.010 (0.010), another text by up to 0.200 ± 0.010 (0.010); the" in rest
    assert "difference is significant. 0 of 6 verdicts" in rest
    assert "| stories15M | S–C | none |" in text and "| Q4_0 | 0.000 | 0.000 | **0.050" in text
    assert "which is larger is not decided" in findings.texts(study(tmp_path, changes={}))[1]


def test_claims_are_marked_by_model_and_corpus_and_counted_by_claim(tmp_path):
    """The first holds on one corpus and not on the other, the second everywhere."""
    verdicts = {("early_queries", "speeches"): "supported", ("early_queries", "code"): "contradicted",
                **{("even_queries", corpus): "supported" for corpus in CORPORA}}  # fmt: skip
    said = findings.claims(study(tmp_path, verdicts=verdicts))
    assert "| `early_queries`: mean r_q is larger in early than in late layers | + − 0 | + − 0 |" in said
    assert "1 of 2 is supported wherever decided, 0 contradicted, and 1 supported in one case" in said


def test_the_whole_page_is_written_from_tables_alone(tmp_path):
    of = {(c, m, "zero"): (0.02, 10.0) for c in CORPORA for m in MODELS}
    text = findings.page(study(tmp_path, ablation=of))
    assert text.count("## ") == 9 and text.count("](images/findings_") == 5
    assert "24 documents of up to 2,048 tokens per corpus" in text and "It took 1.0 hours of processor time" in text
    assert "B-Instruct (Q4_1) are quantized" in text and "nan" not in text.replace("finan", "")


@pytest.mark.skipif(not (KEPT / "means.csv").exists(), reason="the study has not been run")
def test_the_page_is_what_the_kept_tables_say_and_they_are_small():
    assert (ROOT / "docs/findings.md").read_text(encoding="utf-8") == findings.page(Tables(KEPT))
    assert sum(path.stat().st_size for path in KEPT.iterdir()) < 2_000_000


# --- tables -------------------------------------------------------------------------------------------


def test_differences_have_errors_over_documents_and_over_key_heads():
    """Two KV heads of two query heads each; three would be needed for an error, so a third is added."""
    moved, keys = np.array([0.1, 0.1, 0.3, 0.3, 0.2, 0.2]), np.array([0, 0, 1, 1, 2, 2])
    found = study_tables._change(moved, keys, Error(0.02, 15))
    assert found["change"] == pytest.approx(0.2) and found["freedom_heads"] == 2
    assert found["se_heads"] == pytest.approx(np.std([0.1, 0.3, 0.2], ddof=1) / np.sqrt(3))
    assert (found["se"], found["freedom"]) == (0.02, 15)


def test_differences_between_corpora_are_of_the_same_heads(tmp_path):
    """Heads are matched by layer and head, whatever their order; errors over documents are independent."""
    study(tmp_path)
    tables = {name: pd.read_csv(tmp_path / f"{name}.csv") for name in ("entries", "means", "heads")}
    tables["heads"] = tables["heads"].assign(position_share=0.5, late_advantage=1.0, ap=0.6)
    code = tables["heads"]["corpus"] == "code"
    tables["heads"].loc[code, "r_q"] += 0.1 + 0.01 * tables["heads"]["head"]
    tables["heads"] = tables["heads"].sample(frac=1, random_state=0)
    tables = {name: table[table["part"] == "main"] for name, table in tables.items()}
    found = study_tables.between_corpora(tables).query("model == 'b' and measure == 'r_q'")
    changes = found.set_index(["from", "to"])["change"]
    assert abs(changes["speeches", "code"] if ("speeches", "code") in changes else changes["code", "speeches"]) \
        == pytest.approx(0.115)  # fmt: skip
    assert found["se"].to_numpy() == pytest.approx(np.sqrt(2) * 0.01)


def test_what_commands_took_is_kept_by_command(tmp_path):
    (tmp_path / study_tables.TIMES).write_text("run,9000,3600,2\nablate,10,900,2\nablate,10,900,2\n")
    took = study_tables.times(tmp_path)
    assert took.to_dict("list") == {"command": ["run", "ablate"], "wall": [9000, 20], "processor": [3600, 1800],
                                    "cores": [2, 2]}  # fmt: skip


# --- what is run --------------------------------------------------------------------------------------


def test_a_novel_is_cut_between_chapters_into_parts_of_about_equal_length():
    """Twelve characters in three parts: the middle of `bbbb` lies at 5 of 12, that of `ccc` at 8.5, of `d` at 10.5."""
    assert study_texts.in_parts(["aaa", "bbbb", "ccc", "d", "e"], 3) == ["aaa", "bbbb", "ccc\n\nd\n\ne"]


def test_models_are_edited_if_all_their_heads_have_a_kernel():
    """Model b has a layer whose rotation is not known."""
    heads = pd.DataFrame({"model": ["a", "a", "b", "b", "c"], "prediction": [0, 1, 0, 2, 0]})
    assert real_study.editable(heads) == ["a", "c"]


def test_rounded_weights_are_those_of_the_quantized_file():
    """Q4_0 has 16 levels for each 32 numbers; embeddings keep eight bits; norms stay."""
    import torch

    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 64), "proj": torch.nn.Linear(64, 8, bias=False),
                                 "norm": torch.nn.LayerNorm(64)})  # fmt: skip
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    real_study.round_weights(model, "Q4_0")
    after = {name: weight.detach() for name, weight in model.named_parameters()}
    assert len(after["proj.weight"][0, :32].unique()) <= 16
    assert torch.equal(after["norm.weight"], before["norm.weight"])
    errors = {name: float((after[name] - before[name]).abs().max() / before[name].abs().max()) for name in after}
    assert 0 < errors["embed.weight"] < 0.01 < errors["proj.weight"] < 0.2


def test_llama2_tokenizers_merge_in_the_order_of_their_pieces():
    """Pieces by rank: `▁ab` comes before `bc`, so that `abc` is `▁ab` + `c` and not `▁a` + `bc`."""
    specials = [b"<unk>", b"\n<s>\n", b"\n</s>\n"] + [f"<0x{i:02X}>".encode() for i in range(256)]
    pieces = [b" a", b" ab", b"bc", b" ", b"a", b"b", b"c"]
    pieces += [f"filler{i}".encode() for i in range(32000 - len(specials) - len(pieces))]
    data = struct.pack("<i", 12) + b"".join(struct.pack("<fi", 0.0, len(p)) + p for p in specials + pieces)
    made = real_study.llama2c_tokenizer(data)
    assert made.convert_ids_to_tokens(made("abc", add_special_tokens=False)["input_ids"]) == ["▁ab", "c"]
    ids = made("abc é", add_special_tokens=False)["input_ids"]
    assert made.decode(ids) == "abc é"  # é is two bytes
    with pytest.raises(SystemExit, match="not 32000"):
        real_study.llama2c_tokenizer(data[:1000])
