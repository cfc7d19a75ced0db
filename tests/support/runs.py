"""How hypothesis runs here: the same examples every time, no deadline (the machine may be busy)."""

from hypothesis import HealthCheck, settings


def runs(examples: int) -> settings:
    """Settings for a number of examples."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
