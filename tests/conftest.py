"""Hypothesis draws the same examples in every run, and a slow machine is no failure."""

from hypothesis import settings

settings.register_profile("zeromp", deadline=None, derandomize=True)
settings.load_profile("zeromp")
