"""These tests need the frameworks; ``make integrations`` runs them, in an environment of its own."""

from importlib.util import find_spec
from pathlib import Path

import pytest

FRAMEWORKS = ("accelerate", "lightning", "peft", "transformers")
collect_ignore_glob = [] if all(map(find_spec, FRAMEWORKS)) else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Frameworks warn; warnings of this library stay errors, and in `test_scaled_steps` all."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem != "test_scaled_steps":
            item.add_marker(pytest.mark.filterwarnings("ignore", "error:::zero_optim"))
