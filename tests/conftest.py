"""Settings of every test."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)  # other work may hold a core
settings.load_profile("shared-machine")
