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
from qkscope.study.series import expand, is_series
from qkscope.study.values import DECIDES, number_hint

MAX_BYTES = 4 * 1024 * 1024  # a study of 10 000 checkpoints is below 2 MB
MAX_DEPTH = 32  # levels of nesting
MAX_NODES = 300_000  # keys and values; PyYAML needs about a kilobyte for each
MAX_NUMBER = 64  # characters of a number or a date; PyYAML's time for 1:1:1:... grows with the square
MAX_PROBLEMS = 20  # mistakes that are reported at once
ALTERNATIVES = ("Heads", "Characters", "constrained-int")  # what a key may be besides a word: no part of its place
MODELS: tuple[type[BaseModel], ...] = (Checkpoint, Series, Documents, Heads, Characters, Phase, Study)
NO_WINDOW = ("int_type", "model_type", "model_attributes_type", "dict_type")


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
    with located(str(path)):
        return study_of(_read_yaml(path), path.parent.resolve(), path)


def parse_study(text: str) -> Study:
    """The study in `text`; a series of checkpoints is looked for from where we are."""
    return study_of(_mapping(text), Path.cwd()).study


def study_settings(path: Path) -> dict[str, Any]:
    """The settings in a study file, before its series are expanded."""
    with located(str(path)):
        return _read_yaml(path)


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
    entries = settings.get("checkpoints")
    if is_series(entries):
        return [_series(entries, ["checkpoints"])]
    listed = entries if isinstance(entries, list) else []
    return [_series(each, ["checkpoints", number]) if is_series(each) else each for number, each in enumerate(listed)]


def _series(entry: Any, place: list[str | int]) -> Series:
    try:
        return Series.model_validate(entry)
    except ValidationError as error:
        raise StudyError("\n  ".join(_problems(error, place))) from None


def study_text(study: Study, about: str) -> str:
    """A study as the text of a study file; `about` becomes a comment above it."""
    settings = study.model_dump(mode="json", exclude_defaults=True)
    return f"# {about}\n{yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120)}"


def _mapping(text: str) -> dict[str, Any]:
    try:
        loaded = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise StudyError(f"is not valid YAML: {_yaml_problem(error)}") from None
    except (RecursionError, ValueError, ArithmeticError, TypeError, LookupError, AttributeError) as error:
        # PyYAML lets these through where a scalar is not what its tag says.
        raise StudyError(f"cannot be read as YAML ({type(error).__name__}: {_short(str(error))})") from None
    if not isinstance(loaded, dict):
        raise StudyError("should be a mapping with the keys study, checkpoints and documents")
    return loaded


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


def _read_yaml(path: Path) -> dict[str, Any]:
    if path.is_dir():
        kept = next((each for each in sorted(path.glob("*.yaml")) if each.is_file()), None)
        instead = f"give its study file: {kept} --out {path}" if kept else "give a study file (YAML)"
        raise StudyError(f"is a folder; {instead}")
    try:
        text = read_bytes(path, MAX_BYTES, follow=True).decode("utf-8")  # YAML takes any line end
    except Missing:
        raise StudyError("there is no such study file") from None
    except UnicodeDecodeError as error:
        raise StudyError(f"is not UTF-8 text ({error})") from None
    except Unreadable as error:
        raise StudyError(str(error)) from None
    return _mapping(text)


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, deep nesting, and aliases (a few lines of which fill any memory)."""

    _depth = _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not used here", event.start_mark)
        self._depth, self._nodes = self._depth + 1, self._nodes + 1
        if self._depth > MAX_DEPTH or self._nodes > MAX_NODES:
            problem = f"more than {MAX_DEPTH} levels deep, or more than {MAX_NODES} keys and values"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_number = isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:str"
        if is_number and len(node.value) > MAX_NUMBER:
            problem = f"a number or date of {len(node.value)} characters"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool):
                continue
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())


def _problems(error: ValidationError, within: Sequence[str | int] = ()) -> list[str]:
    """One line per mistake: where it is, what is wrong, what was probably meant."""
    lines = []
    for problem in error.errors():
        location = problem["loc"]
        if "literal['all']" in location:
            continue  # the other reading of `heads`, which the user did not mean
        if location[:1] == ("common_window",) and len(location) == 2 and problem["type"] in NO_WINDOW:
            continue  # the other reading of `common_window`
        place = [*within, *(part for part in location if part not in ALTERNATIVES)]
        lines.append(_problem(problem, place, error.title))
    distinct = list(dict.fromkeys(lines))
    more = len(distinct) - MAX_PROBLEMS
    return [*distinct[:MAX_PROBLEMS], f"and {more} more mistakes"] if more > 0 else distinct


def _problem(problem: Mapping[str, Any], location: list[Any], model: str) -> str:
    """One mistake at this place of a `model`, in words of YAML."""
    kind, place = problem["type"], _place(location)
    if kind == "extra_forbidden" and location[-1] == "trust_remote_code":
        return (
            f"{place!r} is not a key: {DECIDES}, because code that comes with a checkpoint is then run on this machine"
        )
    if kind == "extra_forbidden":
        return f"unknown key {place!r}{_suggestion(location, model)}"
    if kind == "missing":
        return f"missing key {place!r}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        wanted = {each.__name__: each for each in MODELS}.get(str(problem.get("ctx", {}).get("class_name")))
        keys = f" with keys such as {', '.join(list(wanted.model_fields)[:3])}" if wanted else ""
        message = f"should be a mapping{keys}"
    if not place:
        return message
    hint = number_hint(problem["input"])
    return f"{place}: {message} (got {_short(problem['input'])}){f'; {hint}' if hint else ''}"


def _place(location: list[Any]) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    return place if len(place) <= 200 else f"{place[:197]}..."


def _suggestion(location: list[Any], model: str) -> str:
    """The closest valid key at that place."""
    inside: dict[str, type[BaseModel]] = {
        "checkpoints": Series if model == Series.__name__ else Checkpoint,
        "documents": Documents,
        "heads": Heads,
        "common_window": Characters,
        "phases": Phase,
    }
    keys = (inside.get(str(location[0]), Study) if len(location) > 1 else Study).model_fields
    close = difflib.get_close_matches(str(location[-1]), keys, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; valid keys here: {', '.join(keys)}"


def _short(value: Any) -> str:
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
