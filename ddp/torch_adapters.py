"""Our reducer and journal behind the method names by which PyTorch's class knows its own."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from zero_optim.compat.engine import eager
from zero_optim.compat.streams import HostCopy, is_asynchronous
from zero_optim.ddp.reducer.logging_data import LoggingData, LoggingSource
from zero_optim.ddp.reducer.reducer import Reducer


@dataclass(slots=True, eq=False)
class TorchReducerAdapter:
    """Our reducer under the method names by which PyTorch's class, and Lightning, know PyTorch's.

    Args:
        own: our reducer.

    Attributes:
        num_forwards: forward passes that have begun, and whose gradients are reduced.
    """

    own: Reducer
    num_forwards: int = 0

    @eager
    def prepare_for_forward(self) -> None:
        """Begin an iteration."""
        self.num_forwards += 1
        self.own.activity.begin("forward pass")
        self.own.check_finished(waits=False)

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """Expect a backward pass, though the last forward pass was under ``no_sync``."""
        self.own.expect(True)
        self.own.prepare(outputs)

    @eager
    def _rebuild_buckets(self) -> bool:
        return self.own.rebuild()

    @eager
    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        """Take the count of ranks that have not joined, which is still under way."""
        size = dist.get_world_size(self.own.process_group)
        record = self.own.begin_work("ranks that have not joined")

        def wait() -> None:
            with record.waiting():
                work.wait()

        def count() -> HostCopy:
            wait()
            return HostCopy(work.get_future().wait()[0])

        # On a GPU the copy is asked for before the forward pass is: so the CPU does not wait for that.
        copied = count() if is_asynchronous(self.own.params[0].device) and not use_static_world_size else None

        def divisor() -> float:
            if use_static_world_size:
                wait()
                return size
            return float((count() if copied is None else copied).read().item())

        self.own.divide_by(divisor)

    def _set_static_graph(self) -> None:
        self.own.set_static_graph()

    def _push_all_rebuilt_params(self) -> None:
        """Do nothing: the order is agreed when buckets are rebuilt."""

    def _install_post_backward_futures(self, futures: list[Future[object]]) -> None:
        for future in futures:
            self.own.wait_also(future)

    def _remove_autograd_hooks(self) -> None:
        self.own.close()

    def _check_reducer_finalized(self) -> None:
        self.own.check_finished()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        """Check the rate as PyTorch does, and do nothing: no times are taken, see `logging_data`.

        Raises:
            TypeError: it is no whole number.
            ValueError: it is below 1.
        """
        if not isinstance(rate, int):
            raise TypeError(f"expected the sample rate to be a whole number, got {rate!r}")
        if rate < 1:
            raise ValueError(f"expected a sample rate of at least 1, got {rate}")

    def _reset_state(self) -> None:
        self.own.reset()

    def _update_process_group(self, process_group: dist.ProcessGroup) -> None:
        self.own.use_group(process_group)


@dataclass(frozen=True, slots=True, eq=False)
class TorchLoggerAdapter:
    """Our journal under the method names by which PyTorch's class knows its logger.

    Args:
        journal: ours.
    """

    journal: LoggingSource

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing: no times are taken, see `logging_data`."""

    def set_error_and_log(self, error: str) -> None:
        """Do nothing: the error is raised."""

    def _set_static_graph(self) -> None:
        """Do nothing: the reducer's options are told."""

    def _set_uneven_input_join(self) -> None:
        self.journal.note("join_uneven_inputs", 1)

    def _get_ddp_logging_data(self) -> LoggingData:
        return self.journal.data()
