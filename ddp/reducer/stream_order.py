"""What may still be under way on streams of the device while a bucket is filled and launched.

Note [Streams of a backward pass]
    The engine runs a parameter's hook on the stream on which its gradient is accumulated: that on which the
    forward pass first used the parameter. Two branches of a model on two streams give hooks on both. On the
    CPU nothing is asked; elsewhere the stream is, by each hook. Tensor by tensor:

    - *A gradient*, until it is copied. Large ones are copied by their own hook, on their own stream. Small
      ones wait for others of the bucket, and the hook that copies them may run on another stream. It waits
      for all streams on which gradients of the bucket came, and records its use of them: their memory goes
      back to the stream that they were made on.
    - *A bucket's flat tensor.* Hooks write it on their streams. It is launched on the stream of whatever
      hook completes it, or the bucket before it, or at the end of the pass; that waits for all others.
      Collectives, and comm hooks, begin with the current stream. Each stream of a pass first waits for the
      beginning of the pass, where buckets may have been made anew, or a pass that broke off handed out.
    - *A result.* The engine has the stream of ``backward()`` wait for all on which gradients came, and
      calls us. Works and futures are waited for on that stream; futures also keep their tensors until it
      has used them. There results become gradients, by a copy or as views. So they are the user's, on the
      stream of ``backward()``, as without DDP. A sparse result is taken from its future for the same
      reason.
    - *A gradient of a parameter that perhaps nobody used*, put aside when its bucket is launched early: put
      back at the end, which records the use.
    - *The report* (`report`) is made, summed and copied to the CPU on the stream of ``backward()``.
    - *Casts* (`mixed_precision`) are made where the forward pass runs. Branches on other streams have to
      wait for that stream, as they do for parameters that were stepped there.

    An event is recorded when the stream changes, not when the gradient comes. It then stands for more than
    need be, but where there is one stream the pass records one event, at its beginning.
"""

import torch

from zero_optim.compat import streams


class StreamOrder:
    """Has whoever copies or launches a bucket wait for the streams its gradients came on; one a pass.

    See Note [Streams of a backward pass]. To be made on the stream on which the pass begins.

    Args:
        device: of the gradients; one with streams.
        num_buckets: how many there are.
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
        """Take note that a gradient has come on the current stream, before it is copied.

        Args:
            number: of its bucket.
        """
        stream = streams.current_stream(self._device)
        if stream != self._last[number]:
            self._change(number, stream)

    def join(self, number: int) -> bool:
        """Have the current stream wait for the others on which gradients of a bucket came.

        Returns:
            Whether there were others since this was called last.
        """
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
