"""Where queries and keys lie along position."""

from qkscope.lenses.base import Lens
from qkscope.lenses.profile.table import BEND, PROFILE

LENS = Lens(name="profile", title="Profile", question="How do queries and keys move?", tables=(PROFILE, BEND))
