"""What a rank keeps beside its parameters: master copies to step, and averages to evaluate.

Both are made for owned parameters only, so a rank holds few of them, and both travel in state
dicts as entries of the parameter's state, "master" and "ema".

Note [Masters and their parameters]
    A checkpoint loaded into the model must not be undone by a stale master. No version counter sees every
    way of writing to a parameter, so the values are compared: an element that is not its master rounded was
    changed from outside, and its master becomes that value. The other elements keep their masters. A mask, a
    clamp or a padding row that a script writes after each step would otherwise round the whole tensor each
    time, and what masters are for would be lost. A NaN is not equal to itself and is taken over, which
    changes nothing; 0.0 and -0.0 are equal, and the master stays.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_optim.compat.streams import is_asynchronous
from zero_optim.errors import StateMismatchError

MASTER = "master"
EMA = "ema"


class Leaves:
    """What the local optimizer steps: this rank's parameters, or master copies of them.

    Args:
        master_dtype: parameters of a narrower floating-point dtype are stepped in this one; None
            steps every parameter itself.

    Attributes:
        masters: parameter -> its master copy.
    """

    def __init__(self, master_dtype: torch.dtype | None) -> None:
        if master_dtype is not None and not isinstance(master_dtype, torch.dtype):
            raise TypeError(f"expected master_dtype to be a torch.dtype or None, got {master_dtype!r}")
        if master_dtype is not None and not master_dtype.is_floating_point:
            raise ValueError(f"expected master_dtype to be a floating-point dtype, got {master_dtype}")
        self._dtype = master_dtype
        self.masters: dict[Tensor, Tensor] = {}

    def leaf(self, param: Tensor) -> Tensor:
        """Give what is stepped for an owned parameter; a master copy is made the first time."""
        if self._dtype is None or not param.is_floating_point() or param.itemsize >= self._dtype.itemsize:
            return param
        if param not in self.masters:
            self.masters[param] = Parameter(param.detach().to(self._dtype), requires_grad=param.requires_grad)
        return self.masters[param]

    def drop(self, params: Iterable[Tensor]) -> None:
        """Forget the masters of parameters that could not be added."""
        for param in params:
            self.masters.pop(param, None)

    def take_in(self, params: Iterable[Tensor] | None = None) -> None:
        """Give the masters the parameters' gradients, and values where those were changed from outside.

        See Note [Masters and their parameters]. The CPU does not wait for an asynchronous device.

        Args:
            params: those whose masters are meant; None for all.
        """
        for param, master in self._some(params).items():
            _follow(param, master)
            master.grad = None if param.grad is None else param.grad.to(master.dtype)

    @torch.no_grad()
    def put_back(self, params: Iterable[Tensor] | None = None) -> None:
        """Round the masters, or some, to the parameters, and let their gradients go."""
        masters = self._some(params)
        if masters:
            torch._foreach_copy_(list(masters), list(masters.values()))
        for master in masters.values():
            master.grad = None

    def _some(self, params: Iterable[Tensor] | None) -> dict[Tensor, Tensor]:
        if params is None:
            return self.masters
        return {param: self.masters[param] for param in params if param in self.masters}

    def taken_from(self, entries: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, Tensor]:
        """Take masters out of loaded entries, ready for `load`; all that may raise does so here.

        Raises:
            StateMismatchError: a master does not have its parameter's shape, or is no dense tensor.
        """
        return _taken_from(MASTER, self.masters, entries)

    def load(self, saved_masters: Mapping[Tensor, Tensor]) -> None:
        """Take over masters that were loaded; a parameter without one starts from its own value."""
        for param, master in self.masters.items():
            saved = saved_masters.get(param)
            master.data.copy_(param if saved is None else saved)
            if saved is not None:
                param.data.copy_(master)


class WeightAverage:
    """An exponential moving average of this rank's parameters, updated at every step.

    ``average = decay * average + (1 - decay) * parameter``, from the parameter's value when the
    optimizer was built. Polyak and Juditsky, "Acceleration of stochastic approximation by
    averaging", 1992.

    Args:
        decay: between 0 and 1; None keeps no average.
        leaves: masters, which are averaged where there are any.

    Attributes:
        averages: parameter -> average, in the leaf's dtype.
    """

    def __init__(self, decay: float | None, leaves: Leaves) -> None:
        if decay is not None and type(decay) not in (int, float):
            raise TypeError(f"expected ema_decay to be a number or None, got {decay!r}")
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"expected ema_decay from 0 to below 1, got {decay}")
        self._decay = decay
        self._leaves = leaves
        self._swapped: dict[Tensor, Tensor] | None = None  # own values, while the averages stand in
        self.averages: dict[Tensor, Tensor] = {}

    def add(self, params: Iterable[Tensor]) -> None:
        """Begin averages at the present values."""
        if self._decay is not None:
            self.averages.update({param: self._leaves.leaf(param).detach().clone() for param in params})

    def check_out(self) -> None:
        """Refuse to go on while the averages stand in the model.

        Raises:
            RuntimeError: they do.
        """
        if self._swapped is not None:
            raise RuntimeError("the model holds the averaged weights: leave averaged_weights() first")

    @torch.no_grad()
    def update(self, params: Iterable[Tensor] | None = None) -> None:
        """Move every average, or those of some parameters, towards its parameter."""
        averaged = [
            param for param in (self.averages if params is None else params) if param in self.averages
        ]
        if self._decay is not None and averaged:
            values = [self._leaves.leaf(param) for param in averaged]
            torch._foreach_lerp_([self.averages[param] for param in averaged], values, 1 - self._decay)

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the averages into the parameters, whose values are kept aside.

        Raises:
            RuntimeError: no averages are kept, or they stand in the model already.
        """
        if self._decay is None:
            raise RuntimeError("no averages are kept: build the optimizer with ema_decay=…")
        self.check_out()
        self._swapped = {param: param.detach().clone() for param in self.averages}
        for param, average in self.averages.items():
            param.copy_(average)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Put the parameters' own values back."""
        for param, value in (self._swapped or {}).items():
            param.copy_(value)
        self._swapped = None

    def taken_from(self, entries: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, Tensor]:
        """Take averages out of loaded entries, ready for `load`; all that may raise does so here.

        Raises:
            StateMismatchError: an average does not have its parameter's shape, or is no dense tensor.
        """
        return _taken_from(EMA, self.averages, entries)

    def load(self, saved_averages: Mapping[Tensor, Tensor]) -> None:
        """Take over averages that were loaded; a parameter without one starts from its own value."""
        for param, average in self.averages.items():
            saved = saved_averages.get(param)
            average.copy_(self._leaves.leaf(param).detach() if saved is None else saved)


@torch.no_grad()
def _follow(param: Tensor, master: Tensor) -> None:
    """Give a master those elements of its parameter that are not the master's, rounded."""
    rounded = master.to(param.dtype)
    # To look first whether any differ is quicker on the CPU. Elsewhere it would wait for the device.
    if is_asynchronous(param.device) or not torch.equal(param, rounded):
        torch.where(param == rounded, master, param.to(master.dtype), out=master.data)


@torch.no_grad()
def _taken_from(
    name: str, held: Mapping[Tensor, Tensor], entries: Mapping[Tensor, dict[str, Any]]
) -> dict[Tensor, Tensor]:
    """Take the entry of some name for each parameter that has one, as a plain tensor like what is held."""
    taken = {}
    for param, own in held.items():
        saved = entries.get(param, {}).get(name)
        if saved is None:
            continue
        fits = isinstance(saved, Tensor) and saved.layout is torch.strided and saved.shape == param.shape
        loses_imaginary = fits and saved.is_complex() and not own.is_complex()
        if not fits or saved.is_meta or loses_imaginary:
            got = f"shape {tuple(saved.shape)}" if isinstance(saved, Tensor) else f"{type(saved).__name__}"
            kind = f" ({saved.dtype} on {saved.device}, {saved.layout})" if isinstance(saved, Tensor) else ""
            wanted = "dense tensor" if own.is_complex() else "dense real tensor"
            raise StateMismatchError(
                f"expected '{name}' of a parameter of shape {tuple(param.shape)} to be a {wanted} "
                f"of that shape, got {got}{kind}"
            )
        is_alike = type(saved) is Tensor and (saved.dtype, saved.device) == (own.dtype, own.device)
        taken[param] = saved if is_alike else torch.empty_like(own.detach()).copy_(saved)
    return taken


class OwnedStateView(Mapping[Any, Any]):
    """The state of this rank's parameters as its users see it: by parameter, masters and averages in.

    Args:
        state: the local optimizers' state, by leaf; global entries have keys of their own.
        leaves: parameters stepped through masters.
        average: averages kept.
    """

    def __init__(self, states: Sequence[Mapping[Any, Any]], leaves: Leaves, average: WeightAverage) -> None:
        self._states = states
        self._leaves = leaves
        self._average = average

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - whatever the class keeps
        leaf = self._leaves.masters.get(key, key) if isinstance(key, Tensor) else key
        found = next((state[leaf] for state in self._states if leaf in state), None)
        if not isinstance(key, Tensor):
            return found
        entries = dict(found or {})
        for name, table in ((MASTER, self._leaves.masters), (EMA, self._average.averages)):
            if key in table:
                entries[name] = table[key].detach()
        if found is None and not entries:
            raise KeyError(key)
        return entries

    def __iter__(self) -> Iterator[Any]:
        param_of = {master: param for param, master in self._leaves.masters.items()}
        keys = [key for state in self._states for key in state]
        shown = [param_of.get(key, key) if isinstance(key, Tensor) else key for key in keys]
        return iter(dict.fromkeys([*shown, *self._leaves.masters, *self._average.averages]))

    def __len__(self) -> int:
        return sum(1 for _ in self)
