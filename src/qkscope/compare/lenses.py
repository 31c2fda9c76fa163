"""The lenses of which publications have means."""

from qkscope.compare.lens_means import LensMeans
from qkscope.compare.plasticity import PLASTICITY_MEANS
from qkscope.compare.rotation import ROTATION_MEANS

LENS_MEANS: dict[str, LensMeans] = {each.name: each for each in (ROTATION_MEANS, PLASTICITY_MEANS)}
