"""Several runs of one training: distributions side by side, by hand-computed numbers."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from qkscope.kinds import kind_of, kind_sentence
from qkscope.lenses.views import build_tables
from qkscope.results.read import load_results
from test_share import results as results
from test_watch import trained as trained

RUNS = {"s1-10": ("s1", 10), "s1-100": ("s1", 100), "s2-10": ("s2", 10), "s2-100": ("s2", 100), "s3-10": ("s3", 10)}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Two seeds with two steps, a third with one; four heads each, r_q as written."""
    folder, rng = tmp_path_factory.mktemp("seeds"), np.random.default_rng(0)
    rows, checkpoints = [], []
    for name, (run, step) in RUNS.items():
        level = {10: 0.1, 100: 0.6}[step] + {"s1": 0.0, "s2": 0.1, "s3": 0.2}[run]
        for head, offset in enumerate((-0.03, -0.01, 0.01, 0.03)):
            rows.append({"model": name, "layer": head // 2, "head": head % 2, "pc": 0, "explained_variance": 0.5,
                         "r_q": level + offset, "r_k": float(rng.uniform(-1, 1)), "window": 64})  # fmt: skip
        checkpoints.append({"name": name, "label": name, "run": run, "step": step, "context": 64})
    pd.DataFrame(rows).to_csv(folder / "qk.csv", index=False)
    told = {"kind": "seeds", "checkpoints": checkpoints, "study": {"title": "Seeds"}}
    (folder / "provenance.json").write_text(json.dumps(told))
    return build_tables(load_results(folder))


def test_means_by_run_and_spread_between_runs(seeds):
    table, across = seeds.own.table("runs"), seeds.own.table("runs_across")
    assert list(zip(table["run"], table["step"], strict=True)) == list(RUNS.values())
    np.testing.assert_allclose(table["r_q"], [0.1, 0.6, 0.2, 0.7, 0.3], atol=1e-12)
    np.testing.assert_allclose(table["r_q_std"], np.sqrt((2 * 0.03**2 + 2 * 0.01**2) / 3), atol=1e-12)
    assert across[["step", "runs"]].to_numpy().tolist() == [[10, 3], [100, 2]]
    np.testing.assert_allclose(across["r_q"], [0.2, 0.65], atol=1e-12)
    np.testing.assert_allclose(across["r_q_between"], [0.1, np.sqrt(0.005)], atol=1e-12)


@pytest.mark.slow
def test_a_study_of_one_run_has_no_such_table(results):
    assert build_tables(load_results(results)).own.find("runs") is None


def test_entries_of_several_runs_are_seeds():
    assert kind_of(["a", "b"]) == "seeds"
    assert kind_of(["a", "a"]) == kind_of([None, None]) == kind_of([]) == "checkpoints"
    assert "because they are of several runs" in kind_sentence("seeds", 2, stated=False)


def test_folders_of_several_runs_are_read_as_seeds(world, trained, tmp_path):
    from qkscope.run.plan import make_plan
    from qkscope.study.load import load_study

    shutil.copytree(trained / "checkpoint-5", tmp_path / "runs/a/checkpoint-5")
    shutil.copytree(trained / "checkpoint-20", tmp_path / "runs/b/checkpoint-5")
    plan = make_plan(load_study(world(checkpoints={"folder": "runs/*/checkpoint-*"}, context=64)))
    assert plan.kind == "seeds"
    assert [each.checkpoint.name for each in plan.checkpoints] == ["a-checkpoint-5", "b-checkpoint-5"]
