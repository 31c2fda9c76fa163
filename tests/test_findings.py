"""The study of real models: findings claim what exceeds two errors and nothing else; its tokenizer reads and writes."""

import struct
import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import findings
import findings_effects
import findings_position
import rope_alone
import study as real_study
import study_tables
import study_texts
from findings_numbers import Number, Place, Tables

from qkscope.lenses.claims.account import CLAIMS
from qkscope.lenses.position.table import REPLICATES
from qkscope.lenses.rope.table import TABLE as ROPE
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.layout import capture_layout
from rope_world import HALVES, capture, heads

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks/results/study"
MODELS = {"a": "A", "b": "B", "c": "C"}


def tables(folder, corpora=("speeches", "code"), models=MODELS, **rows):
    """Tables as the study keeps them; `rows` are lists of dictionaries by table."""
    facts = {"family": "", "parameters": 1e6, "window": 1024, "layers": 2, "heads": 8, "documents": 8, "seconds": 60.0,
             "weights_kept": "float32", "dtype": "float32", "weights_sha256": "a" * 64, "documents_sha256": "b" * 64,
             "qkscope": "0", "torch": "0", "transformers": "0"}  # fmt: skip
    entries = [{"corpus": c, "model": m, "label": text, **facts} for c in corpora for m, text in models.items()]
    for name, found in {"entries": entries, **rows}.items():
        pd.DataFrame(found).to_csv(folder / f"{name}.csv", index=False)
    return Tables(folder)


def test_what_is_within_two_errors_or_has_none_proves_nothing():
    assert (Number(0.3, 0.1).sign, Number(-0.3, 0.1).sign, Number(0.19, 0.1).sign) == (1, -1, 0)
    assert Number(5.0).sign == 0
    assert Number(1.3, 0.1).minus(Number(1.0, 0.1)).sign == 1
    assert Number(1.25, 0.1).minus(Number(1.0, 0.1)).sign == 0  # 0.25 is below 2 x 0.141
    assert (str(Number()), Number(0.123, 0.01).percent) == ("–", "12.3 ± 1.0 %")


def test_corpora_differ_where_numbers_do(tmp_path):
    """Between speeches and code r_q is 0.10 apart with an error of 0.014, r_k 0.10 with 0.14; the novel has no r_k."""
    rows = [
        {"corpus": corpus, "model": "a", "r_q": r_q, "r_q_se": 0.01, "r_k": r_k, "r_k_se": 0.1}
        for corpus, r_q, r_k in (("speeches", 0.5, 0.5), ("code", 0.6, 0.6), ("novel", 0.51, None))
    ]
    corpora = ("speeches", "code", "novel")
    (said, shown) = findings_effects.texts(tables(tmp_path, corpora, models={"a": "A"}, signal=rows)).text
    assert "1 of 2 between speeches and code, 0 of 1 between speeches and the novel and 1 of 1 between" in said
    assert said.endswith("The surest difference is in r_q of A, 0.500 ± 0.010 on speeches and 0.600 ± 0.010 on code.")
    one, other = "speeches and code", "code and the novel"
    assert f"| A | r_q | 0.500 ± 0.010 | 0.600 ± 0.010 | 0.510 ± 0.010 | {one}; {other} |" in shown
    assert "| A | r_k | 0.50 ± 0.10 | 0.60 ± 0.10 | – | none |" in shown


def test_a_novel_is_cut_between_chapters_into_parts_of_about_equal_length():
    """Twelve characters in three parts: the middle of `bbbb` lies at 5 of 12, that of `ccc` at 8.5, of `d` at 10.5."""
    assert study_texts.in_parts(["aaa", "bbbb", "ccc", "d", "e"], 3) == ["aaa", "bbbb", "ccc\n\nd\n\ne"]


def test_what_commands_took_is_told_in_hours_of_processor_time(tmp_path):
    (tmp_path / study_tables.TIMES).write_text("run,9000,3600\nablate,10,900\nablate,10,900\namong,5,30\n")
    took = study_tables.times(tmp_path / "results")
    assert took.to_dict("list") == {"command": ["run", "ablate", "among"], "wall": [9000, 20, 5],
                                    "processor": [3600, 1800, 30]}  # fmt: skip
    text = findings.made(tables(tmp_path, times=[{"corpus": "code", **row} for row in took.to_dict("records")]))
    assert "It took 1.5 hours of processor time: `run` 1.0 and `ablate` 0.5. Tables" in text


def test_a_window_is_said_to_move_r_only_beyond_two_errors(tmp_path):
    rows = [
        {"corpus": "speeches", "model": model, "window": window, "enough": 1, "r_q": r, "r_q_se": 0.01,
         "r_k": 0.0, "r_k_se": 0.1, "position_dominated": 0.0, "position_dominated_se": 0.0}
        for model, last in (("a", 0.8), ("b", 0.32)) for window, r in ((128, 0.3), (1024, last))
    ]  # fmt: skip
    part = findings_position.position(tables(tmp_path, ("speeches",), windows=rows))
    assert "in 1 of 2 cases, most in A on speeches: 0.300 ± 0.010 at 128" in part.short[0]
    assert "| B | 1,024 | 0.320 ± 0.010 |" in part.text[1]


def test_the_largest_part_of_scores_is_named_only_if_it_is_ahead(tmp_path):
    def row(model, **shares):
        errors = {f"{name}_se": 0.02 for name in (*shares, "late_advantage")}
        return {"corpus": "speeches", "model": model, "layer_kind": "all", "heads": 8, "late_wins": 1, "early_wins": 2,
                "late_advantage": 0.0, **shares, **errors}  # fmt: skip

    names = list(findings_position.SHARES)
    rows = [row("a", **dict(zip(names, (0.1, 0.1, 0.2, 0.6), strict=True))),
            row("b", **dict(zip(names, (0.1, 0.1, 0.41, 0.39), strict=True)))]  # fmt: skip
    found = tables(tmp_path, ("speeches",), {"a": "A", "b": "B"}, scores=rows)
    (short,) = findings_position.scores(found).short
    assert "is query in A on speeches; no part is ahead by more than two errors in B on speeches" in short


def test_ablations_are_told_by_their_intervals(tmp_path):
    def row(model, low, high):
        return {"corpus": "code", "model": model, "edit": "kernel", "group": "top 3 by r_q", "outcome": "all",
                "heads": 3, "documents": 6, "draws": 3, "chosen": 0.2, "controls": 0.1, "excess": 0.1,
                "excess_se": 0.02, "tokens": 192, "shared": 0.5, "low": low, "high": high, "exceeds": 3}  # fmt: skip

    found = tables(tmp_path, ("code",), ablation=[row("a", 0.05, 0.15), row("b", -0.1, 0.2)])
    alone = tables(tmp_path, ("code",), ablation=[row("a", 0.05, 0.15), {**row("b", 0.0, 0.0), "shared": 1.0}])
    assert "no others beside them: top 3 by r_q of B on code (3 heads)." in findings_effects.ablation(alone).text[-2]
    found = tables(tmp_path, ("code",), ablation=[row("a", 0.05, 0.15), row("b", -0.1, 0.2)])
    part = findings_effects.ablation(found)
    assert "1 of 2 groups cost more than as many random heads" in part.short[0]
    assert "0 cost less, 1 are not told apart (largest difference 0.10 ± 0.02" in part.short[0]
    assert part.text[-3] == "Under `kernel`, more than random heads: top 3 by r_q of A on code."
    assert part.text[-1] == (
        "No ablation was run of C on code. No category was edited of A on code, B on code and C on code."
    )


def test_claims_are_marked_by_model_and_corpus(tmp_path):
    name = CLAIMS[0].name
    rows = [{"corpus": corpus, "claim": name, "model": "a", "verdict": verdict, "value": 1.0, "value_se": 0.1}
            for corpus, verdict in (("speeches", "supported"), ("code", "contradicted"))]  # fmt: skip
    part = findings_effects.claims(tables(tmp_path, claims=rows))
    assert "| + − | · · | · · |" in part.text[1]
    assert "Of 2 tests over models and corpora, 1 support" in part.short[0]
    assert "1 claim is supported in one place and contradicted in another" in part.short[0]


def test_kinds_of_layers_have_rows_of_their_own(tmp_path):
    rows = [{"corpus": "speeches", "model": "a", "layer_kind": kind, "ap": value, "ap_se": 0.1}
            for kind, value in (("all", 1.0), ("rotary, full", 2.0), ("rotary, sliding 512", 3.0))]  # fmt: skip
    found = tables(tmp_path, ("speeches",), plasticity=rows)
    places = found.with_kinds(Place("speeches", "a", "A"), "plasticity")
    assert [place.name for place in places] == ["A", "A (full)", "A (sliding 512)"]
    assert [found.number("plasticity", "ap", place).value for place in places] == [1.0, 2.0, 3.0]


@pytest.mark.skipif(not (KEPT / "entries.csv").exists(), reason="the study has not been run")
def test_the_page_is_what_the_kept_tables_say_and_they_are_small():
    assert (ROOT / "docs/findings.md").read_text(encoding="utf-8") == findings.page(KEPT)
    assert sum(path.stat().st_size for path in KEPT.iterdir()) < 200_000


def test_predictions_at_a_window_are_those_of_the_heads_with_the_error_of_their_mean():
    """The mean over heads against the rows themselves, its error against the benchmark's that was there before."""
    q, k = heads(1, length=64)
    moments = capture(HALVES, q, k, layout=capture_layout(64, buckets=8, groups=5, common=16))
    (row,) = study_tables.at_window(moments, "m", 32)
    found = checkpoint_rows(moments, [ROPE, REPLICATES], RowSettings(own=32), model="m")
    predicted = found[ROPE.file]
    measured = found[REPLICATES.file].query("window == 32")["r_q"]
    assert row["r_q"] == pytest.approx(measured.mean())
    assert row["r_q_rope"] == pytest.approx(predicted["r_q_rope"].mean())
    assert row["r_q_excess"] == pytest.approx(measured.mean() - predicted["r_q_rope"].mean())
    for name in ("r_q_rope", "r_q_excess", "r_k_excess"):
        assert row[f"{name}_se"] == pytest.approx(rope_alone.mean_error(found["layer_means.csv"], name))
    assert (row["layer_kind"], row["heads"], row["unpredicted"], row["why"]) == ("all", len(predicted), 0, "")


def test_heads_to_edit_are_the_strongest_and_the_first_category_that_leaves_others(tmp_path):
    """Model b has a layer whose rotation is not known, with a head of the category; all heads of c are alike."""
    categories = ["position-dominated"] * 30 + ["Q-positional"] + ["content-focused"] * 5 + ["mixed"] * 4
    rows = [pd.DataFrame({"model": name, "layer": [0] * 33 + [1] * 7, "head": [*range(33), *range(7)],
                          "category": categories}) for name in "ab"]  # fmt: skip
    rows.append(pd.DataFrame({"model": "c", "layer": 0, "head": range(9), "category": "mixed"}))
    (tmp_path / "tables").mkdir()
    pd.concat(rows).to_csv(tmp_path / "tables/heads.csv", index=False)
    basis = {("a", 0): 0, ("a", 1): 0, ("b", 0): 0, ("b", 1): 2, ("c", 0): 0}
    told = [{"model": model, "layer": layer, "prediction": code} for (model, layer), code in basis.items()]
    pd.DataFrame(told).to_csv(tmp_path / "rope.csv", index=False)
    top = ["--top", "10", "--by", "r_q"]
    assert real_study.choices(tmp_path, ["a", "b", "c"]) == [
        [*top, "--checkpoint", "a", "--checkpoint", "c"],
        [*top, "--heads", *(f"L0H{head}" for head in range(33)), "--checkpoint", "b"],
        ["--heads", "content-focused", "--checkpoint", "a"],
    ]


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
