"""Checkpoints that break: killed, full, damaged, missing, locked; and what is said then."""

import errno
import fcntl
import functools
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import saved
import toys
from saved import CUTS, N

import zeromp as zm
from zeromp.checkpoint import Broken, Checkpoint, choosing, complete, files, find, saving, writing

H5PY_TYPES = h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_DATATYPE)
BIG = {"w": (40, 1000), "b": 77}


def names(folder):
    return sorted(p.name for p in Path(folder).iterdir())


def open_handles():
    """All but the types that h5py itself holds."""
    return h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_ALL) - H5PY_TYPES


# ---- there is none -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["missing", "empty", "incomplete", "incomplete itself"])
def test_a_checkpoint_that_is_not_there(tmp_path, what, capsys):
    """O-044: an error on all ranks, at once; or a fresh start, if asked for."""
    folder = tmp_path / what
    if what != "missing":
        folder.mkdir()
    if what.startswith("incomplete"):
        saved.save(folder)[1].joinpath("model.h5").unlink()
    if what.endswith("itself"):
        folder /= "step-00000003"

    def run(world):
        zero = toys.make(world, N, CUTS, 1)
        with pytest.raises(FileNotFoundError) as caught:
            zero.load(folder)
        assert zero.load(folder, if_exists=True) is None
        toys.steps(zero, N, CUTS, 1)
        return str(caught.value)

    texts = zm.threads(3, run)
    assert len(set(texts)) == 1 and str(folder) in texts[0]
    assert f"{texts[0]}: starting afresh" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"no checkpoint|is incomplete"):
        find(folder)


# ---- damaged -------------------------------------------------------------------------------------


def save_two(folder, **options):
    """Two checkpoints, after steps 1 and 2; the state of the first, and both folders."""

    def run(world):
        zero = toys.make(world, N, CUTS, 3)
        toys.steps(zero, N, CUTS, 1)
        first = zero.save(folder, **options)
        state = saved.state(zero)
        toys.steps(zero, N, CUTS, 1)
        return state, first, zero.save(folder, **options)

    return zm.threads(3, run)[0]


def damage(path, how):
    """Do harm to a checkpoint; returns what an error must name."""
    shard = path / "rank00001.h5"
    record = Checkpoint(path).contents
    dataset = record.dataset(1, "flat0/m")
    if how == "flipped":
        saved.flip(shard, dataset.offset + dataset.num_bytes - 1)
        return "rank00001.h5, dataset flat0/m"
    if how == "flipped in HDF5's own":
        saved.flip(shard, 40)
    elif how == "truncated":
        os.truncate(shard, dataset.offset + 5)
    elif how == "missing":
        shard.unlink()
    elif how == "record":
        data = (path / "model.h5").read_bytes()
        saved.flip(path / "model.h5", data.index(b'"applied"') + 3)
        return "model.h5, dataset zeromp/record"
    elif how == "master cut":
        os.truncate(path / "model.h5", 700)
        return "model.h5, dataset zeromp/record"
    return "rank00001.h5"


@pytest.mark.parametrize(
    "how",
    ["flipped", "flipped in HDF5's own", "truncated", "missing", "record", "master cut"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, how, capsys):
    """O-050, O-054, O-097: the same choice on all ranks; the one asked for by name is an error."""
    state, first, second = save_two(tmp_path)
    named = damage(second, how)
    found = saved.load(tmp_path, ranks=2, wire="float32")
    assert [report.path for _, report, _ in found] == [first, first]
    saved.same(found[1][0], state)
    said = capsys.readouterr().out
    assert f"checkpoint {second} is not used: " in said and named in said
    with pytest.raises(Broken, match=named):
        saved.load(second, ranks=4)
    if how not in ("record", "master cut"):
        with Checkpoint(second) as checkpoint:
            assert named in "".join(checkpoint.verify())
            assert bool(checkpoint.check_files()) == (how in ("truncated", "missing"))
    damage(first, "missing")
    with pytest.raises(Broken, match=named):
        saved.load(tmp_path)


def test_each_dataset_is_missed_by_name(tmp_path):
    """O-039: any one of them."""
    _, path = saved.save(tmp_path, frozen=["b"])
    for dataset in Checkpoint(path).contents.files[2].datasets:
        if dataset.size:
            whole = (path / "rank00002.h5").read_bytes()
            saved.flip(path / "rank00002.h5", dataset.offset)
            with pytest.raises(Broken, match=f"rank00002.h5, dataset {dataset.name}:"):
                saved.load(path, frozen=["b"])
            (path / "rank00002.h5").write_bytes(whole)
    saved.load(path, frozen=["b"])


def test_a_failed_load_changes_nothing(tmp_path):
    _, path = saved.save(tmp_path)
    damage(path, "flipped")

    def run(world):
        zero = toys.make(world, N, CUTS, 2)
        toys.steps(zero, N, CUTS, 1)
        before = saved.state(zero)
        with pytest.raises(Broken):
            zero.load(tmp_path)
        saved.same(saved.state(zero), before)
        assert zero.applied == 1

    zm.threads(2, run)


def test_a_missing_source_is_nan_to_hdf5(tmp_path):
    """O-097: never zeros."""
    _, path = saved.save(tmp_path)
    (path / "rank00001.h5").unlink()
    with h5py.File(tmp_path / "model.h5") as file:
        for name in ("c/w", "state/m/c/w"):
            assert np.isnan(file[name][:]).any() and np.isfinite(file[name][:]).any()


def test_not_finite_numbers_are_found(tmp_path):
    def run(world):
        zero = toys.make(world, N, CUTS, 1, "float32")
        values = zero.optimizer.states[0].moments["v"]
        values[:] = 1
        if world.rank == 0:
            values[3] = np.inf
        return zero.save(tmp_path)

    with Checkpoint(zm.threads(1, run)[0]) as checkpoint:
        assert "v of 'a.w' holds inf at flat index 3" in checkpoint.verify()[0]


# ---- a full disk, and errors while writing -------------------------------------------------------


def check_refusal(folder, message="no space"):
    """A save that fails: on all ranks, and the one before is whole; then one that works."""

    def run(world):
        zero = toys.make(world, saved.size_of(BIG), BIG, 3)
        saved.train(zero, BIG, 1)
        zero.save(folder / "here")
        return saved.state(zero)

    before = zm.threads(3, run)[0]
    kept = names(folder / "here")

    def fail(world):
        zero = toys.make(world, saved.size_of(BIG), BIG, 1)
        with pytest.raises(OSError) as caught:
            zero.save(folder / "here")
        return str(caught.value)

    def fails():
        texts = zm.threads(3, fail)
        assert len(set(texts)) == 1
        assert message in texts[0] and str(folder / "here") in texts[0]
        assert open_handles() == 0
        assert names(folder / "here") == kept
        saved.same(saved.load(folder / "here", wire="float32", cuts=BIG)[0][0], before)

    def works():
        zm.threads(3, lambda w: toys.make(w, saved.size_of(BIG), BIG, 1).save(folder / "here"))
        assert len(complete(folder / "here")) == 2 and len(names(folder / "here")) == 3

    return fails, works


def test_a_limit_of_a_file_s_size(tmp_path):
    """O-051, O-098: under RLIMIT_FSIZE."""
    fails, works = check_refusal(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        fails()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    works()


@pytest.mark.parametrize("at", ["posix_fallocate", "pwrite", "fsync"])
def test_errors_while_writing(tmp_path, monkeypatch, at):
    """O-051, O-098: on one rank, at any of the calls that can find the disk full."""
    fails, works = check_refusal(tmp_path)
    real, calls = getattr(os, at), []

    def full(descriptor, *rest):
        if "rank00001" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            calls.append(rest)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, at, full)
        fails()
        assert calls
    works()


def test_no_room_for_the_record(tmp_path, monkeypatch):
    fails, works = check_refusal(tmp_path)
    real = os.fsync

    def full(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".part":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        fails()
    works()


@pytest.fixture
def small_disk(tmp_path):
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path / "disk")]
    try:
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a tmpfs")
    except FileNotFoundError:
        pytest.skip("needs mount")
    yield tmp_path / "disk"
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_a_disk_that_is_full(small_disk):
    """O-051: a tmpfs with half the room that a checkpoint needs."""
    fails, works = check_refusal(small_disk)
    filler = small_disk / "filler"
    disk = os.statvfs(small_disk)
    filler.write_bytes(bytes(disk.f_bfree * disk.f_frsize - 250_000))
    fails()
    filler.write_bytes(b"")
    works()


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda d, data, at: real(d, data[:1000], at))
    before, _ = saved.save(tmp_path)
    monkeypatch.undo()
    saved.same(saved.load(tmp_path)[0][0], before)


# ---- commit, and what is kept --------------------------------------------------------------------


def test_all_ranks_return_after_the_commit_and_rank_0_alone_looks(tmp_path, monkeypatch):
    """O-053: save, and load, ask the file system on one rank only."""
    looked, committed = set(), []
    for module, name in ((saving, "new_folder"), (saving, "prune"), (choosing, "candidates")):

        def look(real, *given):
            looked.add(threading.get_ident())
            return real(*given)

        monkeypatch.setattr(module, name, functools.partial(look, getattr(module, name)))

    def slow(path, image, real=saving.replace_file):
        looked.add(threading.get_ident())
        time.sleep(0.3)
        real(path, image)
        committed.append(time.monotonic())

    monkeypatch.setattr(saving, "replace_file", slow)

    def run(world):
        zero = toys.make(world, N, CUTS, 1)
        zero.save(tmp_path)
        returned = time.monotonic()
        zero.load(tmp_path)
        return returned, threading.get_ident()

    found = zm.threads(3, run)
    assert len(committed) == 2 and all(returned >= committed[-1] for returned, _ in found)
    assert looked == {found[0][1]}


def test_keep_the_last_and_order_by_age(tmp_path):
    """Also when a run goes back to an earlier step, and when a step is saved again."""

    def run(world):
        zero = toys.make(world, N, CUTS, 1)
        for _ in range(3):
            toys.steps(zero, N, CUTS, 1)
            zero.save(tmp_path)
        zero.load(tmp_path / "step-00000001")
        assert zero.applied == 1
        toys.steps(zero, N, CUTS, 1)
        again = zero.save(tmp_path)
        assert zero.save(tmp_path, keep=3) == tmp_path / "step-00000002-2"
        return again

    (tmp_path / "step-00000009").mkdir()  # what a killed save leaves
    (tmp_path / "step-00000009" / "rank00000.h5").write_bytes(b"half")
    (tmp_path / "model.h5.part").write_bytes(b"half")
    assert zm.threads(2, run)[0] == tmp_path / "step-00000002-1"
    assert [p.name for p in complete(tmp_path)] == [
        "step-00000003", "step-00000002-1", "step-00000002-2",
    ]  # fmt: skip
    assert names(tmp_path)[0] == "model.h5" and len(names(tmp_path)) == 4
    assert find(tmp_path) == tmp_path / "step-00000002-2"
    with h5py.File(tmp_path / "model.h5") as file:
        assert file.attrs["folder"] == "step-00000002-2" and np.isfinite(file["c/w"][:]).all()


def test_save_must_be_called_on_all_ranks(tmp_path):
    """O-082: what rank 0 waits in has a name."""
    for verb in ("save", "load"):

        def run(world, verb=verb):
            zero = toys.make(world, N, CUTS, 1)
            if world.rank == 0:
                getattr(zero, verb)(tmp_path)

        with pytest.raises(TimeoutError, match=f"{verb} (to|from) .*called on all ranks"):
            zm.threads(2, run, timeout=0.5)


# ---- in the background ---------------------------------------------------------------------------


def test_a_save_in_the_background_is_of_its_moment(tmp_path, monkeypatch):
    """O-052: three more steps at once, before anything is written."""
    go = threading.Event()

    def late(*given, real=saving.write_rank_file):
        assert go.wait(30)
        return real(*given)

    monkeypatch.setattr(saving, "write_rank_file", late)

    def run(world):
        zero = toys.make(world, N, CUTS, 2)
        toys.steps(zero, N, CUTS, 1)
        before = saved.state(zero)
        copied = zero.store.tiers["host"].held
        path = zero.save(tmp_path, wait=False, extra={"at": 1})
        assert not copied.total()
        toys.steps(zero, N, CUTS, 1)
        states = sum(zero.store.held[kind] for kind in ("m", "v"))
        assert copied.total() == 3 * states / 2  # the master, which is the parameters, too
        toys.steps(zero, N, CUTS, 2)
        assert copied.total() == 3 * states / 2
        assert not (path / "model.h5").exists()
        world.barrier()
        go.set()
        assert zero.finish_save() == path and zero.finish_save() is None
        assert not copied.total()
        return before

    before = zm.threads(3, run)[0]
    state, report, _ = saved.load(tmp_path, wire="float32")[0]
    saved.same(state, before)
    assert report.record["applied"] == 1 and report.extra == {"at": 1}


def test_a_save_in_the_background_is_committed_by_a_later_step(tmp_path):
    def run(world):
        zero = toys.make(world, N, CUTS, 3)
        path = zero.save(tmp_path, wait=False)
        for _ in range(200):
            toys.steps(zero, N, CUTS, 1)
            if zero._saver._pending is None:
                break
            time.sleep(0.02)
        assert (path / "model.h5").exists()
        zero.save(tmp_path, wait=False)
        zero.save(tmp_path, wait=False)  # finishes the one before
        zero.load(tmp_path)  # and this the last

    zm.threads(2, run)
    assert len(complete(tmp_path)) == 3


@pytest.mark.parametrize("verb", ["finish_save", "save", "load", "step"])
def test_errors_of_the_background_surface_at_the_next_call(tmp_path, monkeypatch, verb):
    """O-052: on all ranks alike; the step goes through when it is called again."""
    real = saving.write_rank_file

    def fail(path, *rest):
        if path.name == "rank00001.h5":
            raise OSError("no space, said the disk")
        return real(path, *rest)

    monkeypatch.setattr(saving, "write_rank_file", fail)

    def run(world):
        zero = toys.make(world, N, CUTS, 1)
        toys.feed(zero, N, CUTS, 1)
        zero.zero_grad()
        zero.save(tmp_path, wait=False)
        zero._saver._pending.thread.join()
        if verb == "step":
            toys.feed(zero, N, CUTS, 1)
        call = getattr(zero, verb)
        with pytest.raises(OSError, match="no space, said the disk"):
            call(*([tmp_path] if verb in ("save", "load") else []))
        if verb == "step":
            assert zero.step().applied
        assert zero.finish_save() is None

    zm.threads(2, run)
    assert names(tmp_path) == []


def test_a_save_in_the_background_needs_no_room_on_the_device(tmp_path):
    def run(world):
        held = sum(toys.make(world, N, CUTS, 1).store.held.values())
        budget = int(world.agree([held]).max())
        zero = toys.make(world, N, CUTS, 1, device_memory=budget)
        zero.save(tmp_path, wait=False)
        toys.steps(zero, N, CUTS, 2)
        zero.finish_save()

    zm.threads(2, run)
    assert len(complete(tmp_path)) == 1


# ---- locks, permissions, other disks -------------------------------------------------------------


def test_locked_files_are_read(tmp_path):
    """O-096: by this process in the way another would hold them: a lock belongs to an open file."""
    before, path = saved.save(tmp_path)
    held = [os.open(p, os.O_RDWR) for p in (path / "model.h5", path / "rank00001.h5")]
    try:
        for descriptor in held:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        saved.same(saved.load(tmp_path)[0][0], before)
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_a_lock_that_can_not_be_got_is_explained(tmp_path):
    """O-096: where the environment asks for locks."""
    _, path = saved.save(tmp_path)
    code = (
        "import sys, fcntl; from zeromp.checkpoint import Checkpoint\n"
        "file = open(sys.argv[1] + '/model.h5', 'r+b'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "Checkpoint(sys.argv[1])"
    )
    environment = {**os.environ, "HDF5_USE_FILE_LOCKING": "TRUE"}
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "HDF5_USE_FILE_LOCKING=FALSE" in ended.stderr and "model.h5" in ended.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path):
    """O-097."""
    _, path = saved.save(tmp_path)
    (path / "rank00001.h5").chmod(0)
    with pytest.raises(Broken, match=r"rank00001.h5 can't be read: permission denied"):
        saved.load(path)


def test_no_handle_is_open_after_an_error(tmp_path, monkeypatch):
    """O-098."""
    before = open_handles()
    monkeypatch.setattr(
        writing, "new_checksum", lambda: (_ for _ in ()).throw(KeyError("in the middle"))
    )
    with pytest.raises(KeyError, match="in the middle"):
        saved.save(tmp_path)
    monkeypatch.undo()
    assert names(tmp_path) == [] and open_handles() == before
    saved.save(tmp_path)
    assert open_handles() == before


def test_more_ranks_than_elements(tmp_path):
    """O-099: eight ranks, three elements."""
    before, _ = saved.save(tmp_path, ranks=8, cuts={"a": 3})
    for ranks in (1, 8):
        saved.same(saved.load(tmp_path, ranks=ranks, cuts={"a": 3})[-1][0], before)


@pytest.mark.parametrize("in_kernel", [True, False])
def test_numbers_on_disk_are_copied_from_file_to_file(tmp_path, monkeypatch, in_kernel):
    """With `copy_file_range`, and where two disks can't."""
    if not in_kernel:

        def refuse(*_):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(os, "copy_file_range", refuse)

    def run(world):
        disk = {"offload": "optimizer=disk", "offload_dir": tmp_path, "keep_offload": True}
        zero = toys.make(world, saved.size_of(BIG), BIG, 1, "bfloat16", **disk)
        saved.train(zero, BIG, 1)

        def refuse(view, into):
            assert zero.store.file_range(view) is None, "states go from file to file"
            read(view, into)

        read, zero.store.read = zero.store.read, refuse
        zero.save(tmp_path / "to")
        zero.store.read = read
        return saved.state(zero)

    before = zm.threads(3, run)[0]
    after = saved.load(tmp_path / "to", wire="bfloat16", cuts=BIG)[0][0]
    saved.same(after, before)


def test_blocks_of_files_are_whole(tmp_path):
    """Datasets begin at blocks of 4096 bytes, so that file systems can share them."""
    _, path = saved.save(tmp_path, cuts=BIG)
    with Checkpoint(path) as checkpoint:
        for file in checkpoint.contents.files:
            assert all(d.offset % files.BLOCK_BYTES == 0 for d in file.datasets[:3])
