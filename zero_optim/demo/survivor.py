"""A rank that goes on when another one dies, with ``--survive``: in the same process, in a new group."""

import logging
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from zero_optim import checkpoint
from zero_optim.demo import ranks, saved, text
from zero_optim.demo.config import RunConfig
from zero_optim.demo.failing import write_failure
from zero_optim.demo.loop import train
from zero_optim.demo.meeting import Meeting, Round
from zero_optim.demo.ranks import Ranks
from zero_optim.demo.run_log import Past, RunLog
from zero_optim.demo.trainer import Shard, Trainer
from zero_optim.errors import DivergedError, StalledError

_OWN_FAULT = (DivergedError, BrokenPipeError)  # not because another rank has died


class Survivor:
    """One process of a run, in as many groups as it takes.

    Args:
        config: of the run.
        meeting: with the launcher and the other processes.
        process: number of this one.
    """

    def __init__(self, config: RunConfig, meeting: Meeting, process: int) -> None:
        self._config = config
        self._meeting = meeting
        self._process = process
        self._past = Past()
        self._trainer: Trainer | None = None
        self._run_log: RunLog | None = None
        self._news: list[str] = []

    def work(self) -> None:
        """Train to the end, unless this process is left out of a round."""
        # A rank that ended is news here, no error; and what ends the run is reported.
        logging.getLogger("zero_optim").addFilter(lambda record: record.levelno < logging.ERROR)
        last = -1
        with ExitStack() as screen:
            shards: list[Shard] | None = None
            while shards is None:
                rounds = self._meeting.rounds_after(last)
                current, last = rounds[-1], rounds[-1].number
                self._news += [each.news for each in rounds if each.news]
                if self._process not in current.members:
                    return
                if self._meeting.come(current, self._process):
                    shards = self._train(current, screen)
        if self._run_log is not None:
            self._run_log.close(shards)
        dist.destroy_process_group()

    def _train(self, current: Round, screen: ExitStack) -> list[Shard] | None:
        """Train in one group; gives what each rank keeps. None if that broke off, which is reported."""
        place = self._form(current)
        try:
            trainer = self._begin(place, screen)
            train(trainer, self._run_log, self._past)
            return trainer.shards()
        except _OWN_FAULT:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a death leads to; the launcher knows if there was one
            write_failure(error, self._meeting.report(current.number, self._process))
        # Here no traceback refers to the old group any more.
        if self._trainer is not None:
            self._trainer.let_go()
        dist.destroy_process_group()
        return None

    def _form(self, current: Round) -> Ranks:
        rank, size = current.members.index(self._process), len(current.members)
        try:
            return ranks.form(self._meeting.store(current), rank, size)
        except RuntimeError as error:
            # PyTorch has counted a group that there is not: ranks that count differently do not meet.
            raise StalledError(
                "the ranks could not connect, as another one may just have died: resume the run"
            ) from error

    def _begin(self, place: Ranks, screen: ExitStack) -> Trainer:
        """Make the trainer, or bring it into the new group; tell what happened."""
        config = self._config
        newest = checkpoint.latest(Path(config.out) / saved.FOLDER)
        source = config.resume if newest is None else str(newest)
        is_new = self._trainer is None or newest is None
        if newest is not None and self._trainer is not None:
            self._trainer.go_on(place, newest)
        else:
            self._trainer = None  # the memory of the old one is free before there is a new one
            self._trainer = Trainer(config, place, text.load(config.text, config.context))
            if source is not None:
                self._trainer.restore(source)
        line = self._line(place.world_size, None if source is None else self._trainer.step)
        if place.rank == 0:
            self._show(self._trainer, source, screen, is_new=is_new)
        if line and self._run_log is not None:
            self._run_log.display.say(line)
        self._past.deaths += [line] if line else []
        self._news = []
        return self._trainer

    def _show(self, trainer: Trainer, source: str | None, screen: ExitStack, *, is_new: bool) -> None:
        """Show the run as rank 0, which this process may only be now."""
        if self._run_log is not None:
            self._run_log.go_back(trainer, source)
            return
        self._run_log = RunLog(trainer, source, self._past)
        if is_new:
            self._run_log.open(saved.look(Path(source)) if source is not None else None)
        screen.enter_context(self._run_log.display)

    def _line(self, world_size: int, step: int | None) -> str:
        """Say what happened since the last group; empty if nothing did."""
        if not self._news:
            return ""
        who = "1 rank goes" if world_size == 1 else f"{world_size} ranks go"
        where = f"from update {step}"
        if step is None:
            where = "from the start, as no checkpoint was complete yet"
        return f"{'; '.join(self._news)}; {who} on {where}"
