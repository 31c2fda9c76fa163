"""The study of real models: findings claim what exceeds two errors and nothing else; its tokenizer reads and writes."""

import struct
import sys
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import findings
import findings_ablation
import findings_claims
import findings_effects
import findings_position
import findings_rope
import rope_alone
import study as real_study
import study_tables
import study_texts
from findings_numbers import Number, Place, Tables

from qkscope.lenses.draws import drawn_correlations, replicated
from qkscope.lenses.position import LEADING
from qkscope.lenses.rope.table import TABLE as ROPE
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.layout import capture_layout
from rope_world import HALVES, capture, heads
from written import put

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


def test_claims_of_older_tables_are_judged_by_both_errors(tmp_path):
    """Eight documents and two layers: Student's t is 2.36 and 12.7. Signs were not tested against chance then."""
    rows = [{"corpus": "code", "claim": claim, "model": "a", "verdict": "supported", "value": value, "value_se": 0.1,
             "value_se_heads": heads, "errors": "documents", "why": ""}
            for claim, value, heads in (("early_queries", 1.0, 0.01), ("early_keys", 1.0, 0.1),
                                        ("sign_leans", 1.0, 0.0), ("early_bias", -1.0, 0.01),
                                        ("early_drift", 0.23, 0.01),
                                        ("keys_vary", 1.0, None))]  # fmt: skip
    found = findings_claims.judged(tables(tmp_path, ("code",), {"a": "A"}, claims=rows)).set_index("claim")["verdict"]
    assert found.to_dict() == {"early_queries": "supported", "early_keys": "not significant",
                               "early_bias": "contradicted", "early_drift": "not significant",
                               "keys_vary": "undecided"}  # fmt: skip


def test_the_groups_of_a_case_decide_what_is_significant(tmp_path):
    """2.3 errors are significant with 16 groups, not with 8."""
    rows = [{"corpus": "code", "model": "a", "r_q": 0.23, "r_q_se": 0.1}]
    place = Place("code", "a", "A")
    assert tables(tmp_path, ("code",), {"a": "A"}, signal=rows).number("signal", "r_q", place).sign == 0
    entries = pd.read_csv(tmp_path / "entries.csv").assign(documents=16)
    entries.to_csv(tmp_path / "entries.csv", index=False)
    assert Tables(tmp_path).number("signal", "r_q", place).sign == 1


def test_what_is_not_significant_or_has_no_error_proves_nothing():
    assert (Number(0.3, 0.1).sign, Number(-0.3, 0.1).sign, Number(0.19, 0.1).sign) == (1, -1, 0)
    assert Number(5.0).sign == 0
    assert Number(1.3, 0.1).minus(Number(1.0, 0.1)).sign == 1
    assert Number(1.25, 0.1).minus(Number(1.0, 0.1)).sign == 0  # 0.25 is below 2 x 0.141
    assert (str(Number()), Number(0.123, 0.01).percent) == ("–", "12.3 ± 1.0%")


def test_corpora_differ_where_numbers_do(tmp_path):
    """Between speeches and code r_q is 0.10 apart with an error of 0.014, r_k 0.10 with 0.14; the novel has no r_k."""
    rows = [
        {"corpus": corpus, "model": "a", "r_q": r_q, "r_q_se": 0.01, "r_k": r_k, "r_k_se": 0.1}
        for corpus, r_q, r_k in (("speeches", 0.5, 0.5), ("code", 0.6, 0.6), ("novel", 0.51, None))
    ]
    corpora = ("speeches", "code", "novel")
    part = findings_effects.texts(tables(tmp_path, corpora, models={"a": "A"}, signal=rows))
    (short,), (_, shown) = part.short, part.text
    assert short.startswith("**Few measures depend on the text.**")
    assert "1 of 2 between speeches and code, 0 of 1 between speeches and the novel and 1 of 1 between" in short
    assert short.endswith(
        "Largest relative to its error: r_q of A, 0.500 ± 0.010 on speeches and 0.600 ± 0.010 on code."
    )
    assert "| model | r_q | r_k |" in shown
    assert "| A | S–C, C–N | none |" in shown


def test_a_novel_is_cut_between_chapters_into_parts_of_about_equal_length():
    """Twelve characters in three parts: the middle of `bbbb` lies at 5 of 12, that of `ccc` at 8.5, of `d` at 10.5."""
    assert study_texts.in_parts(["aaa", "bbbb", "ccc", "d", "e"], 3) == ["aaa", "bbbb", "ccc\n\nd\n\ne"]


def test_what_commands_took_is_told_in_hours_with_cores_where_they_were_noted(tmp_path):
    (tmp_path / study_tables.TIMES).write_text("run,9000,3600\nablate,10,900,2\nablate,10,900,2\namong,5,30,2\n")
    took = study_tables.times(tmp_path / "results").fillna(0)
    assert took.to_dict("list") == {"command": ["run", "ablate", "among"], "wall": [9000, 20, 5],
                                    "processor": [3600, 1800, 30], "cores": [0, 2, 2]}  # fmt: skip
    rows = [{"corpus": "code", **row} for row in took.to_dict("records")]
    text = findings.made(tables(tmp_path, times=rows))
    assert "It took 2.5 hours on 2 cores, 1.5 of processor time: `run` 1.0 and `ablate` 0.5. All" in text
    without = findings.made(tables(tmp_path, times=[{k: v for k, v in row.items() if k != "cores"} for row in rows]))
    assert "It took 2.5 hours, 1.5 of processor time" in without


def test_a_window_is_said_to_move_r_only_beyond_two_errors(tmp_path):
    rows = [
        {"corpus": "speeches", "model": model, "window": window, "enough": 1, "r_q": r, "r_q_se": 0.01,
         "r_k": 0.0, "r_k_se": 0.1, "position_dominated": 0.0, "position_dominated_se": 0.0}
        for model, last in (("a", 0.8), ("b", 0.32), ("c", 0.1)) for window, r in ((128, 0.3), (1024, last))
    ]  # fmt: skip
    part = findings_position.position(tables(tmp_path, ("speeches",), windows=rows))
    assert "rises in A; falls in C; does not change significantly in B." in part.short[0]
    assert "The largest change is in A on speeches: 0.300 ± 0.010 at 128" in part.short[0]
    assert "| B | 1,024 | 0.320 ± 0.010 |" in part.text[1]


def test_errors_that_hold_covariances_fixed_are_said_to(tmp_path):
    rows = [
        {"corpus": "speeches", "model": "a", "window": window, "enough": 1, "r_q": 0.3, "r_q_se": 0.01, "r_k": 0.0,
         "r_k_se": 0.1, "position_dominated": 0.0, "position_dominated_se": 0.0, "errors": errors}
        for window, errors in ((128, "jackknife"), (512, "jackknife, covariances fixed"), (1024, "jackknife"))
    ]  # fmt: skip
    tables(tmp_path, ("speeches",), {"a": "A"}, windows=rows)
    entries = pd.read_csv(tmp_path / "entries.csv")
    entries.assign(common_window=128).to_csv(tmp_path / "entries.csv", index=False)
    said = findings_position.position(Tables(tmp_path)).text[0]
    assert "Errors at windows other than the longest and 128 tokens keep covariances, and so PC0, constant" in said
    exact = [{**row, "errors": "jackknife"} for row in rows]
    assert (
        "constant" not in findings_position.position(tables(tmp_path, ("speeches",), {"a": "A"}, windows=exact)).text[0]
    )


def test_what_the_window_moves_is_said_of_each_kind_of_layer(tmp_path):
    """All heads together stay where they are, because the two kinds go opposite ways."""
    lasts = {"all": 0.3, "rotary, full": 0.7, "rotary, sliding 512": 0.1}
    rows = [
        {"corpus": "speeches", "model": "a", "layer_kind": kind, "window": window, "enough": 1, "r_q": r,
         "r_q_se": 0.01, "r_k": 0.0, "r_k_se": 0.1, "position_dominated": 0.0, "position_dominated_se": 0.0}
        for kind, last in lasts.items() for window, r in ((128, 0.3), (1024, last))
    ]  # fmt: skip
    part = findings_position.position(tables(tmp_path, ("speeches",), {"a": "A"}, windows=rows))
    assert "rises in A (full); falls in A (sliding 512)." in part.short[0]
    assert "| A (full) | 1,024 | 0.700 ± 0.010 |" in part.text[1]
    assert "| A | 1,024 | 0.300 ± 0.010 |" in part.text[1]


def test_score_components_of_version_0_2_are_not_shown(tmp_path):
    names = list(findings_position.SHARES)
    rows = [{"corpus": "speeches", "model": "a", "layer_kind": kind, "heads": 8, "late_wins": 1, "early_wins": 2,
             "late_advantage": 0.0, "late_advantage_se": 0.1, **dict.fromkeys(names, share),
             **{f"{name}_se": 0.01 for name in names}}
            for kind, share in (("all", 0.25), ("rotary, full", 0.35), ("rotary, sliding 4", 0.15))]  # fmt: skip
    old = findings_position.scores(tables(tmp_path, ("speeches",), {"a": "A"}, scores=rows))
    assert not old.short and "which score component is largest" in old.open[0]
    assert "| speeches | A (sliding 4) | 0.00 ± 0.10 | 1 / 2 of 8 |" in old.text[1]
    assert "no components are ranked" in old.text[2]
    entries = pd.read_csv(tmp_path / "entries.csv").assign(qkscope="0.3.0")
    entries.to_csv(tmp_path / "entries.csv", index=False)
    new = findings_position.scores(Tables(tmp_path))
    assert not new.open
    assert "| speeches | A (sliding 4) | 15.0 ± 1.0% |" in new.text[1]


def rope_row(model, window, q, k, corr, corpus="speeches"):
    """Measured and predicted r_q and r_k, each with an error of 0.01."""
    row = {"corpus": corpus, "model": model, "window": window, "layer_kind": "all", "heads": 8, "unpredicted": 0,
           "why": "", "dominated": 0.0, "dominated_rope": 0.0, "r_q_corr": corr, "r_k_corr": corr}  # fmt: skip
    for name, (measured, predicted) in (("r_q", q), ("r_k", k)):
        row |= {name: measured, f"{name}_rope": predicted, f"{name}_excess": measured - predicted}
        row |= {f"{name}{part}_se": 0.01 for part in ("", "_rope", "_excess")}
    return row


def test_predictions_are_judged_at_both_ends_and_head_by_head(tmp_path):
    """A: a fifth of r_q at 128 tokens, nine tenths at 1,024; keys are off at 128 only. B has no prediction at 64."""
    rows = [rope_row("a", 128, (0.5, 0.1), (-0.2, 0.2), 0.9), rope_row("a", 1024, (0.5, 0.45), (0.3, 0.31), 0.9),
            rope_row("b", 128, (0.5, 0.5), (0.2, 0.2), -0.3)]  # fmt: skip
    rows.append({**rope_row("b", 64, (0, 0), (0, 0), 0), "heads": 0})
    part = findings_rope.rope(tables(tmp_path, ("speeches",), rope=rows))
    (short,) = part.short
    assert short.startswith("**The rotated-mean prediction explains most of r_q at the longest window.** It gives more")
    assert "in 2 of 2 cases at the longest window (90% in A on speeches to 100% in B on speeches)" in short
    assert "and in 1 at the shortest." in short
    assert "For keys it fails (off by more than half of the prediction) at the shortest window in A." in short
    assert "−0.30 to 0.90 (r_q), below 0.5 in B" in short
    assert "| A, 8 heads | 128 | 0.400 ± 0.010 | −0.400 ± 0.010 | 0.90, 0.90 |" in part.text[1]
    assert "| B, 8 heads | 128 |" in part.text[1] and "| 64 |" not in part.text[1]
    assert "| A | − | − |" in part.text[2] and "| B | · | · |" in part.text[2]
    kinds = [{**rope_row("c", 1024, (0.5, 0.5), (k, 0.2), 0.9), "layer_kind": kind}
             for kind, k in (("all", 0.2), ("rotary, full", 0.0), ("rotary, sliding 4", 0.22))]  # fmt: skip
    apart = findings_rope.rope(tables(tmp_path, ("speeches",), rope=kinds)).short[0]
    assert "at the longest window in C (full) and at" in apart
    fine = tables(tmp_path, ("speeches",), rope=rows[1:2])
    assert "For keys it is never off by more than half of the prediction." in findings_rope.rope(fine).short[0]


def edited(model, excess, reach, **changes):
    """Chosen heads against random ones: a difference with an error of a quarter of what its interval reaches."""
    return {"corpus": "code", "model": model, "edit": "kernel", "group": "top 3 by r_q", "outcome": "all",
            "heads": 3, "documents": 6, "draws": 3, "chosen": 0.2, "controls": 0.2 - excess, "excess": excess,
            "excess_se": reach / 2.5, "tokens": 192, "shared": 0.5, "low": excess - reach, "high": excess + reach,
            "exceeds": 3, **changes}  # fmt: skip


def test_ablations_are_told_by_their_intervals_and_corrected_for_their_number(tmp_path):
    """A's difference is 2 intervals from 0 and B's within; that of C, 1.1 intervals, is lost among three (Holm)."""
    rows = [edited("a", 0.8, 0.4), edited("b", 0.1, 0.2), edited("c", -0.22, 0.2)]
    part = findings_ablation.ablation(tables(tmp_path, ("code",), ablation=rows))
    assert (
        "**Under `kernel`, chosen heads cost more than random heads in 1 of 3 groups and less in 1**" in part.short[0]
    )
    assert "the largest difference is 0.80 ± 0.16 nats per token" in part.short[0]
    held = "After correction for 3 comparisons (Holm), 1 of these 2 hold (cost more: top 3 by r_q under `kernel` in A)."
    assert held in part.short[0]
    assert "Cost less than random heads: top 3 by r_q under `kernel` in C." in part.text[2]
    assert part.text[-1] == "No category was edited of A, B and C."
    assert "| A | top 3 by r_q | `kernel` | **0.80 ± 0.16** (3) |" in part.text[1]
    assert "| B | top 3 by r_q | `kernel` | 0.10 ± 0.08 (3) |" in part.text[1]


def test_p_values_of_ablations_have_the_freedom_of_their_intervals():
    for freedom in (2.0, 5.3, 60.0):
        reach = 0.1 * stats.t.ppf(0.975, freedom)
        row = {"excess": 0.3, "excess_se": 0.1, "high": 0.3 + reach}
        assert findings_ablation.p_value(row) == pytest.approx(2 * stats.t.sf(3.0, freedom), rel=1e-6)
    assert findings_ablation.holm([0.01, 0.04, float("nan"), 0.024]) == [True, True, False, True]
    assert findings_ablation.holm([0.01, 0.04, float("nan"), 0.026]) == [True, False, False, False]


def test_heads_that_are_compared_with_themselves_decide_nothing(tmp_path):
    rows = [edited("a", 0.8, 0.4, shared=0.6), edited("b", 0.8, 0.4, shared=1.0), edited("c", 0.1, 0.2)]
    part = findings_ablation.ablation(tables(tmp_path, ("code",), ablation=rows))
    assert "in 0 of 1 groups and less in 0" in part.short[0]
    assert "| A | top 3 by r_q | `kernel` | 0.80 ± 0.16 *n. d.* (3) |" in part.text[1] and "| B |" not in part.text[1]
    assert part.open == [
        "whether these heads matter more than random ones, which are mostly the same heads: top 3 by r_q under "
        "`kernel` in A"
    ]
    assert "all heads of their layers: top 3 by r_q under `kernel` in B." in part.text[4]


def test_what_edits_do_on_every_corpus_alike_is_named_and_where_they_lower_the_loss(tmp_path):
    """A costs less on both corpora, however many heads it was chosen among; B on one. Three quarters of C dominate."""
    of = [("a", "speeches", -0.5), ("a", "code", -0.5), ("b", "speeches", -0.5), ("b", "code", 0.5)]
    rows = [edited(model, excess, 0.2, corpus=corpus, before=7.0, chosen=excess / 10, chosen_se=0.01,
                   group="top 3 by r_q" + " of 5 heads" * (corpus == "code"))
            for model, corpus, excess in of]  # fmt: skip
    shares = [{"corpus": c, "model": "c", "position-dominated": 0.75} for c in ("speeches", "code")]
    part = findings_ablation.ablation(tables(tmp_path, ablation=rows, categories=shares))
    assert part.short[0].endswith("On every corpus alike: top 3 by r_q of A cost less under `kernel`.")
    assert "lower the loss in 3 of 4 comparisons, significantly in 3 (top 3" in part.text[3]
    assert "| A | top 3 by r_q | `kernel` | **−0.50 ± 0.08** (3) | **−0.50 ± 0.08** (3) |" in part.text[1]
    assert "Position-dominated heads of C were not edited: they are more than half of all heads." in part.text[-1]


def test_chance_is_the_level_whatever_the_groups_of_documents(tmp_path):
    """The threshold is Student's t with the groups' degrees of freedom: one comparison in twenty passes by chance."""
    rows = [{"corpus": corpus, "model": model, **dict.fromkeys(("r_q", "r_k"), 0.5), "r_q_se": 0.1, "r_k_se": 0.1}
            for corpus in ("speeches", "code") for model in MODELS]  # fmt: skip
    found = tables(tmp_path, signal=rows)
    assert "about 0 of 6 would be by chance." in findings_effects.texts(found).short[0]
    assert "eight groups of documents and keep the model constant. One comparison in 20" in findings.limits(found, 40)
    four = pd.read_csv(tmp_path / "entries.csv").assign(documents=4)
    four.to_csv(tmp_path / "entries.csv", index=False)
    assert "four groups of documents and keep the model constant. One comparison in 20" in findings.limits(
        Tables(tmp_path), 40
    )


def test_a_rise_of_plasticity_at_equal_distances_is_told(tmp_path):
    rows = [{"corpus": "speeches", "model": model, "layer_kind": "all", "ap_drop": 0.2, "ap_drop_se": 0.01,
             "ap_drop_matched": left, "ap_drop_matched_se": 0.01}
            for model, left in (("a", -0.05), ("b", 0.15))]  # fmt: skip
    said = findings_effects.mechanism(tables(tmp_path, ("speeches",), drops=rows)).short[0]
    assert "less than half of the drop remains in 1 of these" in said
    assert "it is significant in 1 of all cases, and plasticity rises in 1 (A)." in said


def test_what_models_are_is_what_the_run_noted(tmp_path):
    found = tables(tmp_path, ("novel",), models={"a": "A-Instruct"})
    rows = pd.read_csv(tmp_path / "entries.csv").assign(weights_kept="Q4_1", trained_context=4096)
    rows.to_csv(tmp_path / "entries.csv", index=False)
    page, limits = findings.ran(Tables(tmp_path)), findings.limits(Tables(tmp_path), 1)
    assert "| A-Instruct | 1 M | Q4_1 | 2 | 8 | 1,024 | 4,096 | novel 8 |" in page
    assert "Moby-Dick in eight parts" in page
    assert "A-Instruct (Q4_1) is quantized" in limits and "A-Instruct is instruction-tuned" in limits
    assert "A-Instruct (1,024 of 4,096)" in limits
    assert "quantized" not in findings.limits(found, 1)


@pytest.mark.parametrize(
    ("begin", "head", "limit"),
    [
        (["<s>", "<bos>", ""], "after the model's special token (`<s>` in A, `<bos>` in B and none in C). The longest",
         "It is a special token in A and B, the first token of the text in the others."),
        (["<s>"] * 3, "after the model's special token (`<s>` in A, B and C). The longest",
         "It is a special token in A, B and C."),
        ([""] * 3, "tokens read, without special tokens. The longest", "Texts begin without a special token"),
        (None, "cut to the tokens read. The longest", ""),
    ],
)  # fmt: skip
def test_how_texts_begin_is_what_the_run_noted(tmp_path, begin, head, limit):
    tables(tmp_path, ("novel",), models={"a": "A", "b": "B", "c": "C"})
    if begin is not None:
        rows = pd.read_csv(tmp_path / "entries.csv")
        rows.assign(texts_begin_with=begin).to_csv(tmp_path / "entries.csv", index=False)
    assert head in findings.ran(Tables(tmp_path))
    limits = findings.limits(Tables(tmp_path), 1)
    assert limit in limits
    assert "It is" in limits or "special token in" not in limit


def test_claims_are_marked_by_model_and_corpus_and_counted_by_claim(tmp_path):
    """The first holds on one corpus and not on the other, the second everywhere; one about training is left out."""
    rows = [{"corpus": corpus, "claim": name, "model": "a", "verdict": verdict, "value": 1.0, "value_se": 0.1,
             "value_se_heads": 0.1, "population": "all heads"}
            for name, verdicts in (("bias_of_dominated", ("supported", "contradicted")),
                                   ("early_queries", ("supported",) * 2),
                                   ("rope_structure", ("contradicted",) * 2))
            for corpus, verdict in zip(("speeches", "code"), verdicts, strict=True)]  # fmt: skip
    part = findings_claims.claims(tables(tmp_path, claims=rows))
    assert "| `bias_of_dominated`: " in part.text[1] and "| + − | · · | · · |" in part.text[1]
    assert "rope_structure" not in part.text[1]
    assert part.open == [
        "whether 1 of the 2 published claims that apply to finished models hold: 1 is supported in every case, "
        "0 contradicted in every case, and 1 supported in one case and contradicted in another"
    ]
    assert part.text[0].endswith("counts of them are no evidence.")


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
    """The mean over heads against the rows themselves; errors of r against draws of these heads, made by hand."""
    q, k = heads(1, length=64)
    moments = capture(HALVES, q, k, layout=capture_layout(64, buckets=8, groups=5, common=16))
    found = checkpoint_rows(moments, [ROPE, LEADING], RowSettings(own=32), model="m")
    predicted, replicates = found["heads"].query("window == 32"), found["replicates"]
    (row,) = study_tables.at_window(moments, "m", 32, replicates)
    here = replicates.query("window == 32")
    assert row["r_q"] == pytest.approx(here["r_q"].mean())
    assert row["r_q_rope"] == pytest.approx(predicted["r_q_rope"].mean())
    assert row["r_q_excess"] == pytest.approx(here["r_q"].mean() - predicted["r_q_rope"].mean())
    assert row["r_q_rope_se"] == pytest.approx(rope_alone.mean_error(found["layer_means"], "r_q_rope"))
    pairs = [(here[n].to_numpy(), replicated(here, n, [*range(5)])) for n in ("r_q", "r_k")]
    drawn = drawn_correlations(*pairs, [here["n_q"].sum() - here[f"n_q_without_{group}"].sum() for group in range(5)])
    for name, draws in zip(("r_q", "r_k"), drawn, strict=True):
        assert row[f"{name}_se"] == pytest.approx(draws.mean(axis=1).std())
        assert row[f"{name}_excess_se"] == pytest.approx(row[f"{name}_se"], rel=0.5)  # predictions hardly vary
    assert (row["layer_kind"], row["heads"], row["unpredicted"], row["why"]) == ("all", len(predicted), 0, "")


def test_losses_before_an_edit_come_with_the_chosen_heads_and_may_be_missing(tmp_path):
    rows = pd.DataFrame([{"corpus": "code", "model": "a", "edit": "zero", "group": "mixed", "outcome": "all"}])
    assert study_tables.with_losses({"code": tmp_path}, rows)["before"].isna().all()
    own = [{"model": "a", "edit": "zero", "unit": unit, "outcome": "all", "role": role, "group": "mixed",
            "before": before, "delta": 0.1, "delta_se": 0.02}
           for unit, role, before in (("mixed", "chosen", 3.5), ("mixed: control 1", "control", 9.0))]  # fmt: skip
    pd.DataFrame(own).to_csv(tmp_path / "ablation.csv", index=False)
    (found,) = study_tables.with_losses({"code": tmp_path}, rows).to_dict("records")
    assert (found["before"], found["chosen_se"]) == (3.5, 0.02)


def test_heads_to_edit_are_the_strongest_and_the_first_category_that_leaves_others(tmp_path):
    """Model b has a layer whose rotation is not known, with a head of the category; all heads of c are alike."""
    categories = ["position-dominated"] * 30 + ["Q-positional"] + ["content-focused"] * 5 + ["mixed"] * 4
    rows = [pd.DataFrame({"model": name, "layer": [0] * 33 + [1] * 7, "head": [*range(33), *range(7)],
                          "category": categories, "prediction": 0}) for name in "ab"]  # fmt: skip
    rows.append(pd.DataFrame({"model": "c", "layer": 0, "head": range(9), "category": "mixed", "prediction": 0}))
    heads = pd.concat(rows, ignore_index=True).assign(window=64, windows="own+common")
    heads.loc[(heads["model"] == "b") & (heads["layer"] == 1), "prediction"] = 2
    shorter = heads.assign(window=32, windows="doubling", category="Q-positional", prediction=None)
    put(tmp_path, "heads", pd.concat([heads, shorter]))
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


def test_of_tables_by_kind_of_layer_the_rows_over_all_heads_are_kept(tmp_path):
    (tmp_path / "tables").mkdir()
    rows = [("a", "all", 64, 0.5), ("a", "rotary", 64, 0.7), ("a", "NoPE", 64, 0.1), ("b", "all", 64, 0.4)]
    table = pd.DataFrame(rows, columns=["model", "layer_kind", "window", "r_q"])
    table.to_csv(tmp_path / "tables/window_dependence.csv", index=False)
    file = "tables/window_dependence.csv"
    assert study_tables.kept({"code": tmp_path}, file, ["model", "r_q"])["r_q"].tolist() == [0.5, 0.4]
    assert len(study_tables.kept({"code": tmp_path}, file, ["model", "layer_kind", "r_q"])) == len(rows)


def test_kept_means_are_those_over_own_contexts(tmp_path):
    (tmp_path / "tables").mkdir()
    rows = [
        ("a", 64, "own", "all", "r_q", 4, 0.5, 0.01),
        ("a", 64, "own", "rotary", "r_q", 3, 0.6, 0.02),
        ("a", 64, "own", "all", "r_k", 4, 0.25, 0.03),
        ("a", 32, "common", "all", "r_q", 4, 0.4, 0.04),
        ("a", 16, "doubling", "all", "r_q", 4, 0.3, 0.05),
        ("b", 32, "own+common", "all", "r_q", 2, 0.1, 0.06),
        ("b", 32, "own+common", "all", "r_k", 1, 0.2, None),  # of one head alone
    ]
    columns = ["model", "window", "windows", "layer_type", "measure", "heads", "mean", "se"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / study_tables.MEANS, index=False)
    wanted = ["model", "layer_kind", "window", "heads", "r_q", "r_q_se", "r_k", "r_k_se"]
    kept = study_tables.kept({"code": tmp_path}, study_tables.MEANS, wanted)
    expected = [
        ("code", "a", "all", 64, 4, 0.5, 0.01, 0.25, 0.03),
        ("code", "a", "rotary", 64, 3, 0.6, 0.02, None, None),
        ("code", "b", "all", 32, 2, 0.1, 0.06, 0.2, None),
    ]
    pd.testing.assert_frame_equal(kept, pd.DataFrame(expected, columns=["corpus", *wanted]))
