"""Read a study file: safe YAML, no duplicate keys, and mistakes reported with their place and the likely meaning."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from qkscope.errors import StudyError, located
from qkscope.files import as_path
from qkscope.foreign import Missing, Unreadable, read_bytes
from qkscope.study.schema import Characters, Checkpoint, Documents, Heads, Phase, Series, Study
from qkscope.study.series import expand
from qkscope.study.values import DECIDES, number_hint

MAX_BYTES = 4 * 1024 * 1024  # a study of 10 000 checkpoints is below 2 MB
MAX_DEPTH = 32  # levels of nesting
MAX_NODES = 300_000  # keys and values; PyYAML needs about a kilobyte for each
MAX_NUMBER = 64  # characters of a number or a date; PyYAML's time for 1:1:1:... grows with the square
MAX_PROBLEMS = 20  # mistakes that are reported at once
ALTERNATIVES = ("Heads", "Characters", "constrained-int")  # what a key may be besides a word: no part of its place
NO_MAPPING = ("model_type", "model_attributes_type", "dict_type")
# What the keys inside of a study's keys belong to.
INSIDE: dict[str, type[BaseModel]] = {
    "checkpoints": Checkpoint,
    "documents": Documents,
    "heads": Heads,
    "common_window": Characters,
    "phases": Phase,
}
MODELS: dict[str, type[BaseModel]] = {
    each.__name__: each for each in (Checkpoint, Documents, Heads, Characters, Phase, Series, Study)
}


@dataclass(frozen=True)
class StudyFile:
    """A study and the folder its relative paths start from."""

    study: Study
    folder: Path
    path: Path | None = None
    notes: tuple[str, ...] = ()  # about checkpoints that a series found, or left out
    expanded: bool = False  # whether the file has a series, so that `study` has more checkpoints than the file lists


def load_study(path: Path | str) -> StudyFile:
    """Read and check a study file; every mistake is a StudyError that names the file and the key."""
    path = as_path(path, "a study file")
    settings = study_settings(path)
    with located(str(path)):
        return study_of(settings, path.parent.resolve(), path)


def parse_study(text: str) -> Study:
    """The study in `text`; a series of checkpoints is looked for from where we are."""
    return study_of(_mapping(text), Path.cwd()).study


def study_settings(path: Path) -> dict[str, Any]:
    """The settings in a study file, before its series are expanded."""
    with located(str(path)):
        if path.is_dir():
            kept = next((each for each in sorted(path.glob("*.yaml")) if each.is_file()), None)
            instead = f"give its study file: {kept} --out {path}" if kept else "give a study file (YAML)"
            raise StudyError(f"is a folder; {instead}")
        try:
            return _mapping(read_bytes(path, MAX_BYTES, follow=True).decode("utf-8"))  # YAML takes any line end
        except Missing:
            raise StudyError("there is no such study file") from None
        except UnicodeDecodeError as error:
            raise StudyError(f"is not UTF-8 text ({error})") from None
        except Unreadable as error:
            raise StudyError(str(error)) from None


def study_of(settings: dict[str, Any], folder: Path, path: Path | None = None) -> StudyFile:
    """The study that settings describe as a file would, its series replaced by the checkpoints that are there."""
    entries = series_in(settings)
    if not any(isinstance(entry, Series) for entry in entries):
        return StudyFile(_validated(settings), folder, path)
    model = settings.get("model")
    checkpoints, notes = expand(entries, folder, model if isinstance(model, str) else None)
    return StudyFile(_validated({**settings, "checkpoints": checkpoints}), folder, path, tuple(notes), True)


def series_in(settings: dict[str, Any]) -> list[Any]:
    """The entries of `checkpoints`, each series checked; a single series may stand without a list around it."""
    listed = settings.get("checkpoints")
    alone = isinstance(listed, dict)
    entries: list[Any] = []
    for number, entry in enumerate([listed] if alone else listed if isinstance(listed, list) else []):
        if isinstance(entry, dict) and {"folder", "revisions"} & set(entry):
            try:
                entry = Series.model_validate(entry)
            except ValidationError as error:
                problems = _problems(error, ["checkpoints"] if alone else ["checkpoints", number])
                raise StudyError("\n  ".join(problems)) from None
        entries.append(entry)
    return entries


def study_text(study: Study, about: str) -> str:
    """A study as the text of a study file; `about` becomes a comment above it."""
    settings = study.model_dump(mode="json", exclude_defaults=True)
    return f"# {about}\n{yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120)}"


def changed(study: Study, changes: dict[str, Any]) -> Study:
    """The study with some keys changed, checked as when it is read from a file."""
    return _validated(study.model_dump() | changes)


def _validated(settings: dict[str, Any]) -> Study:
    try:
        return Study.model_validate(settings)
    except ValidationError as error:
        problems = _problems(error)
        wrong = StudyError("\n  ".join(problems))
        if any(DECIDES in problem for problem in problems):
            wrong = wrong.advised(
                python="run_study lets it run with CaptureOptions(trust_remote_code=True)",
                command="the flag --trust-remote-code lets it run",
            )
        raise wrong from None
    except RecursionError:
        raise StudyError("is nested too deeply") from None


# -- YAML ------------------------------------------------------------------------------------------------------


def _mapping(text: str) -> dict[str, Any]:
    try:
        loaded = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        where = f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else " ".join(str(error).split())
        raise StudyError(f"is not valid YAML: {where}") from None
    except (RecursionError, ValueError, ArithmeticError, TypeError, LookupError, AttributeError) as error:
        # PyYAML lets these through where a scalar is not what its tag says.
        raise StudyError(f"cannot be read as YAML ({type(error).__name__}: {_short(str(error))})") from None
    if not isinstance(loaded, dict):
        raise StudyError("should be a mapping with the keys study, checkpoints and documents")
    return loaded


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, deep nesting, and aliases (a few lines of which fill any memory)."""

    _depth = _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        start: Any = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not used here", start)
        self._depth, self._nodes = self._depth + 1, self._nodes + 1
        if self._depth > MAX_DEPTH or self._nodes > MAX_NODES:
            problem = f"more than {MAX_DEPTH} levels deep, or more than {MAX_NODES} keys and values"
            raise yaml.composer.ComposerError(None, None, problem, start)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:str" and len(node.value) > MAX_NUMBER:
            problem = f"a number or date of {len(node.value)} characters"
            raise yaml.composer.ComposerError(None, None, problem, start)
        if isinstance(node, yaml.MappingNode):
            keys = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in keys:
                    raise yaml.composer.ComposerError(None, None, f"key {key.value!r} is given twice", key.start_mark)
                keys.add((key.tag, str(key.value)))
        return node


# -- mistakes in words of YAML ---------------------------------------------------------------------------------


def _problems(error: ValidationError, within: Sequence[str | int] = ()) -> list[str]:
    """One line per mistake: where it is, what is wrong, what was probably meant."""
    lines = []
    for problem in error.errors():
        location = problem["loc"]
        if "literal['all']" in location:
            continue  # the other reading of `heads`, which the user did not mean
        if location[:1] == ("common_window",) and len(location) == 2 and problem["type"] in ("int_type", *NO_MAPPING):
            continue  # the other reading of `common_window`
        place = [*within, *(part for part in location if part not in ALTERNATIVES)]
        lines.append(_problem(problem, place, error.title))
    distinct = list(dict.fromkeys(lines))
    more = len(distinct) - MAX_PROBLEMS
    return [*distinct[:MAX_PROBLEMS], f"and {more} more mistakes"] if more > 0 else distinct


def _problem(problem: Mapping[str, Any], location: list[Any], model: str) -> str:
    """One mistake at this place of a `model`."""
    kind = problem["type"]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    place = place if len(place) <= 200 else f"{place[:197]}..."
    if kind == "extra_forbidden" and location[-1] == "trust_remote_code":
        return (
            f"{place!r} is not a key: {DECIDES}, because code that comes with a checkpoint is then run on this machine"
        )
    if kind == "extra_forbidden":
        of_series = model == Series.__name__ and location[0] == "checkpoints"
        inside: type[BaseModel] = Series if of_series else INSIDE.get(str(location[0]), Study)
        keys = (inside if len(location) > 1 else Study).model_fields
        close = difflib.get_close_matches(str(location[-1]), keys, n=1, cutoff=0.5)
        meant = f"did you mean {close[0]!r}?" if close else f"valid keys here: {', '.join(keys)}"
        return f"unknown key {place!r}; {meant}"
    if kind == "missing":
        return f"missing key {place!r}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if kind in NO_MAPPING:
        wanted = MODELS.get(str(problem.get("ctx", {}).get("class_name")))
        keys_like = f" with keys such as {', '.join(list(wanted.model_fields)[:3])}" if wanted else ""
        message = f"should be a mapping{keys_like}"
    if not place:
        return message
    hint = number_hint(problem["input"])
    return f"{place}: {message} (got {_short(problem['input'])}){f'; {hint}' if hint else ''}"


def _short(value: Any) -> str:
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
