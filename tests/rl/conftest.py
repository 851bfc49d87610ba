"""Property tests take the same examples every time, and no clock: a busy machine is no failure."""

from hypothesis import settings

settings.register_profile("claims", deadline=None, derandomize=True, database=None)
settings.load_profile("claims")
