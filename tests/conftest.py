"""Settings every test shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine is no bug: nothing here is decided by how long an example took.
settings.register_profile("trefoil", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trefoil")
