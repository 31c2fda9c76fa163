"""`qkscope rope`: its options, and what it does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.cli.arguments import add_trust

if TYPE_CHECKING:
    from qkscope.capture.rope_check import LayerCheck
    from qkscope.layers import LayerFacts

DEFAULT_CONTEXT = 4096  # where neither the user nor the config states one


def rope_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope rope`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, a GGUF file, or a Hub model")
    add("--revision", metavar="REV", help="a branch, tag, or commit of a Hub model")
    add("--with", dest="other", metavar="MODEL", help="compare with this model instead of the config")
    add("--with-revision", metavar="REV", help="revision of the other model (of MODEL, if --with is not given)")
    about = "sequence length, which some scaling depends on (default: the longest of the config)"
    add("--context", type=int, metavar="TOKENS", help=about)
    add("--json", action="store_true", help="print all layers as JSON")
    add_trust(parser)


def rope(options: argparse.Namespace) -> int:
    """Check whether a model rotates queries and keys as its config says.

    The rotation of every layer is measured from the queries and keys that reach its kernel, and compared with the
    config's RoPE parameters (through the functions of transformers), with the metadata of a GGUF file, or with another
    model. One row per group of identical layers.

    Exit code 0: everything agrees. 1: some layer differs, or a rotation could not be measured.

    examples:
      qkscope rope HuggingFaceTB/SmolLM3-3B
      qkscope rope runs/my_run/checkpoint-1000 --with runs/my_run/checkpoint-2000
      qkscope rope model.gguf --json
    """
    from qkscope.capture.rope_check import check_rotations, compare_rotations, gguf_rotation
    from qkscope.cli.commands import quiet_libraries

    quiet_libraries()
    source, config, context, layers, unmeasured = _measured(options.model, options.revision, options)
    if options.other or options.with_revision:
        name = options.other or options.model
        name = f"{name}@{options.with_revision}" if options.with_revision else name
        other = _measured(options.other or options.model, options.with_revision, options)
        checks, against = compare_rotations(layers, other[3]), name
    else:
        metadata = None
        if source.gguf_file:
            from qkscope.capture.weights import gguf_fields

            metadata = gguf_rotation(gguf_fields(source.location, source.gguf_file), layers[0].head_dim)
        checks = check_rotations(layers, config, context, unmeasured=unmeasured, metadata=metadata)
        against = "its GGUF metadata and config" if metadata else "its config"
    unknown = [each for each in checks if each.facts.rotation is None and each.facts.rotary != "nope"]
    different = [each for each in checks if each.problem]
    if options.json:
        print(json.dumps(_as_json(str(source), against, context, checks), indent=2))
    else:
        print("\n".join(_lines(str(source), against, context, checks)))
    return 1 if different or unknown else 0


def _measured(model: str, revision: str | None, options: argparse.Namespace) -> tuple[Any, Any, int, Any, Any]:
    """Source, text config, context, and the layers of a model as they rotate."""
    from qkscope.capture.hub import pin_revision
    from qkscope.capture.load import MISSING, check_config, find_value, load_backbone, load_config, text_part
    from qkscope.capture.probe import probe_model
    from qkscope.capture.source import find_source

    trusted = options.trust_remote_code
    source = pin_revision(find_source(model, revision, Path.cwd(), trust_remote_code=trusted), "config.json")
    config = load_config(source)
    longest = find_value(config, "max_position_embeddings")
    context = options.context or (longest if longest is not MISSING and isinstance(longest, int) else DEFAULT_CONTEXT)
    check_config(config, context)
    declared = text_part(config)
    probed = probe_model(load_backbone(source, config), context=context)
    return source, declared, context, probed.layers, probed.unmeasured


def _lines(name: str, against: str, context: int, checks: Sequence[LayerCheck]) -> list[str]:
    from qkscope.capture.rope_check import layer_groups
    from qkscope.text import aligned, counted

    rows = [("layers", "attention", "measured", "declared" if "config" in against else Path(against).name, "")]
    for numbers, check in layer_groups(checks):
        verdict = check.problem or ("not checked" if _unknown(check) else "ok")
        rows.append((numbers, _attention(check.facts), check.measured, check.declared, verdict))
    different = [each for each in checks if each.problem]
    unknown = [each for each in checks if _unknown(each)]
    lines = [f"{name}: rotations over {context:,} tokens against {against}", "", *aligned(rows), ""]
    if different:
        lines.append(f"{counted(len(different), 'layer')} of {len(checks)} differ")
    if unknown:
        lines.append(f"{counted(len(unknown), 'layer')} could not be measured")
    return lines if different or unknown else [*lines, f"all {counted(len(checks), 'layer')} agree"]


def _unknown(check: LayerCheck) -> bool:
    return check.facts.rotation is None and check.facts.rotary != "nope"


def _attention(facts: LayerFacts) -> str:
    return f"{facts.attention} {facts.attention_window}" if facts.attention_window else facts.attention


def _as_json(name: str, against: str, context: int, checks: Sequence[LayerCheck]) -> dict[str, Any]:
    layers = [
        {
            "layer": each.facts.layer,
            "rotary": each.facts.rotary,
            "attention": each.facts.attention,
            "attention_window": each.facts.attention_window,
            "angles": None if each.facts.rotation is None else list(each.facts.rotation.angles),
            "scale": None if each.facts.rotation is None else each.facts.rotation.scale,
            "measured": each.measured,
            "declared": each.declared,
            "problem": each.problem,
        }
        for each in checks
    ]
    return {"model": name, "against": against, "context": context, "layers": layers}
