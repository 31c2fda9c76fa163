"""Which heads changed, by errors over documents that are known by hand."""

import numpy as np
import pandas as pd
import pytest

from qkscope.lenses.long_tables import paired_changes


def replicates(model, r_q, spread, groups=8):
    """Heads of layer 0 with r_q, whose replicates lie ± spread about it, the same sign for the same group."""
    rows = []
    for head, (value, width) in enumerate(zip(r_q, spread, strict=True)):
        row = {"model": model, "layer": 0, "head": head, "r_q": value, "r_k": 0.0, "n_q": 800}
        for group in range(groups):
            sign = 1 if group % 2 else -1
            row |= {
                f"r_q_without_{group}": value + sign * width,
                f"r_k_without_{group}": 0.0,
                f"n_q_without_{group}": 700,
            }
        rows.append(row)
    return pd.DataFrame(rows)


def test_what_documents_do_to_both_checkpoints_cancels():
    """Each r_q moves by ± 0.05 with the documents, both checkpoints alike; their difference does not move at all."""
    table = pd.concat([replicates("a", [0.5], [0.05]), replicates("b", [0.6], [0.0501])])
    (row,) = paired_changes(table, table, [("a", "b")]).to_dict("records")
    assert row["r_q_change"] == pytest.approx(0.1)
    # By hand: replicates of the difference lie ± 0.0001 about it, so the error is sqrt(7 / 8 x 8 x 1e-8).
    assert row["r_q_change_se"] == pytest.approx(np.sqrt(7) * 1e-4)
    assert row["r_q_changed"] == 1


def test_of_many_heads_those_that_stand_out_are_called_changed():
    rng = np.random.default_rng(0)
    drift = np.concatenate([rng.normal(0, 0.01, 95), np.full(5, 0.5)])  # errors are sqrt(7) x 0.01 = 0.026
    table = pd.concat([replicates("a", np.zeros(100), np.zeros(100)), replicates("b", drift, np.full(100, 0.01))])
    found = paired_changes(table, table, [("a", "b")])
    assert found["r_q_changed"].tolist() == [0.0] * 95 + [1.0] * 5


def test_a_head_whose_sign_is_not_sure_is_not_called_changed_in_r_k():
    """r_k of all heads goes from 0.8 to -0.8; of heads 1 and 2 the sign is not sure before, or after."""
    before = replicates("a", [0.5] * 3, [0.01] * 3).assign(r_k=0.8, sign_sure=[1.0, 0.0, 1.0])
    after = replicates("b", [0.5] * 3, [0.01] * 3).assign(r_k=-0.8, sign_sure=[1.0, 1.0, 0.0])
    for table, r_k in ((before, 0.8), (after, -0.8)):
        for group in range(8):
            table[f"r_k_without_{group}"] = r_k + (0.01 if (group < 4) == (r_k > 0) else -0.01)
    table = pd.concat([before, after])
    found = paired_changes(table, table.drop(columns="sign_sure"), [("a", "b")])
    assert found["turned"].tolist() == [0, 1, 1]  # heads 1 and 2 are compared with the earlier numbers turned round
    assert found["r_k_change"].tolist() == pytest.approx([-1.6, 0, 0])
    assert (found["r_k_changed"] == 1).tolist() == [True, False, False]


def test_too_few_groups_say_nothing():
    table = pd.concat([replicates("a", [0.5], [0.1], groups=3), replicates("b", [0.6], [0.1], groups=3)])
    assert paired_changes(table, table, [("a", "b")]) is None


def test_a_flip_of_a_head_whose_sign_is_not_known_is_no_change():
    """r_q is nearly 0 at both, and r_k has nearly the same size and the other sign. A head that is sure does change."""
    early, late = replicates("a", [0.02, 0.5], [0.001] * 2), replicates("b", [0.03, 0.5], [0.001] * 2)
    for table, r_k in ((early, 0.4), (late, -0.41)):
        for name in [name for name in table.columns if name.startswith("r_k")]:
            table[name] = r_k
    table = pd.concat([early, late])
    found = paired_changes(table, table, [("a", "b")])
    assert found["turned"].tolist() == [1.0, 0.0]
    assert found["r_k_change"].tolist() == pytest.approx([-0.01, -0.81])
    assert found["r_q_change"].tolist() == pytest.approx([0.05, 0.0])
    # Turned, replicates move against each other: by 0.002 in all.
    assert found["r_q_change_se"].tolist() == pytest.approx([np.sqrt(7) * 2e-3, 0.0], abs=1e-12)
