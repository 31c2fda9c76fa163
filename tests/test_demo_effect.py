"""The demo, in the first half of its first stage, shows the real effect and not noise."""

from dataclasses import replace

import pandas as pd
import pytest

from qkscope.demo import DemoSettings, prepare_demo
from qkscope.run.execute import run_study


@pytest.mark.slow
def test_the_demo_shows_position_being_learned(tmp_path):
    """The command that trains, measures and reports all ten checkpoints is in test_demo_training.py, in fewer steps."""
    whole = DemoSettings()
    settings = replace(whole, phases=(replace(whole.phases[0], steps=(40, 160)),))
    first, last = (checkpoint.name for checkpoint in settings.checkpoints())
    table = pd.read_csv(run_study(prepare_demo(tmp_path, settings), tmp_path / "out") / "qk.csv")
    table = table[table["pc"] == 0]
    assert list(table["model"].unique()) == [first, last]
    upper = table[(table["layer"] >= 4) & (table["rotary"] == "rotary")].groupby("model")["r_q"].mean()
    nope = table[table["rotary"] == "nope"]
    assert set(nope["layer"]) == {3, 7}
    assert upper[last] > upper[first] + 0.2
    assert nope.loc[nope["model"] == last, "r_q"].mean() < 0.15
    dominated = ((table["r_q"] > 0.7) & (table["r_k"].abs() > 0.7)).groupby(table["model"]).mean()
    assert dominated[last] > dominated[first] + 0.05
