"""Instructions that compute in each thread by itself: a table from opcodes to functions on typed arrays.

Opcodes stand in full. One with another modifier (``.sat``, another rounding) is another instruction, and not known until added.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptx_emulator.registers import TYPES, bf16_from_float

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class Elementwise:
    """``function`` of operands of the types ``sources``, its result of type ``target``."""

    function: Callable[..., np.ndarray]
    sources: tuple[str, ...]
    target: str


def _flushed(x: np.ndarray) -> np.ndarray:
    """``.ftz``: subnormal numbers are zeros of the same sign."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def _approximate(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Rounded correctly from float64; subnormal arguments and results flushed."""
    return lambda *x: _flushed(function(*(_flushed(a).astype(np.float64) for a in x)).astype(np.float32))


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def _extremum(pick: Callable[..., np.ndarray], low: bool) -> Callable[..., np.ndarray]:
    """Of two zeros, -0 is the smaller; numpy takes either."""

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        first = np.signbit(a) == low
        return np.where((a == 0) & (b == 0), np.where(first, a, b), pick(a, b))

    return function


def _widened(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    dtype = TYPES[WIDER[kind]]
    return lambda x: x.astype(dtype)


def _mul_wide(kind: str) -> Callable[..., np.ndarray]:
    wide = _widened(kind)
    return lambda a, b: wide(a) * wide(b)


def _mad_wide(kind: str) -> Callable[..., np.ndarray]:
    wide = _widened(kind)
    return lambda a, b, c: wide(a) * wide(b) + c


def _mul_hi(kind: str) -> Callable[..., np.ndarray]:
    wide = _widened(kind)
    bits = int(kind[1:])
    return lambda a, b: ((wide(a) * wide(b)) >> wide(np.array(bits))).astype(a.dtype)


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero. What a division by zero gives is not specified."""
    b = np.where(b == 0, 1, b).astype(b.dtype)
    quotient = a // b
    return (quotient + ((a % b != 0) & ((a < 0) != (b < 0)))).astype(a.dtype)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a - _divided(a, b) * b).astype(a.dtype)


def _shifted(shift: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """By at most all bits: numpy, as C, leaves open what more would do."""

    def function(x: np.ndarray, count: np.ndarray) -> np.ndarray:
        bits = 8 * x.dtype.itemsize
        moved = shift(x, np.minimum(count, bits - 1).astype(x.dtype))
        if shift is operator.rshift and x.dtype.kind == "i":
            return moved
        return np.where(count >= bits, 0, moved).astype(x.dtype)

    return function


def _field(x: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``bfe``: bits ``start``, ..., extended by the sign if the type has one."""
    bits = 8 * x.dtype.itemsize
    start, length = (start & np.uint32(0xFF)).astype(np.int64), (length & np.uint32(0xFF)).astype(np.int64)
    if (start + length > bits).any():
        length = np.minimum(length, np.maximum(bits - start, 0))
    left = np.where(length == 0, bits, bits - start - length).astype(np.uint32)
    up = _shifted(operator.lshift)(x, left)
    field = _shifted(operator.rshift)(up, (bits - length).astype(np.uint32))
    return np.where(length == 0, 0, field).astype(x.dtype)


def _permuted_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """``prmt``: four bytes of ``b:a``; the upper bit of a selector's digit asks for eight copies of that byte's sign."""
    pool = np.stack([a, b], 1).view(np.uint8)
    digits = (selector[:, None] >> (np.arange(4, dtype=np.uint32) * 4)) & 0xF
    picked = np.take_along_axis(pool, (digits & 7).astype(np.int64), 1)
    sign = np.where(picked >= 0x80, 0xFF, 0).astype(np.uint8)
    return np.ascontiguousarray(np.where(digits >= 8, sign, picked).astype(np.uint8)).view(np.uint32)[:, 0]


def _of_halves(function: Callable[..., np.ndarray], dtype: type) -> Callable[..., np.ndarray]:
    """``function`` of the upper and of the lower 16 bits."""
    return lambda a, b: function(*(np.ascontiguousarray(x).view(dtype) for x in (a, b))).view(np.uint32)


def _bf16x2(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    return _paired(bf16_from_float(upper), bf16_from_float(lower))


def _f16x2(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    return _paired(upper.astype(np.float16).view(np.uint16), lower.astype(np.float16).view(np.uint16))


def _paired(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    return (upper.astype(np.uint32) << np.uint32(16)) | lower


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


COMPARISONS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
# Ordered comparisons of floats are false for NaN, which numpy's != is not; the unordered ones are true.
FLOAT_COMPARISONS = {
    **{name: lambda a, b, f=f: f(a, b) & ~_unordered(a, b) for name, f in COMPARISONS.items()},
    **{f"{name}u": lambda a, b, f=f: f(a, b) | _unordered(a, b) for name, f in COMPARISONS.items()},
    "num": lambda a, b: ~_unordered(a, b),
    "nan": _unordered,
}
BITWISE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _table() -> dict[str, Elementwise]:
    table = {}

    def add(opcode: str, function: Callable[..., np.ndarray], *kinds: str) -> None:
        *operands, result = kinds
        table[opcode] = Elementwise(function, tuple(operands), result)

    for kind in INTEGERS:
        add(f"add.{kind}", operator.add, kind, kind, kind)
        add(f"sub.{kind}", operator.sub, kind, kind, kind)
        add(f"mul.lo.{kind}", operator.mul, kind, kind, kind)
        add(f"mad.lo.{kind}", lambda a, b, c: a * b + c, kind, kind, kind, kind)
        add(f"div.{kind}", _divided, kind, kind, kind)
        add(f"rem.{kind}", _remainder, kind, kind, kind)
        add(f"min.{kind}", np.minimum, kind, kind, kind)
        add(f"max.{kind}", np.maximum, kind, kind, kind)
        add(f"shr.{kind}", _shifted(operator.rshift), kind, "u32", kind)
        if kind in WIDER:
            add(f"mul.wide.{kind}", _mul_wide(kind), kind, kind, WIDER[kind])
            add(f"mad.wide.{kind}", _mad_wide(kind), kind, kind, WIDER[kind], WIDER[kind])
            add(f"mul.hi.{kind}", _mul_hi(kind), kind, kind, kind)
        if kind[0] == "s":
            add(f"neg.{kind}", operator.neg, kind, kind)
            add(f"abs.{kind}", np.abs, kind, kind)
        if kind[1:] != "16":
            add(f"bfe.{kind}", _field, kind, "u32", "u32", kind)
        for name, function in COMPARISONS.items():
            add(f"setp.{name}.{kind}", function, kind, kind, "pred")
        for other in INTEGERS:
            add(f"cvt.{kind}.{other}", lambda x, dtype=TYPES[kind]: x.astype(dtype), other, kind)

    for kind, dtype in (("u16x2", np.uint16), ("s16x2", np.int16)):
        for name, function in (("add", operator.add), ("min", np.minimum), ("max", np.maximum)):
            add(f"{name}.{kind}", _of_halves(function, dtype), "b32", "b32", "b32")

    for bits in ("16", "32", "64"):
        kind = f"b{bits}"
        for name, function in BITWISE.items():
            add(f"{name}.{kind}", function, kind, kind, kind)
        add(f"not.{kind}", operator.invert, kind, kind)
        add(f"shl.{kind}", _shifted(operator.lshift), kind, "u32", kind)
        add(f"shr.{kind}", _shifted(operator.rshift), kind, "u32", kind)
        for name in ("eq", "ne"):
            add(f"setp.{name}.{kind}", COMPARISONS[name], kind, kind, "pred")
        for letter in "bus" if bits == "16" else "busf":
            same = f"{letter}{bits}"
            add(f"mov.{same}", _same, same, same)
            add(f"selp.{same}", lambda a, b, c: np.where(c, a, b), same, same, "pred", same)
    for name, function in BITWISE.items():
        add(f"{name}.pred", function, "pred", "pred", "pred")
    add("not.pred", operator.invert, "pred", "pred")
    add("mov.pred", _same, "pred", "pred")
    add("prmt.b32", _permuted_bytes, "b32", "b32", "b32", "b32")

    for name, function in {"add": operator.add, "sub": operator.sub, "mul": operator.mul}.items():
        for rounding, kind in itertools.product(("", ".rn"), ("f32", "f32x2")):
            add(f"{name}{rounding}.{kind}", function, kind, kind, kind)
    for kind in ("f32", "f32x2"):
        add(f"fma.rn.{kind}", _fma, kind, kind, kind, kind)
    for half in ("f16", "bf16"):
        add(f"add.rn.f32.{half}", lambda a, b: a.astype(np.float32) + b, half, "f32", "f32")
        add(f"sub.rn.f32.{half}", lambda a, b: a.astype(np.float32) - b, half, "f32", "f32")
        add(f"fma.rn.f32.{half}", _fma, half, half, "f32", "f32")
    add("neg.f32", lambda x: (x.view(np.uint32) ^ np.uint32(1 << 31)).view(np.float32), "f32", "f32")
    add("abs.f32", np.abs, "f32", "f32")
    for name, pick, drop in (("min", np.minimum, np.fmin), ("max", np.maximum, np.fmax)):
        for kind in ("f32", "f16", "bf16", "f16x2", "bf16x2"):
            add(f"{name}.NaN.{kind}", _extremum(pick, name == "min"), kind, kind, kind)
            add(f"{name}.{kind}", _extremum(drop, name == "min"), kind, kind, kind)
    add("ex2.approx.ftz.f32", _approximate(np.exp2), "f32", "f32")
    add("lg2.approx.ftz.f32", _approximate(np.log2), "f32", "f32")
    add("rsqrt.approx.ftz.f32", _approximate(lambda x: 1 / np.sqrt(x)), "f32", "f32")
    add("rcp.approx.ftz.f32", _approximate(lambda x: 1 / x), "f32", "f32")
    for form in ("div.full.f32", "div.rn.f32"):
        add(form, lambda a, b: (a.astype(np.float64) / b).astype(np.float32), "f32", "f32", "f32")
    for kind in ("f32", "f16", "bf16", "f16x2", "bf16x2"):
        for name, function in FLOAT_COMPARISONS.items():
            add(f"setp.{name}.{kind}", function, kind, kind, "pred")

    add("cvt.f32.bf16", _same, "bf16", "f32")
    add("cvt.rn.bf16.f32", _same, "f32", "bf16")
    add("cvt.f32.f16", lambda x: x.astype(np.float32), "f16", "f32")
    add("cvt.rn.f16.f32", lambda x: x.astype(np.float16), "f32", "f16")
    add("cvt.rn.bf16x2.f32", _bf16x2, "f32", "f32", "b32")
    add("cvt.rn.f16x2.f32", _f16x2, "f32", "f32", "b32")
    for kind in ("s32", "u32"):
        add(f"cvt.rn.f32.{kind}", lambda x: x.astype(np.float32), kind, "f32")
    return table


ELEMENTWISE = _table()
