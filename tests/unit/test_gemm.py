"""The door for products: what it computes, whose library, and what it says of a wrong one."""

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zeromp import gemm

PROGRAM = """
import numpy as np
from zeromp import gemm
rng = np.random.default_rng(0)
for m, k, n in [(1, 1, 1), (5, 3, 2), (0, 3, 2), (3, 0, 2), (33, 65, 17)]:
    a, b = (rng.standard_normal(s, np.float32) for s in ((m, k), (k, n)))
    for x in (a, np.asfortranarray(a)):
        for y in (b, np.asfortranarray(b)):
            out = np.full((m, n), np.nan, np.float32)
            assert gemm.matmul(x, y, out) is out
            np.testing.assert_allclose(out, a.astype(float) @ b, atol=1e-5)
print(gemm.name())
"""


def with_library(path):
    """Run PROGRAM in a process of its own, since a library is loaded once and for all."""
    environment = {**os.environ, "ZEROMP_BLAS": str(path)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_numpy_is_the_default():
    exec(PROGRAM, {})
    assert "ZEROMP_BLAS" in os.environ or gemm.name() == "numpy"


def test_out_must_fit():
    a = np.ones((2, 3), np.float32)
    with pytest.raises(AssertionError):
        gemm.matmul(a, a.T, np.empty((3, 3), np.float32))


def test_no_library_at_the_path():
    result = with_library("/nonexistent/libblas.so")
    assert result.returncode == 1
    assert "OSError: ZEROMP_BLAS=/nonexistent/libblas.so has no cblas_sgemm" in result.stderr


def test_a_library_without_products():
    result = with_library(ctypes.util.find_library("m"))
    assert result.returncode == 1 and "has no cblas_sgemm" in result.stderr


def test_a_library_of_the_users_own():
    found = [*Path(sys.prefix, "lib").glob("*mkl_rt*")]
    path = "mkl" if found else os.environ.get("ZEROMP_TEST_BLAS")
    path = path or ctypes.util.find_library("cblas") or ctypes.util.find_library("openblas")
    if path is None:
        pytest.skip("no other BLAS here: pip install mkl, or name one in ZEROMP_TEST_BLAS")
    result = with_library(path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(found[0] if path == "mkl" else path)


def test_mkl_is_missing():
    if [*Path(sys.prefix, "lib").glob("*mkl_rt*")]:
        pytest.skip("it is not")
    result = with_library("mkl")
    assert result.returncode == 1 and "pip install 'zeromp[mkl]'" in result.stderr
