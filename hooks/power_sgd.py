"""PowerSGD: gradients as products of two thin matrices, by one step of power iteration.

Vogels, Karimireddy and Jaggi, *PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization*, NeurIPS 2019 (arXiv:1905.13727), algorithms 1 and 2. For a gradient M (rows x columns) of rank
w, and Q (columns x rank) with orthonormal columns, the same on all ranks:

    P   = orthonormal(mean over w of M_w Q)       sent: rows x rank
    Q_w = M_w^T P;  Q = mean over w of Q_w        sent: columns x rank
    result      P Q^T                             the same on every rank
    error       M_w - P Q_w^T                     kept, added to the next gradient of rank w
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.hooks.bucket import GradBucket, dense_buffer
from zero_optim.hooks.exchange import group_of, start_average
from zero_optim.hooks.low_rank import Block, Round, Split
from zero_optim.hooks.memory import Errors, NamedParameters, Place, Register, check_options
from zero_optim.hooks.order import LaterStage

logger = logging.getLogger("zero_optim.hooks")

_Splitter: TypeAlias = Callable[["PowerSGDState", list[Place], int], Split]


class CompressionStats(NamedTuple):
    """How much was compressed so far, in elements.

    Attributes:
        rate: ``numel_before / numel_after``; 0 if nothing was compressed yet.
        numel_before: gradient elements that the hook was given since compression began.
        numel_after: elements sent for them.
    """

    rate: float
    numel_before: int
    numel_after: int


@dataclass(slots=True, eq=False)
class PowerSGDState:
    """Options and memories of `powerSGD_hook` and `batched_powerSGD_hook`; one for each model and rank.

    Making it does not communicate. With the first compressed bucket, all ranks make a second process group,
    except with NCCL and XCCL; see Note [Order of chained collectives] in `zero_optim.hooks.order`. PyTorch's
    class of this name needs compression to start after its DDP has rebuilt its buckets; here it may start at
    once.

    Args:
        process_group: the ranks that average; None stands for the default group.
        matrix_approximation_rank: columns of P and Q. A higher rank is closer to the gradient, and sends
            more.
        start_powerSGD_iter: number of iterations that are averaged without compression first, 0 or more:
            early gradients matter most.
        min_compression_rate: a matrix is compressed if that sends fewer than ``numel / min_compression_rate``
            elements. `batched_powerSGD_hook` always compresses.
        use_error_feedback: add what compression left out to the next gradient; needs as much memory as the
            gradients, in float32 at least.
        warm_start: start from the last Q, not from a random one. This improves the approximation over several
            iterations.
        orthogonalization_epsilon: a direction of length r is scaled by ``r / (r + epsilon)``, so very short
            directions vanish; 0 keeps all.
        random_seed: for the random Qs; the same on all ranks.
        compression_stats_logging_frequency: number of iterations between two messages to the logger
            ``zero_optim.hooks``.

    Attributes:
        iteration: number of iterations whose last bucket the hook has seen.

    Raises:
        ValueError: an option out of range.
    """

    process_group: dist.ProcessGroup | None = None
    _: KW_ONLY
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1_000
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    iteration: int = field(default=0, init=False)
    numel_before: int = field(default=0, init=False, repr=False)
    numel_after: int = field(default=0, init=False, repr=False)
    register: Register = field(default_factory=Register, init=False, repr=False)
    errors: Errors = field(default_factory=Errors, init=False, repr=False)
    queries: dict[tuple[int, ...], Tensor] = field(default_factory=dict, init=False, repr=False)
    later: LaterStage | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options."""
        least = {
            "matrix_approximation_rank": 1,
            "start_powerSGD_iter": 0,
            "orthogonalization_epsilon": 0,
            "random_seed": 0,
            "compression_stats_logging_frequency": 1,
        }
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ValueError(f"expected {name} of at least {bound}, got {getattr(self, name)}")
        if not self.min_compression_rate > 0:
            raise ValueError(
                f"expected a min_compression_rate above 0, got {self.min_compression_rate}: 2 compresses "
                "what becomes less than half as large"
            )

    def compression_stats(self) -> CompressionStats:
        """Return how much was compressed so far. Does not communicate."""
        rate = self.numel_before / self.numel_after if self.numel_after else 0.0
        return CompressionStats(rate, self.numel_before, self.numel_after)

    def state_dict(self, named_parameters: NamedParameters | None = None) -> dict[str, Any]:
        """Copy the memories, to continue from them bit for bit. Does not communicate.

        Errors differ between ranks, so each rank saves and loads its own. ``torch.load(weights_only=True)``
        can read a file of the result.

        Args:
            named_parameters: with names the state fits any buckets of the next job. Without names, the next
                job must start with the same buckets as this one, which is checked.
        """
        return {
            "options": self._memory_options(),
            "iteration": self.iteration,
            "numel_before": self.numel_before,
            "numel_after": self.numel_after,
            "register": self.register.state_dict(named_parameters),
            "errors": self.errors.state_dict(),
            "queries": {key: query.clone() for key, query in self.queries.items()},
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], named_parameters: NamedParameters | None = None
    ) -> None:
        """Load memories. Each rank loads what it saved itself; does not communicate.

        Args:
            state_dict: from `state_dict`; it is not changed.
            named_parameters: names, if it was saved with names.

        Raises:
            ValueError: it was saved with other options or for other parameters.
        """
        check_options(state_dict["options"], self._memory_options())
        self.register.load_state_dict(state_dict["register"], named_parameters)
        self.errors.load_state_dict(state_dict["errors"])
        self.queries = {tuple(key): query.clone() for key, query in state_dict["queries"].items()}
        self.iteration = state_dict["iteration"]
        self.numel_before, self.numel_after = state_dict["numel_before"], state_dict["numel_after"]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle options and memories, without process groups."""
        options = {
            f.name: getattr(self, f.name) for f in fields(self) if f.init and f.name != "process_group"
        }
        return {"options": options, "memories": self.state_dict()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        """Unpickle with the default process group; to use another one, set ``process_group`` before use."""
        self.__init__(**pickled["options"])  # type: ignore[misc]
        self.load_state_dict(pickled["memories"])

    def _memory_options(self) -> dict[str, Any]:
        names = ("matrix_approximation_rank", "use_error_feedback", "warm_start", "random_seed")
        return {name: getattr(self, name) for name in names}


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, with each matrix compressed to low rank separately. All ranks of the group call.

    A gradient of more than two dimensions is a matrix whose rows are the first dimension. Vectors, and
    matrices too small for `min_compression_rate`, are sent uncompressed, with the Ps. Two all-reduces for
    each bucket; the second uses the hook's own process group, if it has one. Data is sent in the dtype of the
    bucket, and computed in float32 at least. If a gradient has an infinity or a NaN, so has the result on
    every rank, and what was remembered of it is dropped.

    Args:
        state: options and memories.
        bucket: dense gradients of any floating dtype.

    Raises:
        ValueError: sparse gradients, or a loaded state does not fit the parameters.
    """
    return _compress(state, bucket, _by_parameter, "powerSGD_hook")


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, compressed to low rank as a whole: as a square matrix, padded with zeros.

    It computes fewer and larger products than `powerSGD_hook`. The result is less exact, as rows of the
    square have no meaning. If the buckets change, errors stay with their parameters, and the Qs of changed
    buckets start at random again. All ranks of the group call; two all-reduces for each bucket.

    Args:
        state: options and memories.
        bucket: dense gradients of any floating dtype.

    Raises:
        ValueError: sparse gradients, or a loaded state does not fit the parameters.
    """
    return _compress(state, bucket, _as_square, "batched_powerSGD_hook")


def _compress(
    state: PowerSGDState, bucket: GradBucket, split_up: _Splitter, name: str
) -> torch.futures.Future[torch.Tensor]:
    buffer, group = dense_buffer(bucket, name), group_of(state.process_group)
    places = state.register.places(bucket)
    iteration, state.iteration = state.iteration, state.iteration + bucket.is_last()
    if iteration < state.start_powerSGD_iter:
        return start_average(group, buffer)
    if state.later is None:
        state.later = LaterStage.beside(group, buffer.device)
    split = split_up(state, places, buffer.numel())
    _count(state, buffer.numel(), split, bucket.is_last())
    errors = state.errors.recall(places, split.numel, buffer) if state.use_error_feedback else None
    queries = state.queries if state.warm_start else None
    if queries is not None:
        _drop_stale(queries, split.blocks)
    seed = (state.random_seed * 1_000_003 + iteration) * 1_000_003
    epsilon = state.orthogonalization_epsilon
    return Round(buffer, split, errors, queries, seed, epsilon).run(group, state.later)


def _by_parameter(state: PowerSGDState, places: list[Place], numel: int) -> Split:
    """Choose the matrices that are worth compressing, in families of one shape."""
    by_shape: dict[tuple[int, int], list[Block]] = {}
    rest = []
    for place in places:
        block = _block(place, state.matrix_approximation_rank)
        if block is None or block.numel_sent * state.min_compression_rate >= place.numel:
            rest.append((place.offset, place.numel))
        else:
            by_shape.setdefault((block.rows, block.columns), []).append(block)
    return Split(list(by_shape.values()), rest, numel)


def _block(place: Place, rank: int) -> Block | None:
    if len(place.shape) < 2 or place.numel == 0:
        return None
    rows, columns = place.shape[0], place.numel // place.shape[0]
    return Block((place.number,), place.offset, rows, columns, min(rank, rows, columns))


def _as_square(state: PowerSGDState, places: list[Place], numel: int) -> Split:
    """Take the whole bucket as one square matrix."""
    side = math.isqrt(numel - 1) + 1 if numel else 0
    key = tuple(place.number for place in places)
    block = Block(key, 0, side, side, min(state.matrix_approximation_rank, side))
    return Split([[block]] if side else [], [], side * side)


def _drop_stale(queries: dict[tuple[int, ...], Tensor], families: Sequence[Sequence[Block]]) -> None:
    """Drop the Qs of buckets that no longer exist: another bucket has some of their parameters."""
    current = {block.key for family in families for block in family}
    present = {number for key in current for number in key}
    for key in [key for key in queries if key not in current and present.intersection(key)]:
        del queries[key]


def _count(state: PowerSGDState, numel: int, split: Split, is_last: bool) -> None:
    state.numel_before += numel
    state.numel_after += split.numel_sent
    # `iteration` already counts this iteration when its last bucket is here.
    done = state.iteration - state.start_powerSGD_iter - 1
    if is_last and done % state.compression_stats_logging_frequency == 0:
        rate, before, after = state.compression_stats()
        logger.info(
            "PowerSGD, iteration %d: %d elements sent for %d, %.1f to 1",
            state.iteration - 1, after, before, rate,
        )  # fmt: skip
