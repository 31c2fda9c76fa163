"""Options that several commands share. Nothing heavy is imported here."""

from __future__ import annotations

import argparse

PER_DOUBLING = 16  # tokens of a log-uniform sample each time that the position doubles


def add_study(parser: argparse.ArgumentParser) -> None:
    """Which study, and where its results are."""
    parser.add_argument("study", metavar="STUDY", help="the study file (YAML)")
    parser.add_argument("--out", metavar="DIR", help="results folder (default: results/<study>)")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Whether code that comes with a checkpoint may run."""
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with a checkpoint: it can do anything you can do on this machine "
        "(default: refuse such checkpoints); recorded in the provenance",
    )


def add_capture_options(parser: argparse.ArgumentParser) -> None:
    """What a capture does in addition to summing, and where."""
    parser.add_argument(
        "--evict",
        action="store_true",
        help="delete a checkpoint's downloads from the Hub cache once its moments are saved (ten 3B checkpoints are 60 "
        "GB); folders of your own are never deleted",
    )
    parser.add_argument(
        "--vectors",
        type=vector_rate,
        nargs="?",
        const=(None, 0),
        metavar="RATE",
        help="also keep the raw vectors of a random share RATE of all tokens, one parquet file per head, in "
        "<results>/vectors/ (without RATE: on average one token per position bucket; log or log:N: log-uniform, N "
        f"tokens each time the position doubles, {PER_DOUBLING} by default)",
    )
    parser.add_argument("--vector-tokens", action="store_true", help="with --vectors: also keep the text of each token")
    add_shard_options(parser)
    add_engine_options(parser)


def add_shard_options(parser: argparse.ArgumentParser) -> None:
    """What the capture of a shard may leave out or replace."""
    add_trust(parser)
    parser.add_argument(
        "--skip-bad-checkpoints",
        action="store_true",
        help="continue without checkpoints that cannot be measured (NaN weights, a damaged file, a refused model) "
        "instead of stopping; they are listed at the end, by `qkscope status`, and in the provenance",
    )
    parser.add_argument(
        "--skip-bad-documents",
        action="store_true",
        help="leave out documents that make the model fail instead of stopping; they are listed in the provenance",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace finished moments that were made from other weights, documents, settings or versions; without it, "
        "those that still fit the study are reused, and any that do not cause an error before anything runs",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Where the work runs."""
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--engine", default="local", metavar="NAME", help="local (default) or ray (pip install 'qkscope[ray]')"
    )
    where.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="local: number of processes that share the GPUs and cores (default: 1, this process); "
        "ray: number of workers (default: as many as the cluster has room for)",
    )
    where.add_argument(
        "--ray-address", metavar="ADDRESS", help="a running Ray cluster: auto, host:port or ray://host:port"
    )
    where.add_argument(
        "--cpus-per-worker",
        type=float,
        metavar="N",
        help="ray: CPUs per worker (default: 1 with a GPU, otherwise a whole node)",
    )
    where.add_argument(
        "--gpus-per-worker", type=float, metavar="N", help="ray: GPUs per worker (default: 1 if the cluster has GPUs)"
    )


def vector_rate(text: str) -> tuple[float | None, int]:
    """`0.01`, `log` or `log:16`: a share of tokens, and of a log-uniform sample how many for each doubling."""
    word, _, amount = text.partition(":")
    if word == "log":
        try:
            return None, positive(amount) if amount or ":" in text else PER_DOUBLING
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}: write log:16, with a number of tokens") from None
    try:
        rate = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: write a share of tokens, log, or log:16") from None
    if not 0 < rate <= 1:
        raise argparse.ArgumentTypeError(f"{rate:g}: a share of tokens must be above 0 and at most 1")
    return rate, 0


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number
