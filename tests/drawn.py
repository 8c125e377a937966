"""How Hypothesis draws inputs: the same ones in every run."""

from hypothesis import HealthCheck, settings

# No deadline, and slow draws are fine: how long an example takes says nothing here. No database: nothing is
# left in the checkout.
SAME = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("same", SAME)


def draw_the_same() -> None:
    """Let all tests of the module that calls this have these settings."""
    settings.load_profile("same")
