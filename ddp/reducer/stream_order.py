"""The order of the device's streams while a bucket is filled and launched.

Note [Streams of a backward pass]
    A parameter's hook runs on the stream on which the forward pass first used the parameter, so gradients of
    a bucket may come on several. The hook that copies small ones, or launches the bucket, waits for all of
    them, and records its use. Each stream first waits for the beginning of the pass. The engine has the
    stream of ``backward()`` wait for all others. Events are recorded when the stream changes.
"""

import torch

from zero_optim.compat import streams


class StreamOrder:
    """Makes a bucket wait for the streams of its gradients. Made where the pass begins, on its stream."""

    def __init__(self, device: torch.device, num_buckets: int) -> None:
        self._device = device
        self._begun = streams.recorded_event(device)
        self._behind_begin = [streams.current_stream(device)]  # streams that come behind the beginning
        self._last: list[streams.Stream | None] = [None] * num_buckets  # by bucket, the stream used last
        self._others: list[dict[streams.Stream, streams.Event]] = [{} for _ in range(num_buckets)]

    def came(self, number: int) -> None:
        """Note, before its copy, that a gradient of a bucket has come on the current stream."""
        stream = streams.current_stream(self._device)
        if stream == self._last[number]:
            return
        if stream not in self._behind_begin:
            streams.wait_for_event(self._device, self._begun)
            self._behind_begin.append(stream)
        last, self._last[number] = self._last[number], stream
        others = self._others[number]
        others.pop(stream, None)  # what this stream was given before comes first anyway
        if last is not None:
            with streams.using_stream(self._device, last):
                others[last] = streams.recorded_event(self._device)

    def join(self, number: int) -> bool:
        """Make the current stream wait for the others of a bucket; return whether there were any."""
        self.came(number)
        others = self._others[number]
        if not others:
            return False
        for event in others.values():
            streams.wait_for_event(self._device, event)
        self._others[number] = {}
        return True
