"""Reads what `qkscope.page.pack` has packed, as the browser does."""

import base64
import json
import zlib

import numpy as np

from qkscope.page.pack import ENDS, STEPS, TYPES


def unsqueeze(text):
    """What was squeezed; the browser does the same."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


def from_log8(codes, low, high, steps):
    """What such bytes stand for; the browser does the same."""
    values = 10.0 ** (low + (codes.astype(np.float64) - 2) / steps * (high - low))
    return np.where(codes == 0, np.nan, np.where(codes == 1, 0.0, values))


def from_lin8(codes, ends):
    """What such bytes stand for; the browser does the same."""
    values = ends[..., :1] + (codes.astype(np.float64) - 1) / STEPS * (ends[..., 1:] - ends[..., :1])
    return np.where(codes == 0, np.nan, values)


def unpack(text, index, name):
    """What `Pack` was given under this name; the browser does the same."""
    data = zlib.decompress(base64.b64decode(text))
    return _read(data, index, name)


def _read(data, index, name):
    entry = index[name]
    if entry["type"] == "text":
        return data[entry["first"] : entry["first"] + entry["shape"][0]].decode("utf-8")
    shape = [len(entry["lines"]), *entry["shape"][1:]] if "lines" in entry else entry["shape"]
    count, kind = int(np.prod(shape)), np.dtype(TYPES[entry["type"]])
    raw = np.frombuffer(data, np.uint8, count * kind.itemsize, entry["first"])
    values = np.ascontiguousarray(raw.reshape(kind.itemsize, count).T).view(kind).reshape(shape)
    if "lines" in entry:
        whole = np.array(_read(data, index, entry["like"]))
        whole[entry["lines"]] = values
        values = whole
    if entry["type"] == "lin8":
        return from_lin8(values, np.asarray(_read(data, index, f"{name}{ENDS}"), dtype=np.float64))
    return from_log8(values, entry["low"], entry["high"], entry["steps"]) if entry["type"] == "log8" else values
