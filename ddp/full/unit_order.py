"""The order in which units are needed. Nothing here communicates.

Note [The next unit]
    The order in which units were needed in the pass before tells which one is needed next. Its gather is
    started when the one before is whole. An order is noted for each outermost module that is called, and for
    backward passes. It is the same on every rank if the ranks call the same modules. That they do is needed
    anyway, as every gather is a collective.
"""


class UnitOrder:
    """The order in which units are needed in passes of one kind.

    Attributes:
        before: numbers of units, in the order in which the pass before needed them.
        now: likewise for the pass that is under way.
        is_under_way: one is.
    """

    def __init__(self) -> None:
        self.before: list[int] = []
        self.now: list[int] = []
        self.is_under_way = False

    def begin(self) -> None:
        """Begin a pass."""
        self.now.clear()
        self.is_under_way = True

    def reached(self, number: int) -> int | None:
        """Take note that a unit is needed; tell which one came next in the pass before."""
        place = len(self.now)
        self.now.append(number)
        if self.before[place : place + 1] == [number] and place + 1 < len(self.before):
            return self.before[place + 1]
        return None

    def end(self) -> None:
        """End a pass."""
        self.before, self.now = self.now, []
        self.is_under_way = False

    def break_off(self) -> None:
        """End a pass that an exception has ended: the order of the one before holds."""
        self.now.clear()
        self.is_under_way = False
