"""Buffers that are used again: none is in use twice, all come back, a step allocates none."""

import gc
import tracemalloc

import numpy as np

import zeromp as zm
from zeromp.pool import Pool


def test_a_buffer_comes_back_when_its_last_view_is_gone():
    pool = Pool()
    a = pool.empty((3, 5))
    view = a.T[1:]
    address = a.ctypes.data
    del a
    b = pool.empty((5, 3))
    assert not np.may_share_memory(view, b)
    del view
    c = pool.empty((15,))
    assert c.ctypes.data == address and pool.empty((15,)).ctypes.data != b.ctypes.data


def test_arrays_are_aligned_and_writable():
    pool = Pool()
    kept = [pool.empty(shape) for shape in [(1,), (7, 3), (0, 4), (1000,)] * 3]
    for array in kept:
        assert array.size == 0 or array.ctypes.data % 64 == 0
        assert array.dtype == np.float32
        assert array.flags.c_contiguous and array.flags.writeable
        array.fill(1)


def test_poison():
    pool = Pool(poison=True)
    a = pool.empty((8,))
    a.fill(1)
    del a
    assert np.isnan(pool.empty((8,))).all()
    quiet = Pool()
    a = quiet.empty((8,))
    a.fill(1)
    del a
    assert (quiet.empty((8,)) == 1).all()


def test_a_step_allocates_nothing_large_after_the_first():
    model = zm.models.gpt(vocab=64, layers=2, width=64, heads=2, context=64)
    engine = zm.Engine(model, wire="float32")
    x = np.random.default_rng(0).integers(0, 64, (4, 64))
    smallest = 4 * 64 * 64 * 4  # bytes of the residual stream
    for _ in range(2):
        engine.backward(x, x)
        engine.step()
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(2):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            engine.backward(x, x)
            engine.step()
            assert tracemalloc.get_traced_memory()[1] - before < smallest
    finally:
        tracemalloc.stop()
