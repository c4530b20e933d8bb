"""The distributed suite: `mpiexec -n K python -m pytest -p no:cacheprovider tests/mpi`, for any K.

Every rank runs pytest over the same tests in the same order, and all of them wait after each test.
Only rank 0 reports. A test that fails or hangs on any rank is printed by that rank and ends the
job, since the others may be waiting in a collective for a rank that will never come.
"""

import os
import sys
import threading
import time
import traceback
import zlib

import pytest
from mpi4py import MPI

COMM = MPI.COMM_WORLD
SPEAK_S = 0.5  # lets ranks that fail in the same way speak too before the job is ended
STDERR = pytest.StashKey[int]()  # standard error as it was before pytest captures it


def say(stderr, title, text):
    """Print `text` under `title` in one piece, each line with this rank's number."""
    lines = (f"[rank {COMM.rank}] {line}\n" for line in [title, *text.splitlines()])
    os.write(stderr, "".join(lines).encode())
    time.sleep(SPEAK_S)


def end_job(title, text):
    """Print why, and end all ranks."""
    say(2, title, text)
    COMM.Abort(1)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(n, ...): skip the test unless run on n, ... ranks")
    config.addinivalue_line("markers", "spread: run a third of the cases, others on other ranks")
    config.stash[STDERR] = os.dup(2)
    if COMM.rank > 0:
        config.pluginmanager.unregister(name="terminalreporter")


def pytest_report_header():
    name, version = MPI.get_vendor()
    return f"mpi: {name} {'.'.join(map(str, version))}, {COMM.size} ranks"


def pytest_collection_modifyitems(config, items):
    _spread(config, items)
    for item in items:
        mark = item.get_closest_marker("ranks")
        if mark and COMM.size not in mark.args:
            wanted = " or ".join(map(str, mark.args))
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} ranks, runs on {COMM.size}"))


def _spread(config, items):
    """Leave out two of three cases of what is marked so; three numbers of ranks have them all.

    ZEROMP_SLOW=1 runs all of them on any number.
    """
    if os.environ.get("ZEROMP_SLOW"):
        return
    left_out = [
        item
        for item in items
        if item.get_closest_marker("spread") and (zlib.crc32(item.nodeid.encode()) + COMM.size) % 3
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session):
    mine = [item.nodeid for item in session.items]
    if mine != COMM.bcast(mine):
        end_job("rank 0 collected other tests, or in another order; here:", "\n".join(mine))


def pytest_runtest_logreport(report):
    if report.failed and COMM.size > 1:
        said = "".join(f"\n--- {title}\n{text}" for title, text in report.sections)
        end_job(f"FAILED ({report.when}) {report.nodeid}", report.longreprtext + said)


def pytest_collectreport(report):
    if report.failed and COMM.size > 1:
        end_job(f"FAILED (collect) {report.nodeid}", report.longreprtext)


def pytest_internalerror(excrepr):
    if COMM.size > 1:
        end_job("pytest failed:", str(excrepr))


def pytest_runtest_logfinish():
    COMM.Barrier()


def pytest_timeout_set_timer(item, settings):
    """Replace pytest-timeout's way: a rank that waits inside MPI never gets to see a signal."""

    def give_up():
        calls = [
            call
            for thread, frame in sys._current_frames().items()
            for call in traceback.extract_stack(frame)
            if thread != threading.get_ident() and "site-packages" not in call.filename
        ]
        title = f"HANGS for {settings.timeout:g} s in {item.nodeid}, here:"
        say(item.config.stash[STDERR], title, "".join(traceback.format_list(calls)))
        os._exit(1)

    timer = threading.Timer(settings.timeout, give_up)
    item.cancel_timeout = timer.cancel
    timer.start()
    return True


@pytest.fixture(scope="session")
def world():
    """All ranks of the job."""
    import zeromp as zm

    return zm.world(hook=False)
