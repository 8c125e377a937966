"""What may still be under way on streams of the device while a bucket is filled and launched.

Note [Streams of a backward pass]
    The engine runs a parameter's hook on the stream on which the forward pass first used the parameter. So
    gradients of a bucket may come on several. Tensor by tensor:

    - *A gradient*, until it is copied: the hook that copies small ones waits for all streams on which
      gradients of the bucket came, and records its use of them.
    - *A bucket's flat tensor* is launched on the stream of the hook that completes it, or at the end of the
      pass; that waits for all others. Each stream first waits for the beginning of the pass, where buckets
      may have been made anew.
    - *A result* becomes a gradient on the stream of ``backward()``, which the engine has wait for all others.
    - *A gradient that was set aside* is put back at the end, which records the use. *The report* is made,
      summed and copied on the stream of ``backward()``.
    - *Casts* (`casting`) are made where the forward pass runs; branches on other streams wait for that.

    An event is recorded when the stream changes, not when the gradient comes: with one stream once a pass.
"""

import torch

from zero_optim.compat import streams


class StreamOrder:
    """Has whoever copies or launches a bucket wait for the streams its gradients came on; one a pass.

    It is made on the stream on which the pass begins.
    """

    def __init__(self, device: torch.device, num_buckets: int) -> None:
        self._device = device
        self._begun = streams.recorded_event(device)
        self._known = [streams.current_stream(device)]  # streams that come behind the beginning
        self._last: list[streams.Stream | None] = [None] * num_buckets  # by bucket, the stream used last
        self._others: list[dict[streams.Stream, streams.Event]] = [{} for _ in range(num_buckets)]

    @classmethod
    def of(cls, device: torch.device, num_buckets: int) -> "StreamOrder | None":
        """Make one for a pass that begins; None on a device without streams."""
        return cls(device, num_buckets) if streams.is_asynchronous(device) else None

    def came(self, number: int) -> None:
        """Take note that a gradient of a bucket has come on the current stream, before it is copied."""
        stream = streams.current_stream(self._device)
        if stream != self._last[number]:
            self._change(number, stream)

    def join(self, number: int) -> bool:
        """Have the current stream wait for the others on which gradients of a bucket came, if any did."""
        self.came(number)
        others = self._others[number]
        if not others:
            return False
        for event in others.values():
            streams.wait_for_event(self._device, event)
        self._others[number] = {}
        return True

    def _change(self, number: int, stream: streams.Stream) -> None:
        if stream not in self._known:
            streams.wait_for_event(self._device, self._begun)
            self._known.append(stream)
        last, self._last[number] = self._last[number], stream
        others = self._others[number]
        others.pop(stream, None)  # what this stream was given before comes first anyway
        if last is not None:
            with streams.using_stream(self._device, last):
                others[last] = streams.recorded_event(self._device)
