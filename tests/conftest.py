"""Fixtures: one worker pool for the session, and the pool with a fixed world size for tests."""

import inspect
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

import sockets
from forked import fork_context
from pool import Pool, Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that run the ranks of all tests elsewhere than on the CPU over gloo."""
    parser.addoption(
        "--sockets", action="store_true", help="not through memory, see zero_optim.share_host_memory"
    )
    parser.addoption("--device", default="cpu", help="where tests put their tensors; see tests/on_device.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test for each world size of ``pool.on_ranks``."""
    mark = metafunc.definition.get_closest_marker("on_ranks")
    if mark is not None:
        sizes, slow, _, _ = mark.args
        more = [] if slow is None else [pytest.param(slow, marks=pytest.mark.slow)]
        metafunc.fixturenames.append("world_size")
        metafunc.parametrize("world_size", [*sizes, *more], ids=lambda size: f"{size} ranks")


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs the function of a test that has the mark of ``pool.on_ranks`` on every rank."""
    mark = pyfuncitem.get_closest_marker("on_ranks")
    if mark is None:
        return None
    _, _, fixture, timeout = mark.args
    given, size = pyfuncitem.funcargs, pyfuncitem.callspec.params["world_size"]
    args = [given[name] for name in inspect.signature(pyfuncitem.function).parameters]
    given[fixture].run(size, pyfuncitem.function, *args, timeout=timeout)
    return True


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails the session if a process started by a test, or by the pool, outlives it."""
    yield
    assert multiprocessing.active_children() == []


def pool_of(config: pytest.Config, context: Any) -> Pool:
    """A pool as the command line asks for it."""
    return Pool(context, config.getoption("--device"))


@pytest.fixture(autouse=True)
def through_sockets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the ranks of a test with the mark ``on_sockets`` to sockets; with `--sockets` those of all."""
    is_marked = request.node.get_closest_marker("on_sockets") is not None
    monkeypatch.setattr(sockets, "ALONE", is_marked or request.config.getoption("--sockets"))


@pytest.fixture(scope="session")
def pool(no_process_left: None, pytestconfig: pytest.Config) -> Iterator[Pool]:
    """The worker pool; most tests use ``ranks`` instead."""
    with pool_of(pytestconfig, None) as pool:
        yield pool


@pytest.fixture(scope="session")
def forked_pool(no_process_left: None, pytestconfig: pytest.Config) -> Iterator[Pool]:
    """A pool for calls that fail: its processes are forked, so that they are replaced quickly."""
    with pool_of(pytestconfig, fork_context()) as pool:
        yield pool


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["2 ranks", "4 ranks"])
def ranks(pool: Pool, request: pytest.FixtureRequest) -> Ranks:
    """Two ranks, then four, which is slow: for what holds at any world size."""
    return Ranks(pool, request.param)


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks_2_and_4(pool: Pool, request: pytest.FixtureRequest) -> Ranks:
    """Two ranks, then four: for what differs with more than two ranks, such as the order of a sum."""
    return Ranks(pool, request.param)


def ranks_of(size: int, fixture: str = "pool") -> Any:
    """A fixture: so many ranks of a pool."""

    @pytest.fixture
    def ranks(request: pytest.FixtureRequest) -> Ranks:
        return Ranks(request.getfixturevalue(fixture), size)

    return ranks


ranks1, ranks2, ranks3, ranks4 = map(ranks_of, (1, 2, 3, 4))
failing2, failing4 = ranks_of(2, "forked_pool"), ranks_of(4, "forked_pool")  # that may fail
