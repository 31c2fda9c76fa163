"""Alerts in training: limits of scalars, and distances from their trend."""

import math
import warnings

import pytest
import torch

from families import tiny
from qkscope.errors import InputError, QkscopeWarning
from qkscope.train import Probe
from qkscope.train.alerts import alerts_of, require_alerts

NAMES = ["max_logit", "sink_mass"]


def test_a_scalar_above_its_limit_is_named_with_its_layer_type():
    scalars = {"qkscope/max_logit": 120.0, "qkscope/rotary/max_logit": 90.0, "qkscope/sink_mass": 0.3}
    assert alerts_of({"max_logit": 100.0}, 7, scalars, []) == ["step 7: qkscope/max_logit is 120, above 100"]
    assert alerts_of({"max_logit": 200.0}, 7, scalars, []) == []


def test_a_jump_off_a_line_is_an_alert_and_the_line_itself_is_not():
    earlier = [(step, {"r": 0.1 * step, "r_se": 0.01}) for step in range(4)]
    assert alerts_of({"trend": 5.0}, 4, {"r": 0.4, "r_se": 0.01}, earlier) == []
    # The line through four points is sqrt(1/4 + 2.5^2 / 5) = 1.22 of their errors uncertain at the next.
    error = 0.01 * math.sqrt(1 + 1 / 4 + 2.5**2 / 5)
    (sentence,) = alerts_of({"trend": 5.0}, 4, {"r": 0.4 + 6 * error, "r_se": 0.01}, earlier)
    assert "6.0 standard errors off its trend (0.4)" in sentence
    assert alerts_of({"trend": 5.0}, 4, {"r": 9.0, "r_se": 0.01}, earlier[:3]) == []  # no trend yet
    assert alerts_of({"trend": 5.0}, 4, {"r": 9.0}, earlier) == []  # no error


@pytest.mark.parametrize(
    ("alerts", "message"),
    [
        ({"max_logits": 100}, "did you mean 'max_logit'?"),
        ({"max_logit": -1}, "should be a positive number"),
        ({"max_logit": "high"}, "should be a positive number"),
        ([100], "should be a mapping"),
    ],
)
def test_alerts_that_are_none_are_refused(alerts, message):
    with pytest.raises(InputError, match="alerts") as refused:
        require_alerts(alerts, NAMES)
    assert message in str(refused.value)


def test_a_probe_logs_attention_and_warns_without_stopping(tmp_path):
    model = tiny("smollm3")
    documents = torch.randint(3, 128, (8, 32), generator=torch.Generator().manual_seed(0)).tolist()
    probe = Probe(model, documents, tmp_path / "out", alerts={"max_logit": 1e-6}, page=False, groups=4)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always", QkscopeWarning)
        scalars = probe(0)
    assert any("step 0: qkscope/max_logit is " in str(each.message) for each in shown)
    assert scalars["qkscope/alerts"] >= 1
    for name in ("max_logit", "entropy", "sink_mass", "distance_90"):
        assert math.isfinite(scalars[f"qkscope/{name}"])
        assert {f"qkscope/rotary/{name}", f"qkscope/NoPE/{name}"} <= scalars.keys()
