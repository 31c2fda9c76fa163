"""What a process has of a machine: its GPUs, threads and memory."""

from __future__ import annotations

import gc
import os

import torch


def visible_gpus() -> list[str]:
    """The names (as CUDA_VISIBLE_DEVICES has them) of the GPUs this process may use."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        return [name.strip() for name in asked.split(",") if name.strip()]
    return [str(index) for index in range(torch.cuda.device_count())]


def take_share(threads: int, gpus: list[str]) -> None:
    """Keep to so many threads and these GPUs; before the first use of CUDA."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    torch.set_num_threads(threads)


def release_memory() -> None:
    """Give back what is no longer in use."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
