"""A model of an accelerator's streams, for tests on the CPU; see `modelled.model`."""

from modelled.clocks import Event, Stream
from modelled.memory import Race
from modelled.model import StreamsModel, modelled_streams

__all__ = ["Event", "Race", "Stream", "StreamsModel", "modelled_streams"]
