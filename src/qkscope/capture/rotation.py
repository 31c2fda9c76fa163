"""Measure what a layer's RoPE is: planes, angles and scale.

One short forward pass at positions that reach the run's last one: RoPE scaling may depend on it. When a layer reaches
its kernel it is run again on the same hidden states: without rotation; with a quarter turn in every plane (which shows
the coordinates that pair, and the direction of the rotation); and with a quarter turn in some planes, other ones for
each token (which shows the column of cos and sin that each coordinate reads). The angles are those of the model's own
cos and sin. A rotation that does not reproduce the vectors at the kernel is not returned. Cost: the projections of a
few tokens three times per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qkscope.capture.backbone import call_backbone, forward_signature
from qkscope.capture.replay import POSITIONS, ReplayTap, cos_and_sin, no_rotation, quarter_turn
from qkscope.capture.tap import AttentionCall
from qkscope.errors import CaptureError
from qkscope.layers import Rotation
from qkscope.moments.unrotate import rotate, rotation_angles

HALF, SINGLE, DOUBLE = 2.0**-8, 2.0**-24, 2.0**-53  # roundings; of the half precisions the coarser (bfloat16)
TABLE_ROUNDINGS = 4  # how many of them cos, sin and the angles before them may be off
SPREAD = 32  # positions besides the powers of two: their rounding errors average out
DIGIT_TOKENS = 4  # tokens that show one digit of the columns' numbers, where there are so many
ROUNDINGS = 8  # how many roundings of its precision a rotated coordinate may be off, as a share of the largest

Array = NDArray[np.float64]
_Made = tuple[Any, nn.Module, tuple[Any, ...], dict[str, Any]]  # position embeddings, and the call that made them


@dataclass(frozen=True)
class Rotations:
    """Each layer's rotation (None where nothing rotates), or why it is not known."""

    by_layer: dict[int, Rotation | None]
    unknown: dict[int, str]
    failure: str | None = None  # why no layer's is known

    def why(self, layer: int) -> str:
        """Why this layer has none."""
        return self.failure or self.unknown.get(layer, "its queries and keys do not follow its position embeddings")


def probed_positions(context: int) -> Tensor:
    """A few positions from 0 to the last of `context`, each at most twice the one before."""
    powers = {1 << power for power in range((context - 1).bit_length())}
    spread = {round(share * (context - 1) / SPREAD) for share in range(SPREAD + 1)}
    return torch.tensor(sorted(position for position in powers | spread if position < context))


def measure_rotations(backbone: nn.Module, tokens: Tensor, positions: Tensor) -> Rotations:
    """The rotation of each layer that calls in, measured with these tokens at these positions."""
    measured, made = Rotations({}, {}), list[_Made]()

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], embeddings: Any) -> None:
        made.append((embeddings, module, args, kwargs))

    def observe(call: AttentionCall) -> None:
        try:
            measured.by_layer[call.layer] = _MeasuredLayer(tap, call, positions).rotation(made)
        except CaptureError as error:
            measured.unknown[call.layer] = str(error)

    handles = []
    for module in backbone.modules():
        names = forward_signature(module).parameters
        if "position_ids" in names and POSITIONS not in names and module is not backbone:
            handles.append(module.register_forward_hook(keep, with_kwargs=True))
    arguments = {"use_cache": False} if "use_cache" in forward_signature(backbone).parameters else {}
    try:
        with ReplayTap(backbone, observe) as tap:
            call_backbone(backbone, input_ids=tokens, position_ids=positions.to(tokens.device)[None], **arguments)
    finally:
        for handle in handles:
            handle.remove()
    return measured


class _MeasuredLayer:
    """One call's vectors before rotation, and what quarter turns by some columns of cos and sin make of them."""

    def __init__(self, tap: ReplayTap, call: AttentionCall, positions: Tensor) -> None:
        self._tap, self._call, self._positions = tap, call, positions
        query, key = tap.replay(no_rotation)
        self._cos, self._sin = cos_and_sin(tap.embeddings)
        if len(self._cos) != len(positions):
            raise CaptureError("its position embeddings are not one row per token")
        self._rotating = (self._sin != 0).any(dim=0)
        quarter = tap.replay(lambda embeddings: quarter_turn(embeddings, self._rotating))
        # Keys that do not follow this layer's rotation are another layer's (Gemma 3n, Gemma 4).
        self._own_keys = not (torch.equal(key, quarter[1]) and not torch.equal(query, quarter[0]))
        self._unrotated, self._quarter = self._joined(query, key), self._joined(*quarter)
        # How far apart equal coordinates may be: some families norm or rotate in float32 at any precision.
        eps = max(torch.finfo(each).eps for each in (call.query.dtype, torch.float32))
        self._largest = float(self._unrotated.abs().max())
        self._close = ROUNDINGS * eps * self._largest

    def rotation(self, made: list[_Made]) -> Rotation | None:
        """What the layer's rotation is; CaptureError where that cannot be measured."""
        # A norm after the rotation (Llama 4) rounds otherwise when coordinates change places; that is no rotation.
        rotated = (self._unrotated - self._quarter).abs().amax(dim=(0, 1)) > self._close
        if not bool(rotated.any()):
            return None
        pairs, columns = self._pairs(rotated), self._columns()
        planes = [columns[first] for first, _ in pairs]
        if planes != [columns[second] for _, second in pairs]:
            raise CaptureError("the coordinates of a plane do not rotate by the same angle")
        cos, sin = cos_and_sin(_finer(self._tap.embeddings, made))
        positions = self._positions.numpy()
        angles, scale = angles_of(cos[:, planes].double().numpy(), sin[:, planes].double().numpy(), positions)
        # Planes by their lowest coordinate, each with its coordinates in the order that makes the angle positive.
        order = sorted(range(len(pairs)), key=lambda plane: min(pairs[plane]))
        forwards = [pairs[plane] if angles[plane] > 0 else pairs[plane][::-1] for plane in order]
        sizes = tuple(abs(float(angles[plane])) for plane in order)
        rotation = Rotation(tuple((first, second) for first, second in forwards), sizes, scale)
        # Does it take the unrotated vectors to those that the kernel got?
        got = rotate(self._unrotated, rotation, positions)
        off = float((got - self._joined(self._call.query, self._call.key)).abs().max())
        # Whatever the model's precision, cos and sin are of angle x position in float32, off by a rounding of that.
        angle = max(sizes) * float(self._positions.max())
        if off > self._close + ROUNDINGS * torch.finfo(torch.float32).eps * angle * self._largest:
            raise CaptureError(f"its rotation, as measured, gives queries and keys that are off by {off:.3g}")
        return rotation

    def _joined(self, query: Tensor, key: Tensor) -> Tensor:
        """(heads, tokens, width): all heads below each other."""
        vectors = (query, key) if self._own_keys else (query,)
        return torch.cat([each.flatten(0, 1).cpu().double() for each in vectors])

    def _pairs(self, rotated: Tensor) -> list[tuple[int, int]]:
        """The planes: a quarter turn takes the first coordinate to the second, and minus the second to the first."""
        plain, quarter = (each[..., rotated].flatten(0, 1) for each in (self._unrotated, self._quarter))
        # The unrotated coordinate that each rotated one is nearest to, with the same or the other sign: all at once.
        overlap = plain.mT @ quarter
        squares = plain.square().sum(dim=0)[:, None]
        nearest = torch.cat([squares - 2 * overlap, squares + 2 * overlap]).argmin(dim=0)
        sources, signs = nearest % plain.shape[1], 1 - 2 * (nearest // plain.shape[1])
        off = (plain[:, sources] * signs - quarter).abs().amax(dim=0)
        places = rotated.nonzero().flatten().tolist()
        if bool((off > self._close).any()):
            raise CaptureError(f"a quarter turn takes no coordinate to coordinate {places[int(off.argmax())]}")
        partners = [places[each] for each in sources.tolist()]
        follows = dict(zip(places, zip(partners, signs.tolist(), strict=True), strict=True))
        pairs = [(partner, place) for place, (partner, sign) in follows.items() if sign == 1]
        if any(follows[first] != (second, -1) for first, second in pairs) or 2 * len(pairs) != len(places):
            raise CaptureError("its rotated coordinates do not form planes")
        return pairs

    def _columns(self) -> list[int]:
        """A column of cos and sin for each coordinate, by the digits of its number: each token shows one of them.

        Equal columns (cos and sin often have each plane twice) rotate together and count as the first of them.
        """
        curves = torch.cat([self._cos, self._sin]).mT.tolist()
        first: dict[tuple[float, ...], int] = {}
        numbers = torch.tensor([first.setdefault(tuple(curve), column) for column, curve in enumerate(curves)])
        tokens, digits = len(self._positions), int(numbers.max()).bit_length()
        at_once = max(1, min(digits, tokens // DIGIT_TOKENS))
        columns = torch.zeros(self._unrotated.shape[-1], dtype=torch.long)
        for begin in range(0, digits, at_once):
            shown = begin + torch.arange(tokens) % at_once
            marked = self._rotating & (numbers >> shown[:, None] & 1).bool()
            some = self._joined(*self._tap.replay(lambda embeddings, by=marked: quarter_turn(embeddings, by)))
            for digit in range(begin, min(begin + at_once, digits)):
                here = [each[:, shown == digit] for each in (some, self._quarter, self._unrotated)]
                nearer = (here[0] - here[1]).abs().amax(dim=(0, 1)) < (here[0] - here[2]).abs().amax(dim=(0, 1))
                columns += nearer.long() << digit
        return [int(column) for column in columns]


def _finer(embeddings: Any, made: list[_Made]) -> Any:
    """The same embeddings in float32, if they are coarser and the module that made them can compute them so."""

    def parts(of: Any) -> list[Tensor]:
        return [part for part in (of if isinstance(of, tuple | list) else [of]) if isinstance(part, Tensor)]

    def equal(left: list[Tensor], right: list[Tensor]) -> bool:
        same = len(left) == len(right) and all(a.shape == b.shape for a, b in zip(left, right, strict=True))
        return same and all(torch.equal(a.to(b.device), b) for a, b in zip(left, right, strict=True))

    coarse = parts(embeddings)
    if coarse[0].is_complex() or torch.finfo(coarse[0].dtype).eps <= torch.finfo(torch.float32).eps:
        return embeddings
    for known, module, args, kwargs in made:
        if equal(parts(known), coarse):
            wide = lambda of: of.float() if isinstance(of, Tensor) and of.is_floating_point() else of  # noqa: E731
            again = module.forward(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()})
            if equal([part.to(coarse[0].dtype) for part in parts(again)], coarse):
                return again
    return embeddings


# -- angles from cos and sin -------------------------------------------------------------------------------


def angles_of(cos: Array, sin: Array, positions: NDArray[np.int64]) -> tuple[Array, float]:
    """Radians per token of each plane, and the scale in cos and sin; CaptureError unless they explain all positions.

    `cos` and `sin` are (positions, planes); positions start with 0, 1 and none is more than twice the one before.
    """
    scale, both = float(cos[0].max()), np.concatenate([cos, sin])
    # The relative rounding of the table, and of the product of angle and position that it was made from.
    table = product = DOUBLE
    if np.array_equal(both, both.astype(np.float32)):
        bits = both.astype(np.float32).view(np.uint32)
        table, product = (SINGLE if (bits & 0x1FFF).any() else HALF), SINGLE  # half precision: the last 13 are empty
    if np.abs(np.hypot(cos, sin) / scale - 1).max() > TABLE_ROUNDINGS * table:
        raise CaptureError("its cos and sin do not have one scale for all planes and positions")
    t = positions[1:, None].astype(np.float64)
    phases = np.arctan2(sin, cos)[1:]
    for place in range(1, len(t)):  # add multiples of 2π, so that each is near what the ones before predict
        expected = phases[place - 1] / t[place - 1] * t[place]
        phases[place] += 2 * np.pi * np.round((expected - phases[place]) / (2 * np.pi))
    angle = np.abs(phases[-1] / t[-1]) * t
    noise = table * np.minimum(1.0, angle) + product * angle
    weights = (t / noise) ** 2
    fitted = (weights * phases / t).sum(axis=0) / weights.sum(axis=0)
    # The float32 numbers nearby where they explain the phases, so that angles do not depend on context or device.
    single = fitted.astype(np.float32).astype(np.float64)
    off = np.abs(phases - rotation_angles(single, positions[1:]))
    angles = np.where((off <= TABLE_ROUNDINGS * table * np.minimum(1.0, angle)).all(axis=0), single, fitted)
    allowed = TABLE_ROUNDINGS * (max(table, SINGLE) + SINGLE * angle)
    if (np.abs(phases - rotation_angles(angles, positions[1:])) > allowed).any():
        raise CaptureError("its angles do not grow in proportion to position")
    return angles, scale
