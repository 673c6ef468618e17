"""A small Inkling whose greedy answers are known without running it.

The weights are constructed, not trained. ``election`` holds the rule that the
model computes, ``weights`` the tensors that make the architecture compute it.
"""

from inkling_mtp_staging.tiny_inkling.recipe import Recipe
from inkling_mtp_staging.tiny_inkling.shape import Shape

__all__ = ["Recipe", "Shape"]
