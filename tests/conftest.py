"""What all tests share: hypothesis profiles, the order of the folders, missing peers, the data folder."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import importlib.util
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before any peer is imported: deepspeed picks its accelerator on import, and no test may reach a hub. Workers
# and ranks share the cores, so none of them takes more than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("dev", max_examples=50, deadline=2000, print_blob=True)
# Whether a change passes depends on the change alone; new examples are looked for wherever people develop.
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

TESTS = Path(__file__).parent
LOST, STDERR = pytest.StashKey[list[str]](), pytest.StashKey[int]()
GRACE_S = 60.0
"""How long after its limit a test is waited for that not even a signal ends."""
sys.path.insert(0, str(TESTS / "shared"))  # what tests of several folders are made of

# The real frameworks that tests ask: distribution on the registry -> module.
PEERS = {
    "megatron-core": "megatron.core",
    "deepspeed": "deepspeed",
    "modelexpress": "modelexpress",
    "transformers": "transformers",
}
if sys.platform == "linux":  # there are no wheels for other systems
    PEERS["nixl-cu12"] = "nixl_cu12"

# Cheapest first: a broken law is seen before any process is started. Doctests of src/ go with the laws.
COST = ("unit", "laws", "docs", "cli", "hostile", "cases", "oracle", "dist", "e2e")
# What wants the machine for itself: it kills ranks, or waits for what has to come within a bound.
# It comes last, and with `-n` it runs one by one when the rest is done.
ALONE = (
    *(
        f"tests/dist/test_{name}.py"
        for name in ("convert_ranks", "refit_faults", "transports", "train_checkpoint")
    ),
    *(f"tests/dist/test_train_{name}.py" for name in ("faults", "no_hang", "together", "pipeline")),
    "tests/e2e/",
    "tests/oracle/test_vllm_refit.py",
)


def is_importable(module: str) -> bool:
    """Whether `module` can be found, without running more than its parents' `__init__`."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def missing_peers() -> list[str]:
    return [name for name, module in PEERS.items() if not is_importable(module)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-peers",
        action="store_true",
        help="fail at once where a peer is missing, do not skip",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())  # type: ignore[union-attr]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A call in C that does not return hears no signal: all stacks are printed, and the process ends."""
    mark = item.get_closest_marker("timeout")
    limit_s = float(mark.args[0] if mark is not None and mark.args else item.config.getini("timeout"))
    if not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--require-peers") and (missing := missing_peers()):
        raise pytest.UsageError(f"--require-peers: not installed: {', '.join(missing)}")


def pytest_report_header() -> list[str]:
    missing = missing_peers()
    present = [f"{name} {importlib.metadata.version(name)}" for name in PEERS if name not in missing]
    return [
        f"peers: {', '.join(present) or 'none'}",
        f"peers missing, their tests are skipped: {', '.join(missing) or 'none'}",
    ]


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as it does for people; workers of xdist ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def is_alone(nodeid: str) -> bool:
    """Whether a test, or all of a file, wants the machine for itself."""
    return nodeid.startswith(ALONE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def cost(item: pytest.Item) -> tuple[bool, int]:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else "laws"
        return is_alone(item.nodeid), COST.index(folder)

    items.sort(key=cost)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from side_by_side import SideBySide

    return SideBySide(config, log, is_alone=is_alone)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """A worker that died took tests with it that nobody may have named: the run has failed."""
    if error is not None:
        node.config.stash.setdefault(LOST, []).append(f"{node.gateway.id}: {error}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(LOST, []) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("peer"):
        for module in mark.args:
            if not is_importable(module):
                pytest.skip(f"the peer {module} is not installed")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder tests/data/, whose README states where each file comes from."""
    return TESTS / "data"
