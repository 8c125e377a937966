"""Hooks on modules tell when calls begin and end, also inside each other and after exceptions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zero_optim.shard.module_calls import Call, ModuleCalls


class Model(nn.Module):
    """Can call itself, or raise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.calls_itself = 0
        self.raises: type[BaseException] | None = None

    def forward(self, x: Tensor) -> object:
        if self.calls_itself:
            self.calls_itself -= 1
            return self(x)
        if self.raises is not None:
            raise self.raises
        return self.inner(x)


class Log(ModuleCalls):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.told: list[str] = []
        for module in model.modules():
            self.watch(module, ends=True)

    def begin_pass(self, args: object, kwargs: object) -> None:
        self.told.append("pass")

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        self.told.append(f"{type(module).__name__} begins")

    def after_forward(self, call: Call, output: object, *, raised: bool) -> object:
        self.told.append(f"{type(call.module).__name__} {'raised' if raised else 'returned'}")
        return output


INNER = ["Linear begins", "Linear returned"]
PLAIN = ["pass", "Model begins", *INNER, "Model returned"]
RAISED = ["pass", "Model begins", "Model raised"]


def refuse(*_: object) -> None:
    raise ArithmeticError


def called_in_handler(model: Model) -> None:
    try:
        refuse()
    except ArithmeticError:
        model(torch.ones(2))


def refusing(register: Callable[[Model], Callable[..., torch.utils.hooks.RemovableHandle]]) -> object:
    def use(model: Model) -> None:
        handle = register(model)(refuse, prepend=True)
        with pytest.raises(ArithmeticError):
            model(torch.ones(2))
        handle.remove()

    return use


def calling_itself(model: Model) -> None:
    model.calls_itself = 2
    model(torch.ones(2))


def raising(kind: type[BaseException]) -> object:
    def use(model: Model) -> None:
        model.raises = kind
        with pytest.raises(kind):
            model(torch.ones(2))
        model.raises = None

    return use


USES = {
    "itself": (calling_itself, ["pass", *3 * ["Model begins"], *INNER, *3 * ["Model returned"]]),
    "raises": (raising(ValueError), RAISED),
    "interrupted": (raising(KeyboardInterrupt), ["pass", "Model begins"]),
    "in a handler": (called_in_handler, PLAIN),
    "a hook in front raises": (refusing(lambda model: model.register_forward_pre_hook), []),
    "a hook in front of a part raises": (
        refusing(lambda model: model.inner.register_forward_pre_hook),
        RAISED,
    ),
    "a hook behind raises": (
        refusing(lambda model: model.register_forward_hook),
        [*PLAIN[:-1], "Model raised"],
    ),
}


@pytest.mark.parametrize("first", USES)
@pytest.mark.parametrize("then", [name for name in USES if name != "a hook in front raises"])
def test_each_call_is_told_also_after_one_that_was_interrupted(first: str, then: str) -> None:
    model = Model()
    log = Log(model)
    for name in (first, then):
        use, told = USES[name]
        log.told.clear()
        use(model)  # type: ignore[operator]
        assert log.told == told
    log.told.clear()
    model(torch.ones(2))
    assert log.told == PLAIN
    assert not log.under_way
