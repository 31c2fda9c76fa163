"""The demo: a small SmolLM3 trained on the spot, so that a first look needs no network and no GPU.

`prepare_demo` turns the Python standard library into ten checkpoints, held-out documents and a study file; the
ordinary `run` path takes it from there. About two minutes on two cores; a second call reuses what is there.
Only `train` needs torch and transformers; it is imported when there is something to train.
"""

from qkscope.demo.prepare import prepare_demo
from qkscope.demo.settings import DemoProgress, DemoSettings

__all__ = ["DemoProgress", "DemoSettings", "prepare_demo"]
