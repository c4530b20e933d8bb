"""Files on disk: what is written is read, a full disk and a truncated file are errors (K13).

Nothing here trains; `test_offload.py` does.
"""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest

import zeromp as zm
from zeromp.store import Disk, Placement, Store
from zeromp.store.disk import WORTH_A_TRIAL, Trial
from zeromp.store.files import MappedFile, aligned
from zeromp.store.folder import JobFolder, remove_dead

SIZES = (0, 1, 511, 512, 513, 4095, 4096, 4097, 10_000_000)  # those of O-071


def numbers(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def disk_of(path, rank=0, num_ranks=1, way="cached", keep=False, job="job"):
    return Disk(path, job, rank, num_ranks, way, keep)


def store_of(path, tile=4096, way="cached", **placed):
    placement = Placement.parse(placed or {"optimizer": "disk"}, tile)
    return Store(placement=placement, disk=disk_of(path, way=way))


# ---- O-071: what is written is read --------------------------------------------------------------


@pytest.mark.parametrize("way", ["cached", "direct"])
def test_o071_files_of_any_size_are_written_and_read_whole(tmp_path, way):
    disk = disk_of(tmp_path, way=way)
    store = Store(placement=Placement.parse({"optimizer": "disk"}), disk=disk)
    stored = {size: store.empty("m", size, np.float32) for size in SIZES}
    for size, array in stored.items():
        values = aligned(4 * size).view(np.float32)
        store.read(array, values)
        assert not values.any()
        values[:] = numbers(size, size)
        store.write(values, array)
    path = disk.states.path
    with h5py.File(path, "r", locking=False) as file:  # as anyone else reads it
        for i, size in enumerate(SIZES):
            dataset = file[f"m.{i}" if i else "m"]
            assert dataset.shape == (size,)
            assert np.array_equal(dataset[:], numbers(size, size))
    back = np.empty(max(SIZES), np.float32)
    for size, array in stored.items():
        store.read(array, back[:size])
        assert back[:size].tobytes() == numbers(size, size).tobytes()
        assert array.tobytes() == back[:size].tobytes()  # the mapped array shows the same
    assert path.stat().st_blocks * 512 >= 4 * sum(SIZES)  # reserved, not sparse
    disk.close()


def test_o071_slices_are_read_and_written_where_they_lie(tmp_path):
    store = store_of(tmp_path)
    array = store.empty("v", 10_000, np.float32)
    expected = np.zeros(10_000, np.float32)
    rng = np.random.default_rng(3)
    for seed in range(50):
        low, high = np.sort(rng.integers(0, 10_001, 2))
        store.write(numbers(high - low, seed), array[low:high])
        expected[low:high] = numbers(high - low, seed)
    back = np.empty(10_000, np.float32)
    store.read(array, back)
    assert back.tobytes() == expected.tobytes()
    store.close()


@pytest.mark.parametrize("change", ["truncate", "truncate and write", "inside the walk"])
def test_o071_truncated_file_is_an_error_with_its_name(tmp_path, change):
    zero = offloaded(tmp_path, n=30_000)
    path = zero.store.disk.states.path
    train(zero)
    if change == "inside the walk":
        calls = []

        def truncate(_array):
            calls.append(1)
            if len(calls) == 4:
                os.truncate(path, 8192)

        zero.store.before_overwrite.append(truncate)
    else:
        os.truncate(path, path.stat().st_size // 2)
    if change == "truncate and write":  # a write would make it long again, with a hole of zeros
        states = zero.optimizer.states[0]
        with pytest.raises(OSError, match=r"rank00000\.h5 has been truncated"):
            zero.store.write(np.ones(10, np.float32), states.moments["v"][-10:])
    with pytest.raises(OSError, match=r"rank00000\.h5 has been truncated .*dataset '[a-z]+'"):
        train(zero)
    zero.close()


def test_o071_truncated_file_of_one_rank_stops_all(tmp_path):
    def run(world):
        zero = offloaded(tmp_path, world, 3000)
        train(zero)
        if world.rank == 1:
            os.truncate(zero.store.disk.states.path, 0)
        train(zero)

    with pytest.raises(OSError, match=r"rank00001\.h5 has been truncated"):
        zm.threads(3, run, timeout=20)


def test_short_writes_and_reads_are_continued(tmp_path, monkeypatch):
    file = MappedFile(tmp_path / "a.h5", {})
    array, offset = file.add("x", 1000, np.float32, {})
    part = 100

    def short(call):
        return lambda fd, buffers, at: call(fd, [buffers[0][:part]], at)

    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    values, back = numbers(1000), np.empty(1000, np.float32)
    file.write(offset, values)
    file.read(offset, back)
    assert back.tobytes() == values.tobytes() == array.tobytes()
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match=r"a\.h5"):
        file.write(offset, values)
    file.close()


def test_removed_file_does_no_harm_to_the_run(tmp_path):
    """The system keeps what is open: training goes on, with the right numbers."""
    zero, twin = offloaded(tmp_path, n=20_000), offloaded(tmp_path, n=20_000)
    zero.store.disk.states.path.unlink()
    for _ in range(3):
        train(zero), train(twin)
    assert zero.master("w").tobytes() == twin.master("w").tobytes()
    zero.close(), twin.close()


def test_use_after_close_is_an_error(tmp_path):
    zero = offloaded(tmp_path)
    train(zero)
    zero.close()
    zero.close()
    with pytest.raises(ValueError, match=r"rank00000\.h5 is closed"):
        zero.master("w")
    assert not list(tmp_path.iterdir())


# ---- O-073: a full disk --------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """4 MiB of tmpfs; where that needs rights which we lack, none."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", tmp_path],
                      capture_output=True).returncode:  # fmt: skip
        pytest.skip("no right to mount a small disk: see the test with a limit of file size")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_o073_full_disk_is_an_error_on_all_ranks_before_anything_is_lost(small_disk):
    """16 MiB of states on a disk of 4 MiB; then what fits, on the same disk, which is clean."""

    def run(world):
        with pytest.raises(OSError, match=r"\[Errno 28\] no space: [\d,]+ bytes do not fit on the "
                           r"disk of .*rank0000\d\.h5, which has [\d,]+ free"):  # fmt: skip
            offloaded(small_disk, world, 16 * 2**20 // 12)
        zero = offloaded(small_disk, world, 2**20 // 12)
        train(zero)
        zero.close()

    zm.threads(2, run, timeout=20)
    assert not list(small_disk.iterdir())


def test_o073_a_disk_that_is_nearly_full_never_kills(small_disk):
    """Whatever is missing, data or HDF5's own bytes: OSError with the file's name, or success."""
    ended = set()
    for pages in (*range(0, 40, 3), *range(990, 1022)):
        with (small_disk / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, max(4096 * (1016 - pages), 1))
        disk = None
        try:
            disk = disk_of(small_disk)
            for name in "abc":
                array, offset = disk.states.add(name, 4096, np.float32, {"kind": "m"})
                disk.states.write(offset, np.ones(4096, np.float32))
                assert array.sum() == 4096
            ended.add("fits")
        except OSError as error:
            ended.add("full")
            assert "rank00000.h5" in str(error) or "zeromp-job" in str(error)
        if disk is not None:
            disk.close()
        shutil.rmtree(small_disk / "zeromp-job", ignore_errors=True)
    assert ended == {"fits", "full"}


def test_o073_full_disk_for_activations_leaves_the_engine_usable(small_disk):
    model = zm.models.mlp((64, 64, 64, 2))
    engine = zm.Engine(model, stage=3, recompute=True, offload="activations=disk",
                       offload_dir=small_disk)  # fmt: skip
    for rows, fits in ((100, True), (20_000, False), (200, True), (20_000, False), (100, True)):
        x, y = np.ones((rows, 64), np.float32), np.zeros(rows, np.int64)
        if fits:
            engine.backward(x, y)
            engine.step()
        else:
            with pytest.raises(OSError, match=r"no space: .*rank00000-activations\.h5"):
                engine.backward(x, y)
    engine.close()
    assert not list(small_disk.iterdir())


def test_o073_limit_of_file_size_is_an_error(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**22, before[1]))
    try:
        with pytest.raises(OSError, match=r"\[Errno 27\] .*rank00000\.h5"):
            offloaded(tmp_path, n=2**21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


# ---- O-072, O-075: folders -----------------------------------------------------------------------


def test_o072_folder_is_empty_after_each_end_and_left_overs_of_the_dead_are_removed(tmp_path):
    """Normal ends, an exception, SIGTERM, SIGKILL; and a job that lives all the time."""
    alive = disk_of(tmp_path, job="alive")
    ends = {
        "pass": 0,
        "1 / 0": 1,
        "os.kill(os.getpid(), 15)": 128 + 15,
        "os.kill(os.getpid(), 9)": -9,
        "'after the killed one'": 0,
    }
    mine = ["rank00000.alive", "rank00000.h5"]
    for (end, code), (found, left) in zip(ends.items(), begin(tmp_path, *ends), strict=True):
        assert found == code, end
        assert left.pop("zeromp-alive") == mine
        assert left == ({"zeromp-job3": mine} if code == -9 else {}), end
    alive.close()
    assert not list(tmp_path.iterdir())


def begin(folder, *ends):
    """Processes with a disk each, one after the other: exit code, and what lies there then."""
    code = f"""
import json, os, sys
sys.path[:0] = {sys.path!r}
from zeromp.store import Disk
for i, end in enumerate({ends!r}):
    child = os.fork()
    if not child:
        first = Disk({str(folder)!r}, f"job{{i}}", 0, 1, "cached", False)
        first.states.add("m", 1000, "f4", {{}})
        exec(end)
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = {{name: sorted(os.listdir(os.path.join({str(folder)!r}, name)))
            for name in os.listdir({str(folder)!r}) if name.startswith("zeromp-")}}
    print(json.dumps([code, left]), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.count("\n") == len(ends), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_o072_construction_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="must be finite"):
        zm.Zero({"w": [1.0, np.nan]}, stage=3, offload="optimizer=disk",
                offload_dir=tmp_path)  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_o075_every_rank_has_files_of_its_own(tmp_path):
    """Names hold job and rank; tests/mpi/test_offload.py looks at what processes have open."""

    def run(world):
        zero = offloaded(tmp_path, world, 3000)
        path = zero.store.disk.states.path
        zero.close()
        return path

    paths = zm.threads(3, run)
    assert [path.name for path in paths] == [f"rank{r:05d}.h5" for r in range(3)]
    assert len({path.parent for path in paths}) == 1
    assert paths[0].parent.name.startswith("zeromp-")


def test_two_jobs_in_one_folder_do_not_meet(tmp_path):
    a, b = offloaded(tmp_path, n=2000), offloaded(tmp_path, n=2000)
    assert a.store.disk.folder.path != b.store.disk.folder.path
    train(a)
    a.close()
    train(b)
    assert np.isfinite(b.master("w")).all()
    assert len(list(tmp_path.iterdir())) == 1
    b.close()


def test_name_that_is_taken_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("zeromp.store.folder.CLEANER_S", 0.1)
    first = JobFolder(tmp_path, "same", 0)
    with pytest.raises(FileExistsError, match="held by another process: two jobs of one name"):
        JobFolder(tmp_path, "same", 0)
    first.close()


def test_ranks_and_cleaners_of_many_jobs_at_a_time(tmp_path):
    """Each comes and goes twenty times while the others clean: nobody loses a file in use."""
    errors = []

    def come_and_go(job):
        try:
            for i in range(20):
                folder = JobFolder(tmp_path, f"{job}-{i % 2}", 0)
                folder.file(".h5").write_bytes(b"mine")
                remove_dead(tmp_path, tmp_path / "other")
                assert folder.file(".h5").read_bytes() == b"mine"
                folder.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go, args=(job,)) for job in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not list(tmp_path.iterdir())


def test_disk_without_locks_is_used_and_never_cleaned(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks")

    dead = tmp_path / "zeromp-dead"
    dead.mkdir()
    for name in ("rank00000.alive", "rank00000.h5"):
        (dead / name).touch()
    monkeypatch.setattr("fcntl.flock", flock)
    folder = JobFolder(tmp_path, "job", 0)
    assert folder.removed == []
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["zeromp-dead"]


def test_files_of_other_programs_are_left_alone(tmp_path):
    (tmp_path / "zeromp-notes").mkdir()
    for name in ("zeromp-notes/rank.txt", "rank00000.h5", "zeromp-notes/a.h5"):
        (tmp_path / name).touch()
    disk_of(tmp_path).close()
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "a.h5", "rank.txt", "rank00000.h5", "zeromp-notes",
    ]  # fmt: skip


def test_abort_removes_the_files_of_all_ranks(tmp_path):
    """The launcher kills the other ranks, which can't clean any more."""
    disks = [disk_of(tmp_path, rank, 3) for rank in range(3)]
    disks[1].folder.abandon()
    assert not list(tmp_path.iterdir())
    for disk in disks:
        disk.close()


def test_folder_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"offload_dir .*nowhere' is not a folder: make it"):
        offloaded(tmp_path / "nowhere")


def test_folder_that_is_read_only():
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:  # not in pytest's, which is closed to others
        Path(folder).chmod(0o555)
        if root:  # who may write everywhere
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match="can't be written: choose another folder"):
                disk_of(folder)
        finally:
            if root:
                os.seteuid(0)
            Path(folder).chmod(0o755)


# ---- what lies on the disk -----------------------------------------------------------------------


def test_kept_files_are_read_by_plain_hdf5(tmp_path):
    given = {"w": np.linspace(-1, 1, 3000, dtype=np.float32).reshape(30, 100), "b": np.ones(7)}

    def run(world):
        zero = zm.Zero(given, world=world, stage=3, wire="float16", keep_float32="b",
                       offload="optimizer=disk,parameters=disk", offload_dir=tmp_path,
                       keep_offload=True, offload_tile=4096)  # fmt: skip
        train(zero)
        state = {k: zero.moments(n)[k] for n in "w" for k in "mv"} | {"master": zero.master("w")}
        zero.close()
        return state

    expected = zm.threads(3, run)[0]
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 3
    found = {name: [] for name in expected}
    for rank in range(3):
        with h5py.File(folder / f"rank{rank:05d}.h5", "r") as file:
            assert (file.attrs["rank"], file.attrs["num_ranks"]) == (rank, 3)
            assert {d.attrs["format"] for n, d in file.items() if "parameters" in n} == {
                "float16", "float32"
            }  # fmt: skip
            for name, dataset in file.items():
                assert dataset.attrs["kind"] == name.split(".")[0]
                assert dataset.chunks is None
                kind, units = dataset.attrs["kind"], dataset.attrs["units"]
                if kind in expected and dataset.size >= 1000:
                    assert units == '{"unit0": [0, 1000]}'
                    found[kind].append(dataset[:])
    for kind, parts in found.items():
        assert np.concatenate(parts).tobytes() == expected[kind].tobytes(), kind
    if h5dump := shutil.which("h5dump"):
        subprocess.run([h5dump, "-H", folder / "rank00000.h5"], check=True, capture_output=True)


def test_h5dump_and_h5py_may_look_while_the_job_runs(tmp_path):
    zero = offloaded(tmp_path, n=5000)
    train(zero)
    with h5py.File(zero.store.disk.states.path, "r", locking=False) as file:
        m = file["m"][:]
    assert m.any()
    train(zero)
    zero.close()


# ---- cached or direct ----------------------------------------------------------------------------


def test_auto_keeps_to_the_better_way():
    for cached, direct, best in ((1.0, 2.0, False), (2.0, 1.0, True)):
        trial, way, used = Trial(True), False, []
        for _ in range(6):
            used.append(way)
            way = trial.next(way, WORTH_A_TRIAL, direct if way else cached)
        assert used == [False, False, True, best, best, best]
        assert not trial.open


def test_auto_adds_small_updates_up_and_counts_bytes_not_calls():
    """Flats of unequal size, or units that are updated one by one, make a trial together."""
    trial, way, used = Trial(True), False, []
    for i in range(24):
        used.append(way)
        share = (WORTH_A_TRIAL // 8) * (1 + i % 2)
        way = trial.next(way, share, share / (2e9 if way else 1e9))
    assert used == [False] * 12 + [True] * 6 + [True] * 6
    assert trial.rates[True] == pytest.approx(2e9)
    assert trial.rates[False] == pytest.approx(1e9)
    assert Trial(False).next(False, 10 * WORTH_A_TRIAL, 1.0) is False


def test_direct_and_cached_transfers_see_each_other(tmp_path):
    disk = disk_of(tmp_path, way="direct")
    array, offset = disk.states.add("x", 5000, np.float32, {})
    values, back = aligned(20_000).view(np.float32), aligned(20_000).view(np.float32)
    for seed in range(4):
        values[:] = numbers(5000, seed)
        disk.states.direct = bool(seed % 2)
        disk.states.write(offset, values)
        disk.states.direct = not seed % 2
        disk.states.read(offset, back)
        assert back.tobytes() == values.tobytes() == array.tobytes()
    disk.close()


def test_wrong_way_and_disk_without_direct(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="offload_io='fast' is unknown: use auto, cached, direct"):
        disk_of(tmp_path, way="fast")
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="has no O_DIRECT: use offload_io=cached"):
        disk_of(tmp_path, way="direct")
    disk = disk_of(tmp_path, way="auto")
    assert not disk.trial.open
    disk.close()
    assert not list(tmp_path.iterdir())


# ---- memory --------------------------------------------------------------------------------------


def test_resident_set_is_bounded_by_the_tiles_whatever_the_shard(tmp_path):
    """A process of its own: 12 MB and 96 MB of states add the same few MB."""
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
import numpy as np, zeromp as zm
from pathlib import Path

def status(name):
    text = Path("/proc/self/status").read_text()
    return int(next(l for l in text.splitlines() if l.startswith(name + ":")).split()[1]) * 1024

def grown(n):
    arrays = {{f"a{{i}}": np.broadcast_to(np.float32(1), (n // 8,)) for i in range(8)}}
    zero = zm.Zero(arrays, stage=3, wire="bfloat16", offload="optimizer=disk",
                   offload_dir={str(tmp_path)!r}, offload_tile=2**16, bucket=1,
                   optimizer=zm.SGD(momentum=0.9))
    zero.gradients.arrays[0][:] = 0x3C23
    rates = np.array([[1e-3, 0.0]], np.float32)
    Path("/proc/self/clear_refs").write_text("5")
    before, file = status("VmRSS"), status("RssFile")
    for step in (1, 2):
        zero.optimizer.step(step, 1.0, rates)
    made = status("VmHWM") - before, status("RssFile") - file
    zero.close()
    return made

grown(500_000)
print(*grown(1_500_000), *grown(12_000_000))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    small, small_file, large, large_file = map(int, done.stdout.split())
    tiles = 4 * 2 * 4 * 2**16  # slots, master and m, float32, elements
    assert small <= tiles + 2**22
    assert large <= tiles + 2**22  # of 96 MB of states
    assert max(small_file, large_file) <= 2**20  # the mapped file stays out of it


def test_tiles_walk_what_does_not_fit_into_memory_at_once(tmp_path):
    """Sizes of O-071, through the update: SGD without momentum's share, p <- p - lr g exactly."""
    for size in (1, 511, 512, 513, 4095, 4096, 4097, 20_000):
        zero = offloaded(tmp_path, n=size, optimizer=zm.SGD(lr=0.5, momentum=0.5))
        before = zero.master("w")
        g = np.full(size, 0.25, np.float32)
        for _ in range(2):
            zero.backward({"w": g})
            zero.step()
        expected = before - np.float32(0.125) - np.float32(0.5) * np.float32(0.375)
        assert np.array_equal(zero.master("w"), expected)
        assert np.array_equal(zero.moments("w")["m"], np.full(size, 0.375, np.float32))
        zero.close()


# ---- helpers -------------------------------------------------------------------------------------


def offloaded(folder, world=None, n=2000, **options):
    options = {"offload": "optimizer=disk", "offload_tile": 4096, **options}
    values = np.linspace(-1, 1, n, dtype=np.float32) if n > 1 else np.ones(1, np.float32)
    return zm.Zero({"w": values}, world=world, stage=3, offload_dir=folder, **options)


def train(zero):
    zero.backward({name: 0.1 * zero.full(name) for name in zero.names})
    return zero.step()
