"""A study file from what is found: a folder of checkpoints, a model, or a repository with branches."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.capture.hub import pin_revision
from qkscope.capture.load import MISSING, find_value, load_config
from qkscope.capture.source import ModelSource, find_source
from qkscope.capture.weights import ADAPTER
from qkscope.errors import InputError, QkscopeError
from qkscope.study.complete import why_incomplete
from qkscope.study.numbers import NUMBER, numbers_in, step_in
from qkscope.study.series import revisions_of, safe_name

FIRST_CONTEXT = 4096  # proposed where a model can do more: it is quick, and most documents are long enough
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Proposal:
    """What a study can be made of."""

    title: str
    checkpoints: str  # the lines of the study that name them
    about: str  # how many there are
    sources: tuple[ModelSource, ...]  # the first and the last
    tokenizer: bool  # whether they bring one
    seeds: bool = False


def propose_study(target: str, home: Path, *, documents: str | None = None, revision: str | None = None) -> str:
    """A commented study file for `target`; its paths are relative to `home`, the folder that it will lie in."""
    proposal = _in_folder(Path(target).expanduser(), home) if Path(target).expanduser().is_dir() else None
    proposal = proposal or _on_hub(target, revision)
    configs = [load_config(source) for source in proposal.sources]
    return (
        "\n".join([*_head(proposal, documents), *_facts(configs), *proposal.checkpoints.splitlines(), *_more(proposal)])
        + "\n"
    )


def _head(proposal: Proposal, documents: str | None) -> list[str]:
    lines = [
        f"# Proposed by `qkscope init` from what is there: {proposal.about}.",
        "# `qkscope inspect` checks it and says what a run takes; all keys: `qkscope docs study-files`.",
        f"study: {safe_name(proposal.title)}",
        f"title: {json.dumps(proposal.title, ensure_ascii=False)}",
    ]
    if proposal.seeds:
        lines.append("kind: seeds                  # several runs: heads of one index need not be the same heads")
    if not proposal.tokenizer:
        lines.append("tokenizer: FILL-IN           # the checkpoints have none: a Hub id, or a folder")
    files = json.dumps(documents or "texts/*.txt", ensure_ascii=False)
    hint = "" if documents else "   # FILL IN: text, .jsonl or .parquet; each document gives its first tokens"
    return [*lines, "documents:", f"  files: {files}{hint}"]


def _facts(configs: Sequence[Any]) -> list[str]:
    """Context and RoPE base, as the first and the last checkpoint have them."""
    longest = [value for value in map(_longest, configs) if value is not None]
    most = min(longest) if longest else None
    context = FIRST_CONTEXT if most is None else min(FIRST_CONTEXT, most)
    limit = "the config does not say how long it may be" if most is None else f"at most {most}, the model's maximum"
    if len(set(longest)) > 1:
        limit += f" at the first checkpoint; {max(longest)} at another: `phases` can have contexts of their own"
    lines = [f"context: {context}   # tokens per document; {limit}"]
    bases = [find_value(config, "rope_theta") for config in configs]
    plain = [base for base in bases if isinstance(base, int | float)]
    if len(plain) == len(bases) and len(set(plain)) == 1:
        lines.append(f"expect: {{rope_theta: {float(plain[0])}}}   # checked at every checkpoint before anything runs")
    elif any(base is not MISSING for base in bases):
        shown = ", ".join(str(base) for base in dict.fromkeys(map(str, bases)))
        lines.append(f"# rope_theta is not one number: {shown[:200]}")
    return lines


def _longest(config: Any) -> int | None:
    longest = find_value(config, "max_position_embeddings")
    return longest if isinstance(longest, int) and longest >= 2 else None


def _more(proposal: Proposal) -> list[str]:
    lines = ["# skip_positions: 1         # leave attention sinks out of the tables"]
    if "folder:" in proposal.checkpoints or "revisions:" in proposal.checkpoints:
        lines += [
            "# axis: step                # figures by step, and not evenly spaced checkpoints",
            "# axis_scale: log",
        ]
    return lines


# -- a folder --------------------------------------------------------------------------------------------


def _in_folder(target: Path, home: Path) -> Proposal:
    title = target.resolve().name
    if why_incomplete(target) is None:
        where = _relative(target, home)
        line = f"checkpoints:\n  - {{name: {safe_name(title)}, model: {json.dumps(where)}}}"
        return Proposal(title, line, "one model", (_source(target),), _has_tokenizer(target))
    for pattern in ("*", "*/*"):
        whole = [path for path in sorted(target.glob(pattern)) if numbers_in(path.name) and path.is_dir()]
        whole = [path for path in whole if not path.is_symlink() and why_incomplete(path) is None]
        if whole:
            return _series(target, whole, home, runs=pattern == "*/*")
    inside = sorted(path.name for path in target.iterdir())[:5]
    raise InputError(
        f"{target}: neither a model (config.json and safetensors) nor a folder with whole checkpoints whose names have "
        f"a number (checkpoint-100); it holds {', '.join(inside) or 'nothing'}"
    )


def _series(target: Path, whole: Sequence[Path], home: Path, *, runs: bool) -> Proposal:
    pattern = commonest_pattern(path.name for path in whole)
    chosen = sorted((path for path in whole if like(path.name) == pattern), key=lambda path: numbers_in(path.name))
    several = runs and len({path.parent for path in chosen}) > 1
    middle = "*" if several else chosen[0].parent.relative_to(target).as_posix()
    folder = "/".join(part for part in (_relative(target, home), middle, pattern) if part != ".")
    lines = [
        "checkpoints:",
        f"  folder: {json.dumps(folder)}",
        "  # every: 2               # these choose: every second one, the first, the last, or evenly along log(step)",
        "  # log: 12",
    ]
    about = f"{len(chosen)} checkpoints in {target}, {chosen[0].name} to {chosen[-1].name}"
    sources = tuple(_source(path) for path in dict.fromkeys((chosen[0], chosen[-1])))
    return Proposal(target.resolve().name, "\n".join(lines), about, sources, _has_tokenizer(chosen[0]), several)


def _source(path: Path) -> ModelSource:
    return pin_revision(find_source(str(path.resolve()), None, path.parent.resolve()), "config.json")


def _has_tokenizer(path: Path) -> bool:
    return (path / ADAPTER).is_file() or any((path / name).is_file() for name in TOKENIZER)


def _relative(target: Path, home: Path) -> str:
    return Path(os.path.relpath(target.resolve(), home.resolve())).as_posix()


def like(name: str) -> str:
    """A name as a pattern: `checkpoint-*` for checkpoint-100; numbers before the last one stay."""
    numbers = list(re.finditer(NUMBER, name))
    return f"{name[: numbers[-1].start()]}*{name[numbers[-1].end() :]}" if numbers else name


def commonest_pattern(names: Iterable[str]) -> str:
    """The pattern that most of the names are like."""
    return Counter(map(like, names)).most_common(1)[0][0]


# -- the Hub ---------------------------------------------------------------------------------------------


def _on_hub(target: str, revision: str | None) -> Proposal:
    source = find_source(target, revision, Path.cwd())
    if source.kind == "gguf":
        return Proposal(Path(target).stem, f"checkpoints:\n  - {{name: {safe_name(Path(target).stem)}, model: "
                     f"{json.dumps(target)}}}", "one GGUF file", (source,), True)  # fmt: skip
    title = target.rpartition("/")[2]
    steps = [] if revision else [name for name in _branches(target) if step_in(name) is not None]
    if len(steps) < 2:
        named = f", revision: {json.dumps(revision)}" if revision else ""
        line = f"checkpoints:\n  - {{name: {safe_name(revision or title)}, model: {json.dumps(target)}{named}}}"
        return Proposal(title, line, "one model on the Hub", (pin_revision(source, "config.json"),), True)
    pattern = commonest_pattern(steps)
    chosen = sorted((name for name in steps if like(name) == pattern), key=numbers_in)
    rest = sorted({like(name) for name in steps} - {pattern})
    lines = [f"model: {json.dumps(target)}", "checkpoints:", f"  revisions: {json.dumps(pattern)}"]
    lines += [f"  # log: 12                # evenly along log(step); all {len(chosen)} without it"]
    lines += [f"  # other branches: {', '.join(rest)[:200]}"] if rest else []
    about = f"{len(chosen)} branches of {target}, {chosen[0]} to {chosen[-1]}"
    ends = tuple(pin_revision(find_source(target, name, Path.cwd()), "config.json") for name in (chosen[0], chosen[-1]))
    return Proposal(title, "\n".join(lines), about, ends, True)


def _branches(target: str) -> list[str]:
    try:
        return revisions_of(target)
    except QkscopeError:  # not reached, or not there: said where the model is asked for
        return []
