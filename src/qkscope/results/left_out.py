"""`left_out.json` in a results folder: checkpoints that a run went on without, and why. There only if there are any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qkscope.errors import InputError
from qkscope.files import remove_file, write_text
from qkscope.foreign import Missing, Unreadable, parse_json, read_bytes
from qkscope.results.folder import LEFT_OUT_JSON, LEFT_OUT_LOCK, results_file
from qkscope.results.lock import wait_for_lock
from qkscope.results.provenance import one_line
from qkscope.study.schema import Name

LONGEST = 2000  # characters of a reason
LARGEST = 16 * 2**20  # bytes; ten thousand checkpoints with reasons are below


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    checkpoints: dict[Name, Annotated[str, Field(max_length=LONGEST)]]


def read_left_out(folder: Path) -> dict[str, str]:
    """Name and reason of each checkpoint that was left out of the results in `folder`."""
    path = results_file(folder, LEFT_OUT_JSON)
    try:
        record = _Record.model_validate(parse_json(read_bytes(path, LARGEST)))
    except Missing:
        return {}
    except (Unreadable, ValidationError) as error:
        raise InputError(f"{path}: cannot be used ({str(error).splitlines()[0]}); remove it") from None
    return {name: one_line(reason) for name, reason in record.checkpoints.items()}


def leave_out(folder: Path, name: str, reason: str) -> None:
    """Record that the results are without this checkpoint."""
    with wait_for_lock(results_file(folder, LEFT_OUT_LOCK)):  # shards of other checkpoints may record theirs
        _write(folder, {**read_left_out(folder), name: one_line(reason)[:LONGEST]})


def remove_left_out(folder: Path, name: str) -> None:
    """Remove the record of a checkpoint that was measured after all."""
    if name in read_left_out(folder):
        with wait_for_lock(results_file(folder, LEFT_OUT_LOCK)):
            _write(folder, {other: reason for other, reason in read_left_out(folder).items() if other != name})


def _write(folder: Path, reasons: Mapping[str, str]) -> None:
    path = results_file(folder, LEFT_OUT_JSON)
    if reasons:
        write_text(path, json.dumps({"checkpoints": reasons}, indent=1, ensure_ascii=False) + "\n")
    else:
        remove_file(path)
