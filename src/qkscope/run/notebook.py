"""Progress in a notebook: one line that changes, and the notes above it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from qkscope.run.events import Events

if TYPE_CHECKING:
    from qkscope.run.plan import CheckpointPlan, Plan

EVERY = 0.5  # seconds between two changes of the line
MOST_NOTES = 20


def default_events() -> Events:
    """Progress where a notebook shows it; else nothing is said."""
    notebook = sys.modules.get("IPython")
    shell = notebook.get_ipython() if notebook is not None else None
    return NotebookEvents() if shell is not None and getattr(shell, "kernel", None) is not None else Events()


class NotebookEvents(Events):
    """A text below the cell that is replaced as the run goes on."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._notes: list[str] = []
        self._numbers: dict[str, str] = {}
        self._documents: dict[str, int] = {}
        self._next = 0.0

    def surveying(self, documents: int) -> None:
        """Documents are being read."""
        self._show(f"reading documents: {documents}")

    def planned(self, plan: Plan) -> None:
        """How much there is to do."""
        total = len(plan.checkpoints)
        names = [each.checkpoint.name for each in plan.checkpoints]
        self._numbers = {name: f"[{number}/{total}] {name}" for number, name in enumerate(names, start=1)}
        self._notes += plan.notes()
        self._show(f"{total} checkpoints, {plan.tokens:,} tokens", now=True)

    def started(self, plan: CheckpointPlan) -> None:
        """A checkpoint is loaded."""
        self._show(f"{self._name(plan)}: loading", now=True)

    def advanced(self, plan: CheckpointPlan, documents: int, tokens: int) -> None:
        """So many more documents."""
        name = plan.checkpoint.name
        self._documents[name] = self._documents.get(name, 0) + documents
        self._show(f"{self._name(plan)}: {self._documents[name]} of {len(plan.documents)} documents")

    def finished(self, plan: CheckpointPlan, seconds: float) -> None:
        """A checkpoint is safe."""
        self._show(f"{self._name(plan)}: done in {seconds:.1f} s", now=True)

    def noted(self, message: str) -> None:
        """A line that stays."""
        self._notes.append(message)
        self._show("", now=True)

    def left_out(self, plan: CheckpointPlan, reason: str) -> None:
        """A line that stays."""
        self.noted(f"{self._name(plan)} is left out: {reason}")

    def _name(self, plan: CheckpointPlan) -> str:
        return self._numbers.get(plan.checkpoint.name, plan.checkpoint.name)

    def _show(self, line: str, *, now: bool = False) -> None:
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY
        shown = {"text/plain": "\n".join([*self._notes[-MOST_NOTES:], line])}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
