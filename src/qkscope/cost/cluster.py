"""The machines a study is costed on: what they have, as far as a study's time depends on it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from qkscope.errors import InputError


@dataclass(frozen=True)
class Cluster:
    """Rates are peaks per second; `utilization` says which share of a device's peaks is reached.

    The defaults of a device are an A100 with 80 GB. All others are assumptions to be replaced by measured ones.
    """

    devices: int = 8
    per_model: int | None = None  # devices that share one model's layers; None: as few as its memory fits in
    flops: float = 312e12  # of a device, in the dtype the model runs in
    flops32: float = 19.5e12  # of a device in float32 without TF32, in which most products of the sums are made
    flops64: float = 19.5e12  # of a device in float64, in which the first products of each shard are made
    utilization: float = 0.4  # the share of peak that ordinary code reaches, of all kinds of FLOPs and of bandwidth
    memory: float = 80e9  # bytes of a device
    memory_bandwidth: float = 2e12  # bytes/s of a device
    disk_bandwidth: float = 2e9  # bytes/s at which a worker reads weights
    storage_bandwidth: float = 1e9  # bytes/s of the results folder, shared by all workers
    download: float = 1e9  # bytes/s from the Hub, shared by all workers
    tokenize: float = 300e3  # tokens/s of a worker: one core, a fast tokenizer
    checksum: float = 500e6  # bytes/s at which one core reads or writes a moments file with its checksum
    host_flops: float = 15e9  # of each core of the machine that makes the tables
    table_numbers: float = 800e3  # of tables per second that one core makes of its results and writes
    table_start: float = 3.0  # seconds until a process that makes tables has started
    report_start: float = 20.0  # seconds of a report of few checkpoints: most of it figures, drawn on all cores
    report_numbers: float = 500e3  # of tables per second that a report reads and sums up
    cores: int = 16  # of that machine
    evict: bool = False  # whether a checkpoint's downloads go when its sums are safe

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name != "evict" and not value > 0:
                raise InputError(f"cluster: {field.name} should be above 0, not {value}")
        if self.utilization > 1:
            raise InputError(f"cluster: utilization is a share of peak, at most 1, not {self.utilization}")
        if self.per_model is not None and self.per_model > self.devices:
            raise InputError(f"cluster: {self.per_model} devices per model, but there are only {self.devices}")
