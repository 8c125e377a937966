"""They need frameworks, or packages of classes; ``make integrations`` runs them, each in its environment."""

from importlib.util import find_spec
from pathlib import Path

import pytest

FRAMEWORKS = ("accelerate", "lightning", "peft", "transformers")
CLASSES = ("bitsandbytes", "heavyball", "pytorch_optimizer", "torchao")
collect_ignore_glob = [] if all(map(find_spec, FRAMEWORKS)) else ["test_[!c]*.py"]
collect_ignore = [] if all(map(find_spec, CLASSES)) else ["test_classes.py", "test_classes_timm.py"]
collect_ignore += [] if find_spec("ray") else ["test_ray.py"]
collect_ignore += [] if all(map(find_spec, ("deepspeed", "fairscale"))) else ["test_checkpoints_of_others.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Frameworks warn; warnings of this library stay errors."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore", "error:::zero_optim"))
