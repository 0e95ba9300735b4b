"""How Hypothesis tries examples: on a busy machine any of them may take long, and what is slow there is no mistake."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Examples are fresh in every run, so many runs try many; half of what is usual is enough for one.
settings.register_profile("suite", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
