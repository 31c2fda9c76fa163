"""An ablation from a study file to `ablation.csv`."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qkscope.ablate.edits import KINDS
from qkscope.ablate.run import (
    AblationSettings,
    CheckpointAblation,
    ablate_documents,
    ablation_table,
    heads_table,
    plan_ablation,
)
from qkscope.errors import located
from qkscope.files import write_text
from qkscope.lenses.ablation.table import FILE as HEADS_FILE
from qkscope.moments.moments import Moments
from qkscope.results.csv_files import write_csv
from qkscope.results.environment import environment
from qkscope.results.folder import ABLATION_CSV, ABLATION_JSON, head_table_path, moments_path, results_file
from qkscope.results.lock import only_run
from qkscope.results.remove import remove_head_table
from qkscope.run.events import Events
from qkscope.run.execute import results_folder
from qkscope.run.plan import make_plan, with_tokens_kept
from qkscope.study.load import StudyFile, load_study
from qkscope.text import counted


def prepare_ablation(
    study: StudyFile | Path | str,
    out: Path | str | None = None,
    settings: AblationSettings = AblationSettings(),  # noqa: B008 - frozen
    events: Events | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[Path, list[CheckpointAblation]]:
    """The results folder and the work at each checkpoint; nothing is loaded yet."""
    file = study if isinstance(study, StudyFile) else load_study(study)
    folder = results_folder(file, out)
    plan = make_plan(file, events or Events(), trust_remote_code=trust_remote_code, results=folder)
    return folder, plan_ablation(with_tokens_kept(plan, folder), folder, settings)


def ablate_study(
    study: StudyFile | Path | str,
    out: Path | str | None = None,
    settings: AblationSettings = AblationSettings(),  # noqa: B008 - frozen
    events: Events | None = None,
    command: str = "ablate_study",
    *,
    trust_remote_code: bool = False,
) -> Path:
    """Edit heads of a study's checkpoints and write `ablation.csv` into its results folder; returns the folder."""
    told = events or Events()
    folder, works = prepare_ablation(study, out, settings, told, trust_remote_code=trust_remote_code)
    with only_run(folder):
        for work in works:
            with located(f"checkpoint {work.plan.checkpoint.name!r}"):
                _ablate_checkpoint(work, folder, told)
        table = ablation_table(works, folder)
        write_csv(table, results_file(folder, ABLATION_CSV))
        of_heads = heads_table(works, table)
        if of_heads is None:
            remove_head_table(folder, HEADS_FILE)
        else:
            write_csv(of_heads, head_table_path(folder, HEADS_FILE))
        write_text(results_file(folder, ABLATION_JSON), json.dumps(_provenance(works, command), indent=1) + "\n")
    for name in (ABLATION_CSV, ABLATION_JSON):
        told.wrote(str(results_file(folder, name)))
    return folder


def _ablate_checkpoint(work: CheckpointAblation, folder: Path, told: Events) -> None:
    from qkscope.capture.load import load_backbone

    plan, name = work.plan, work.plan.checkpoint.name
    told.noted(f"{name}: {counted(len(work.units), 'unit')}, at most {counted(work.passes, 'pass', 'passes')}")
    done = 0

    def advanced(_: int, seconds: float) -> None:
        nonlocal done
        done += 1
        told.noted(f"{name}: {done} of {counted(len(work.documents), 'document')}, {seconds:.1f} s for the last")

    model = load_backbone(plan.source, plan.config, dtype=plan.study.dtype, device=plan.study.device, head=True)
    moments = Moments.load(moments_path(folder, name))
    ablate_documents(work, model, moments, folder, advanced)
    del model, moments
    gc.collect()  # before the next one comes


def _provenance(works: Sequence[CheckpointAblation], command: str) -> dict[str, Any]:
    settings = works[0].settings
    return {
        "command": command,
        "settings": asdict(settings),
        "edits": {name: KINDS[name].definition for name in settings.edits},
        "checkpoints": [
            {
                "name": work.plan.checkpoint.name,
                "moments": work.plan.fingerprint(),
                "tokens": work.tokens,
                "documents": list(work.documents),
                "units": {unit.name: [list(head) for head in unit.heads] for unit in work.units},
            }
            for work in works
        ],
        "environment": environment(),
    }
