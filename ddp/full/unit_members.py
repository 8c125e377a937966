"""Whether the modules of units still have the parameters that they had. Nothing here communicates.

Note [Parameters in the place of others]
    ``weight_norm`` and ``parametrize`` take a parameter out of its module, and compute it from new ones. Done
    after the model was wrapped, these begin with what a freed parameter shows, NaN, and no owner steps them.
    The old parameter gets no gradient, which is an error unless unused parameters are looked for. So each
    training pass looks whether modules have other parameters than they had: 0.1 µs for each parameter.

    Parameters that have gone, with nothing in their place, are unused. Those that have other names, as after
    pruning, are still there.
"""

import weakref
from collections.abc import Sequence
from operator import is_

from torch import Tensor, nn

_REPLACED = (
    "{gone} of a fully sharded model has gone, and {new} came in its place, as by weight_norm(), parametrize "
    "or an assignment. No rank keeps or steps it. Do that before the model is wrapped"
)


class UnitMembers:
    """The parameters that each module of a model has.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of_modules: list[tuple[str, weakref.ref[nn.Module], Sequence[Tensor | None]]] = []
        for name, module in model.named_modules():
            if module._parameters:
                held = tuple(module._parameters.values())
                self._of_modules.append((name, weakref.ref(module), held))

    def check(self) -> None:
        """Look at all modules.

        Raises:
            RuntimeError: one has new parameters in the place of what it had; names them.
        """
        for number, (name, reference, had) in enumerate(self._of_modules):
            module = reference()
            if module is None:
                continue
            held = module._parameters
            if len(held) != len(had) or not all(map(is_, held.values(), had)):
                self._compare(name, module, had)
                self._of_modules[number] = name, reference, tuple(held.values())

    def _compare(self, name: str, module: nn.Module, had: Sequence[Tensor | None]) -> None:
        known = {id(param) for _, _, params in self._of_modules for param in params}
        now = dict(module.named_parameters())
        are_here = {id(param) for param in now.values()}
        gone = [param for param in had if param is not None and id(param) not in are_here]
        new = [f"{name}.{own}".lstrip(".") for own, param in now.items() if id(param) not in known]
        if gone and new:
            shapes = ", ".join(str(tuple(param.shape)) for param in gone)
            what = f"a parameter of {name or 'the outermost module'} of shape {shapes}"
            raise RuntimeError(_REPLACED.format(gone=what, new=", ".join(new)))
