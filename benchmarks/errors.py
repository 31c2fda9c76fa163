"""Are the errors right? By simulation, and on SmolLM2-135M; the numbers go into docs/errors.md.

`python benchmarks/errors.py` runs both parts on two processes (about three and eight minutes of computing);
`--part` runs one of them. Each rewrites its own section of the page and nothing else.
"""

import argparse
import os
import re
from pathlib import Path

import pandas as pd

PAGE = Path(__file__).parent.parent / "docs/errors.md"
SAMPLES = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("simulated", "pretrained", "both"), default="both")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="simulated samples of documents")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    os.nice(10)
    if options.part in ("simulated", "both"):
        write_section("simulated", simulated(options.samples, options.processes))
    if options.part in ("pretrained", "both"):
        write_section("pretrained", pretrained())
    return 0


def simulated(samples: int, processes: int) -> str:
    import errors_simulated as simulation

    found = simulation.coverage(simulation.many_samples(samples, processes), simulation.truth())
    print(found.to_string())
    return coverage_table(found, samples)


def coverage_table(found: pd.DataFrame, samples: int) -> str:
    """The section of the page, from what `coverage` returned."""
    import errors_simulated as simulation

    lines = [
        f"{samples} samples of {simulation.DOCUMENTS} documents in {simulation.GROUPS} groups.",
        "",
        "| number | truth | bias | spread of the samples | error they claim | 95 % intervals that hold the truth |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.iterrows():
        numbers = " | ".join(f"{row[part]:.4f}" for part in ("truth", "bias", "spread", "error"))
        lines.append(f"| {name} | {numbers} | {row['covered']:.1%} |")
    return "\n".join(lines)


def pretrained() -> str:
    import errors_pretrained as real

    return ratio_table(real.measured(real.captured()))


def ratio_table(found: dict[str, dict[str, float]]) -> str:
    """The section of the page, from what `measured` returned."""
    lines = [
        "| number | jackknife / bootstrap, each document a group | 8 groups | halves: differences in errors, r.m.s. |",
        "|---|---|---|---|",
    ]
    for name, row in found.items():
        lines.append(f"| `{name}` | {row['one document each']:.2f} | {row['8 groups']:.2f} | {row['halves']:.2f} |")
    return "\n".join(lines)


def write_section(name: str, text: str) -> None:
    """Put text between the page's marks of that name."""
    page = PAGE.read_text(encoding="utf-8")
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marks.search(page):
        raise SystemExit(f"{PAGE} has no section {name!r}")
    PAGE.write_text(marks.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
