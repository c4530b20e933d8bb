# ruff: noqa: ARG001, PLR0913 - numba reads the arguments' names; arrays come with their offsets
"""Products of small tiles in the processor's registers, and transposes: for kernels that multiply.

[Note: tile] `multiply` makes 8 rows of 32 numbers of a product at once: 16 registers of 16 numbers,
to which each step along the inner axis adds one number of A times 32 of B, by fused multiply-add.
Every element is thus one chain of sums along the inner axis, in order, whatever the shapes and
wherever the tile lies, on every processor. What is multiplied lies in flat scratch arrays, so that
offsets say where; the caller pads to whole tiles.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types

from zeromp.vectors import fused, vector_exp

intrinsic: Callable[[Any], Any] = extending.intrinsic

ROWS, COLUMNS = 8, 32
_WIDTH = 16
_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, _WIDTH)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, start: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [start])


def _vector_at(builder: Any, pointer: Any, offset: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [offset]), _VECTOR.as_pointer())


def _vector(value: float) -> Any:
    return ir.Constant(_VECTOR, [_FLOAT(value)] * _WIDTH)


def _spread(builder: Any, number: Any) -> Any:
    """Vector of one number."""
    none = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(none, number, _INT(0))
    zeros = ir.Constant(ir.VectorType(_INT, _WIDTH), [0] * _WIDTH)
    return builder.shuffle_vector(first, none, zeros)


def _multiply(row_step: int) -> Any:
    """Code of a tile; A's rows are `row_step` apart and its columns `step`, an argument."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b, c = (
            _pointer(context, builder, signature.args[i], args[i], args[i + 3]) for i in range(3)
        )
        length, step, width, ldc, add = args[6:]
        tile = [(i, j) for i in range(ROWS) for j in range(COLUMNS // _WIDTH)]
        before = builder.block
        loop, done = (builder.append_basic_block(name) for name in ("tile", "done"))
        builder.branch(loop)

        builder.position_at_end(loop)
        phis = {place: builder.phi(_VECTOR) for place in tile}
        count, a_at, b_at = builder.phi(_LONG), builder.phi(a.type), builder.phi(b.type)
        rows = [
            builder.load(_vector_at(builder, b_at, _LONG(j * _WIDTH)), align=4)
            for j in range(COLUMNS // _WIDTH)
        ]
        sums = {}
        for i, j in tile:
            if j == 0:
                number = builder.load(builder.gep(a_at, [_LONG(i * row_step)]), align=4)
                factor = _spread(builder, number)
            sums[i, j] = fused(builder, factor, rows[j], phis[i, j])
        after = builder.add(count, _LONG(1))
        for phi, start, following in (
            (count, _LONG(0), after),
            (a_at, a, builder.gep(a_at, [step])),
            (b_at, b, builder.gep(b_at, [width])),
            *((phis[place], _vector(0), sums[place]) for place in tile),
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", after, length), loop, done)

        builder.position_at_end(done)
        places = {
            (i, j): _vector_at(
                builder, c, builder.add(builder.mul(ldc, _LONG(i)), _LONG(j * _WIDTH))
            )
            for i, j in tile
        }
        with builder.if_else(add) as (adding, writing):
            with adding:
                for place, target in places.items():
                    total = builder.fadd(builder.load(target, align=4), sums[place])
                    builder.store(total, target, align=4)
            with writing:
                for place, target in places.items():
                    builder.store(sums[place], target, align=4)
        return context.get_dummy_value()

    return generate


_NUMBERS = (types.int64,) * 7


@intrinsic
def multiply(_context: Any, a: Any, b: Any, c: Any, a0: Any, b0: Any, c0: Any, length: Any,
             step: Any, width: Any, ldc: Any, add: Any) -> Any:  # fmt: skip
    """Write or add ``C[i, j] = sum over k < length of A[i, k] B[k, j]``, i < 8, j < 32.

    A[i, k] is ``a[a0 + i + k * step]``, B[k, j] ``b[b0 + k * width + j]``, C[i, j]
    ``c[c0 + i * ldc + j]``. length is at least 1.
    """
    return types.void(a, b, c, *_NUMBERS, types.boolean), _multiply(1)


@intrinsic
def multiply_rows(_context: Any, a: Any, b: Any, c: Any, a0: Any, b0: Any, c0: Any, length: Any,
                  step: Any, width: Any, ldc: Any, add: Any) -> Any:  # fmt: skip
    """`multiply` with A[i, k] in ``a[a0 + 32 i + k * step]``."""
    return types.void(a, b, c, *_NUMBERS, types.boolean), _multiply(COLUMNS)


@intrinsic
def transpose(_context: Any, source: Any, out: Any, start: Any, step: Any, to: Any,
              out_step: Any) -> Any:  # fmt: skip
    """Write 16 rows of 16 numbers, `step` apart in source, as columns, `out_step` apart in out."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start, step, to, out_step = args[2:]
        a = _pointer(context, builder, signature.args[0], args[0], start)
        b = _pointer(context, builder, signature.args[1], args[1], to)
        rows = [
            builder.load(_vector_at(builder, a, builder.mul(step, _LONG(i))), align=4)
            for i in range(_WIDTH)
        ]
        # Interleaving rows i and i + 8, four times over, turns rows into columns.
        half = _WIDTH // 2
        low = [x for i in range(half) for x in (i, i + _WIDTH)]
        high = [x for i in range(half, _WIDTH) for x in (i, i + _WIDTH)]
        masks = [ir.Constant(ir.VectorType(_INT, _WIDTH), m) for m in (low, high)]
        for _ in range(4):
            rows = [
                builder.shuffle_vector(rows[i], rows[i + half], mask)
                for i in range(half)
                for mask in masks
            ]
        for i, row in enumerate(rows):
            builder.store(row, _vector_at(builder, b, builder.mul(out_step, _LONG(i))), align=4)
        return context.get_dummy_value()

    return types.void(source, out, *(types.int64,) * 4), generate


# ---- strips: rows of 32 numbers, one below the other ---------------------------------------------


def _strip(builder: Any, count: Any, pointers: Any, before: Any, body: Callable[..., Any]) -> Any:
    """Walk down 16 columns: `body` is given each row's vectors, and what it returned before."""
    start = builder.block
    loop, done = (builder.append_basic_block(name) for name in ("strip", "done"))
    builder.branch(loop)
    builder.position_at_end(loop)
    row, carried = builder.phi(_LONG), builder.phi(_VECTOR)
    at = [_vector_at(builder, p, builder.mul(row, _LONG(COLUMNS))) for p in pointers]
    result = body(carried, at)
    after = builder.add(row, _LONG(1))
    for phi, first, following in ((row, _LONG(0), after), (carried, before, result)):
        phi.add_incoming(first, start)
        phi.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", after, count), loop, done)
    builder.position_at_end(done)
    return result


def _columns(generate: Callable[..., None]) -> Any:
    """Code that calls `generate` with the pointers of both halves of the columns."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        arrays = [i for i, kind in enumerate(kinds) if isinstance(kind, types.Array)]
        others = [arg for i, arg in enumerate(args) if i not in arrays]
        starts, rest = others[: len(arrays)], others[len(arrays) :]
        for half in range(0, COLUMNS, _WIDTH):
            pointers = [
                _pointer(context, builder, kinds[i], args[i], builder.add(start, _LONG(half)))
                for i, start in zip(arrays, starts, strict=True)
            ]
            generate(builder, pointers, *rest)
        return context.get_dummy_value()

    return code


@intrinsic
def strip_largest(_context: Any, strip: Any, top: Any, start: Any, to: Any, count: Any) -> Any:
    """Write the maximum of each column of a strip of `count` rows, NaN left out, to top."""

    def generate(builder: Any, pointers: Any, count: Any) -> None:
        def body(before: Any, at: Any) -> Any:
            x = builder.load(at[0], align=4)
            return builder.select(builder.fcmp_ordered(">", x, before), x, before)

        lanes = _strip(builder, count, pointers[:1], _vector(float("-inf")), body)
        builder.store(lanes, builder.bitcast(pointers[1], _VECTOR.as_pointer()), align=4)

    return types.void(strip, top, *(types.int64,) * 3), _columns(generate)


@intrinsic
def strip_exp(_context: Any, strip: Any, top: Any, total: Any, start: Any, at_top: Any, to: Any,
              count: Any, scale: Any) -> Any:  # fmt: skip
    """Turn a strip into ``exp((strip - top) * scale)``; write each column's sum to total."""

    def generate(builder: Any, pointers: Any, count: Any, scale: Any) -> None:
        top = builder.load(builder.bitcast(pointers[1], _VECTOR.as_pointer()), align=4)
        factor = _spread(builder, scale)

        def body(before: Any, at: Any) -> Any:
            x = builder.fsub(builder.load(at[0], align=4), top)
            e = vector_exp(builder, builder.fmul(x, factor))
            builder.store(e, at[0], align=4)
            return builder.fadd(before, e)

        lanes = _strip(builder, count, pointers[:1], _vector(0), body)
        builder.store(lanes, builder.bitcast(pointers[2], _VECTOR.as_pointer()), align=4)

    return types.void(strip, top, total, *(types.int64,) * 4, types.float32), _columns(generate)


@intrinsic
def strip_slopes(_context: Any, strip: Any, slopes: Any, norm: Any, delta: Any, start: Any,
                 at: Any, at_norm: Any, at_delta: Any, count: Any, scale: Any) -> Any:  # fmt: skip
    """Turn scores into probabilities p, and their gradients d into those of the scores.

    p is ``exp(score * scale - norm)``, and d becomes ``p * (d - delta) * scale``.
    """

    def generate(builder: Any, pointers: Any, count: Any, scale: Any) -> None:
        norm, delta = (
            builder.load(builder.bitcast(p, _VECTOR.as_pointer()), align=4) for p in pointers[2:]
        )
        factor = _spread(builder, scale)

        def body(before: Any, at: Any) -> Any:
            score, d = (builder.load(pointer, align=4) for pointer in at)
            p = vector_exp(builder, builder.fsub(builder.fmul(score, factor), norm))
            builder.store(p, at[0], align=4)
            slope = builder.fmul(builder.fmul(p, builder.fsub(d, delta)), factor)
            builder.store(slope, at[1], align=4)
            return before

        _strip(builder, count, pointers[:2], _vector(0), body)

    arrays = (strip, slopes, norm, delta)
    return types.void(*arrays, *(types.int64,) * 5, types.float32), _columns(generate)
