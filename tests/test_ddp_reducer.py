"""What the reducer sees of a forward pass's output."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_optim.ddp.reducer.graph import tensors_in


@dataclass
class Output:
    main: Tensor
    rest: dict[str, Any] = field(default_factory=dict)


def test_a_container_that_holds_itself_is_looked_into_once() -> None:
    value: list[Any] = [torch.zeros(1)]
    value.append({"again": value, "more": [value, value]})
    output = Output(torch.zeros(2))
    output.rest["output"] = output
    assert [tensor.numel() for tensor in tensors_in(value)] == [1]
    assert [tensor.numel() for tensor in tensors_in(output)] == [2]
