"""The demo: a small SmolLM3 trained on Python's standard library in about two minutes, without network or GPU."""

from qkscope.demo.prepare import prepare_demo
from qkscope.demo.settings import DemoProgress, DemoSettings

__all__ = ["DemoProgress", "DemoSettings", "prepare_demo"]
