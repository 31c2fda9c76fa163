"""The demo, at half its steps, shows the real effect and not noise. The longest test: a good minute of training."""

import pandas as pd
import pytest
import yaml

from qkscope.demo import DemoSettings, prepare_demo
from qkscope.run.execute import run_study


@pytest.mark.slow
def test_the_demo_shows_position_being_learned(tmp_path):
    settings = DemoSettings().scaled(0.5)
    first, *_, last = [plan.name for plan in settings.checkpoints()]
    study = prepare_demo(tmp_path, settings)
    # Two of ten are measured; the command that measures and reports all is in test_demo_training.py.
    settled = yaml.safe_load(study.read_text(encoding="utf-8"))
    settled["checkpoints"] = [entry for entry in settled["checkpoints"] if entry["name"] in (first, last)]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(settled))
    table = pd.read_csv(run_study(tmp_path / "two.yaml", tmp_path / "out") / "qk.csv")
    table = table[table["pc"] == 0]
    assert list(table["model"].unique()) == [first, last]
    trained = table[table["model"] == last]
    upper = trained[(trained["layer"] >= 4) & (trained["rotary"] == "rotary")]
    nope = trained[trained["rotary"] == "nope"]
    assert set(nope["layer"]) == {3, 7}
    assert upper["r_q"].mean() > 0.6
    assert nope["r_q"].mean() < 0.15
    dominated = ((table["r_q"] > 0.7) & (table["r_k"].abs() > 0.7)).groupby(table["model"]).mean()
    assert dominated[last] > dominated[first] + 0.2
