"""The one door for matrix products: NumPy's BLAS, or the library that ``ZEROMP_BLAS`` names.

A cluster's own BLAS is often faster than the OpenBLAS that NumPy brings. Any library with the
standard C interface, ``cblas_sgemm`` with 32-bit integers, will do: MKL, BLIS, AOCL, NVPL::

    ZEROMP_BLAS=/opt/aocl/lib/libblis.so mpirun -n 8 python train.py
    ZEROMP_BLAS=mkl ...         # the one that `pip install zeromp[mkl]` has brought

It is compared with NumPy before it is used. All ranks of a job should use the same: the last bits
of a product differ from one library to another.
"""

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112  # constants of cblas.h
_INT, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_float, ctypes.c_void_p


def matmul(a: F32, b: F32, out: F32) -> F32:
    """Write the product of two matrices to `out` and return it.

    Parameters
    ----------
    a : ndarray of shape (m, k)
    b : ndarray of shape (k, n)
        Both contiguous, or the transpose of a contiguous array, which is read as it lies.
    out : ndarray of shape (m, n)
        Contiguous.
    """
    assert out.flags.c_contiguous and out.shape == (len(a), b.shape[1])
    return _product()(a, b, out)


def name() -> str:
    """Which library makes the products: its path, or "numpy"."""
    return str(_library() or "numpy")


@functools.cache
def _library() -> Path | None:
    """Path of the library that the user asks for, or None."""
    wish = os.environ.get("ZEROMP_BLAS", "")
    if wish in ("", "numpy"):
        return None
    if wish != "mkl":
        return Path(wish)
    for place in (Path(sys.prefix, "lib"), Path(sys.prefix, "Library", "bin")):
        for found in sorted(place.glob("*mkl_rt*")):
            return found
    raise OSError(
        f"ZEROMP_BLAS=mkl: there is no libmkl_rt in {sys.prefix}/lib; "
        "pip install 'zeromp[mkl]', or set ZEROMP_BLAS to the path of the library"
    )


@functools.cache
def _product() -> Callable[[F32, F32, F32], F32]:
    path = _library()
    if path is None:
        return lambda a, b, out: np.matmul(a, b, out=out)
    product = _of_library(path)
    _verify(product, path)
    return product


def _of_library(path: Path) -> Callable[[F32, F32, F32], F32]:
    """Wrap the `cblas_sgemm` of a library."""
    try:
        sgemm = ctypes.CDLL(str(path)).cblas_sgemm
    except (OSError, AttributeError) as error:
        raise OSError(
            f"ZEROMP_BLAS={path} has no cblas_sgemm that can be loaded ({error}): give the path of "
            "a BLAS with the C interface, or unset it to use NumPy's"
        ) from error
    sgemm.argtypes = [*[_INT] * 6, _FLOAT, _POINTER, _INT, _POINTER, _INT, _FLOAT, _POINTER, _INT]
    sgemm.restype = None

    def product(a: F32, b: F32, out: F32) -> F32:
        m, n = out.shape
        k = a.shape[1]
        if 0 in (m, n, k):
            out.fill(0)
            return out
        (a, how_a, step_a), (b, how_b, step_b) = _layout(a), _layout(b)
        sgemm(
            *(_ROW_MAJOR, how_a, how_b, m, n, k, 1.0, a.ctypes.data, step_a),
            *(b.ctypes.data, step_b, 0.0, out.ctypes.data, n),
        )
        return out

    return product


def _layout(a: F32) -> tuple[F32, int, int]:
    """Array whose memory is read, whether it is transposed, and elements from row to row."""
    if a.dtype != np.float32:
        raise ValueError(f"product of {a.dtype}: it must be float32")
    if a.flags.c_contiguous:
        return a, _PLAIN, a.shape[1]
    if a.flags.f_contiguous:
        return a, _TRANSPOSED, a.shape[0]
    return np.ascontiguousarray(a), _PLAIN, a.shape[1]


def _verify(product: Callable[[F32, F32, F32], F32], path: Path) -> None:
    """OSError if a library multiplies otherwise than NumPy does."""
    rng = np.random.default_rng(0)
    for m, k, n in ((1, 1, 1), (3, 5, 7), (33, 65, 129)):
        a, b = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
        for x in (a, np.asfortranarray(a)):
            for y in (b, np.asfortranarray(b)):
                got: Any = product(x, y, np.full((m, n), np.nan, np.float32))
                if not np.allclose(got, a @ b, atol=1e-4):
                    raise OSError(
                        f"ZEROMP_BLAS={path} multiplies ({m}, {k}) by ({k}, {n}) wrongly: "
                        "perhaps it takes 64-bit integers; use a build with 32-bit ones (LP64)"
                    )


# Loaded before the threads of BLAS libraries are limited; if that fails, its first use says why.
if os.environ.get("ZEROMP_BLAS"):
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(_library() or ""))
