"""The demo, at half its steps, shows the real effect and not noise. The longest test: about two minutes."""

import subprocess
import sys

import pandas as pd
import pytest

from qkscope.cli.main import main


@pytest.mark.slow
def test_the_demo_shows_position_being_learned(tmp_path, monkeypatch, capsys):
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "qkscope", "demo", "--steps", "0.5", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(out / "qk.csv")
    table = table[table["pc"] == 0]
    names = list(table["model"].unique())
    assert len(names) == 10
    last = table[table["model"] == names[-1]]
    upper = last[(last["layer"] >= 4) & (last["rotary"] == "rotary")]
    nope = last[last["rotary"] == "nope"]
    assert set(nope["layer"]) == {3, 7}
    assert upper["r_q"].mean() > 0.6
    assert nope["r_q"].mean() < 0.15
    dominated = ((table["r_q"] > 0.7) & (table["r_k"].abs() > 0.7)).groupby(table["model"], sort=False).mean()
    assert dominated[names[-1]] > dominated[names[0]] + 0.2
    # Again, in this process, which has imported everything; pictures that were drawn once need no second look.
    monkeypatch.setattr("qkscope.cli.commands.draw_report", lambda folder: None)
    assert main(command[3:]) == 0
    told = capsys.readouterr().err
    assert "training: step" not in told
    assert told.count("moments are there already") == 10
