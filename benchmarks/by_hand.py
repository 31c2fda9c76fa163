"""qkscope against hooks written by hand, account by account: what each adds to a plain pass, in processor time.

Both run in one process, a pass each in turn, and what they add is timed where it is done: inside the tap, inside the
hooks, and before and after the passes. Whole processes that do the same differ by more than either of them costs.
"""

import time

import numpy as np
import torch
from capture_cost import PLAIN, Capture, ready
from common import Found, document_ids, one_document_batches
from hooks import COLUMNS, Watcher

from qkscope.capture.backbone import evaluation
from qkscope.capture.probe import probe_model
from qkscope.lenses.position import qk_table

DOCUMENTS, AT_REST = 6, 2
MANY = 100  # documents of the whole path that is put together of what was measured


class TimedWatcher(Watcher):
    """Adds up what its hooks take."""

    def __init__(self, model) -> None:
        self.spent = 0.0
        super().__init__(model)

    def _keep_query(self, module, given, query) -> None:
        self._timed(super()._keep_query, module, given, query)

    def _turn(self, module, given, angles) -> None:
        self._timed(super()._turn, module, given, angles)

    def _with_key(self, number, width):
        add = super()._with_key(number, width)
        return lambda *given: self._timed(add, *given)

    def _timed(self, action, *given) -> None:
        begun = time.process_time()
        action(*given)
        self.spent += time.process_time() - begun


def by_hand(quick: bool) -> Found:
    """What both add to a plain pass, for each document and once."""
    ids = document_ids(8, 2048)[:1, :512] if quick else document_ids(8, 2048)[:DOCUMENTS]
    model, found = ready(ids), Found()
    capture, watcher = Capture(model, ids.shape[1]), TimedWatcher(model)
    watcher.close()
    with evaluation(model):
        passes, added = documents_in_turn(capture, watcher, one_document_batches(ids))
    once = fixed_costs(capture, watcher, ids.shape[1])
    saved = passes["saved"]
    ours, theirs = added["qkscope"] - saved, added["hooks"]
    first, later = ours[:2].mean(), ours[2:].mean() if len(ours) > 2 else ours.mean()
    shape = f"SmolLM2-135M, documents of {ids.shape[1]} tokens, processor time"
    listed = f"{1000 * first:.0f} ms for each of the first two documents, {1000 * later:.0f} ms for later ones"
    text = f"{listed}; by hand {1000 * theirs.mean():.0f} ms"
    found.row(f"what qkscope adds to a plain pass ({shape})", text, "less than by hand", later < theirs.mean())
    for count in (len(ids), MANY):
        plain = count * passes["plain"].mean()
        mine = plain + once["probe"] + once["settle"] + once["analysis"] + 2 * first + (count - 2) * later
        other = plain + count * theirs.mean() + once["hooks analysis"]
        text = f"{other / mine:.3f} ({other:.1f} s against {mine:.1f} s)"
        found.row(
            f"whole path by hand ÷ qkscope's, {count} documents, from the costs of each part",
            text,
            "more than 1",
            other > mine,
        )
    found.notes.append(account(passes, added, once))
    found.notes.append(
        "What by hand does not give: position buckets (no window but the whole, nothing without position 0), document "
        "groups (no errors), sums before rotation, the rotation itself, a proof that the model is unchanged and every "
        "layer was seen, weights checked for NaN, models other than Llama's. qkscope's analysis makes the errors too."
    )
    return found


def documents_in_turn(capture: Capture, watcher: TimedWatcher, batches) -> tuple[dict, dict]:
    """Processor seconds of each document: a plain pass, what ending early saves, and what each way adds."""
    plain, saved, tap, hooks = [], [], [], []
    for number, batch in enumerate(batches):
        for step in range(3):
            way = (number + step) % 3
            if way == 0:
                times = capture.in_parts(batch, np.full(capture.last + 1, PLAIN))
                plain.append(times[:, 0].sum())
                behind = times[1 + capture.last, 0] + times[-1, 0]
            elif way == 1:
                times = capture.in_parts(batch, np.full(capture.last + 1, AT_REST))
                tap.append(capture.in_tap[:, 0].sum())
                until = times[1 + capture.last, 0] - capture.in_tap[-1, 0]
            else:
                watcher.open(capture.model)
                before = watcher.spent
                capture.run(batch, lambda _: PLAIN)
                hooks.append(watcher.spent - before)
                watcher.close()
        saved.append(behind - until)
    found = {"plain": np.array(plain), "saved": np.array(saved)}
    return found, {"qkscope": np.array(tap), "hooks": np.array(hooks)}


def fixed_costs(capture: Capture, watcher: TimedWatcher, context: int) -> dict[str, float]:
    """Processor seconds that do not depend on the number of documents."""
    import pandas as pd

    moments = capture.moments(AT_REST)
    actions = {
        "probe": lambda: probe_model(capture.model, context=context),
        "settle": moments.settle,
        "analysis": lambda: qk_table(moments, model="m"),
        "hooks analysis": lambda: pd.DataFrame(watcher.rows(), columns=COLUMNS),
    }
    spent = {}
    for name, action in actions.items():
        begun = time.process_time()
        with torch.no_grad():
            action()
        spent[name] = time.process_time() - begun
    return spent


def account(passes: dict, added: dict, once: dict) -> str:
    def listed(values):
        return ", ".join(f"{1000 * value:.0f}" for value in values)

    return (
        f"A plain pass {passes['plain'].mean():.2f} s; ending early saves {listed(passes['saved'])} ms; inside the "
        f"tap {listed(added['qkscope'])} ms; inside the hooks {listed(added['hooks'])} ms, document by document. Once: "
        f"probe {once['probe']:.2f} s, moving sums {once['settle']:.2f} s, analysis {once['analysis']:.2f} s; by hand "
        f"analysis {once['hooks analysis']:.2f} s."
    )
