"""Implement number formats and arithmetic of PTX that numpy lacks, on arrays of unsigned words."""

from __future__ import annotations

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I8, I16, I32, I64 = np.int8, np.int16, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64
POISON32 = U32(0x7FC0DEAD)
"""The value of a 32-bit register before it is first written, a NaN."""


def flush(x):
    return np.where(np.abs(x) < F32(1.17549435e-38), np.copysign(F32(0), x), x)


def widen(words, kind):
    if kind == "f16":
        return (
            words.view(F16).astype(F32)
            if words.flags.c_contiguous
            else np.ascontiguousarray(words).view(F16).astype(F32)
        )
    return (words.astype(U32) << U32(16)).view(F32)


def to_bf16(x):
    u = x.view(U32)
    r = ((u >> U32(16)) & U32(1)) + U32(0x7FFF)
    return np.where(np.isnan(x), U16(0x7FFF), ((u + r) >> U32(16)).astype(U16))


def to_f16(x):
    return x.astype(F16).view(U16)


def pack16(high, low):
    return (high.astype(U32) << U32(16)) | low.astype(U32)


def bf16(x):
    return (x.astype(U32) << U32(16)).view(F32)


def divide(a, b):
    """Divide integers, rounding towards zero. Division by zero gives all ones, as on hardware."""
    if a.dtype.kind == "u":
        return np.where(
            b == 0, a.dtype.type(np.iinfo(a.dtype).max), a // np.where(b == 0, 1, b).astype(a.dtype)
        )
    q = np.abs(a.astype(I64)) // np.where(b == 0, 1, np.abs(b.astype(I64)))
    q = np.where((a < 0) != (b < 0), -q, q)
    return np.where(b == 0, -1, q).astype(a.dtype)


def remainder(a, b):
    if a.dtype.kind == "u":
        return np.where(b == 0, a, a % np.where(b == 0, 1, b).astype(a.dtype))
    r = np.abs(a.astype(I64)) % np.where(b == 0, 1, np.abs(b.astype(I64)))
    return np.where(b == 0, a, np.where(a < 0, -r, r)).astype(a.dtype)


def fma32(a, b, c):
    return (a.astype(F64) * b + c).astype(F32)


def prmt(a, b, s):
    both = a.astype(U64) | (b.astype(U64) << U64(32))
    out = np.zeros(a.shape, U32)
    for n in range(4):
        pick = (s >> U32(4 * n)) & U32(15)
        byte = ((both >> ((pick & U32(7)).astype(U64) * U64(8))) & U64(255)).astype(U32)
        sign = np.where(byte & U32(128), U32(255), U32(0))
        out |= np.where(pick & U32(8), sign, byte).astype(U32) << U32(8 * n)
    return out


def lop3(a, b, c, table):
    out = np.zeros(a.shape, a.dtype)
    for n in range(8):
        if table >> n & 1:
            out |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return out


def bfe(a, pos, length, signed):
    pos, length = (pos & U32(255)).astype(I64), (length & U32(255)).astype(I64)
    x = a.astype(I64)
    shifted = (
        np.where(pos > 31, np.where(signed & (x < 0), -1, 0), x >> np.minimum(pos, 31))
        if signed
        else np.where(pos > 31, 0, (x & 0xFFFFFFFF) >> np.minimum(pos, 31))
    )
    keep = np.where(length >= 32, 0xFFFFFFFF, (1 << np.minimum(length, 32)) - 1)
    out = shifted & keep
    if signed:
        top = np.where(length > 0, out >> np.maximum(length - 1, 0) & 1, 0)
        out = np.where((length > 0) & (length < 32) & (top == 1), out | ~keep, out)
    return (out & 0xFFFFFFFF).astype(U32)


def bfi(f, b, pos, length):
    pos, length = (pos & U32(255)).astype(U64), (length & U32(255)).astype(U64)
    keep = (((U64(1) << np.minimum(length, U64(32))) - U64(1)) << np.minimum(pos, U64(32))) & U64(
        0xFFFFFFFF
    )
    return ((b.astype(U64) & ~keep) | ((f.astype(U64) << np.minimum(pos, U64(32))) & keep)).astype(
        U32
    )


def shift(a, n, left, bits):
    """Shift by n bits. As in PTX (but not in numpy), n may exceed the width of the word."""
    n = n.astype(I64)
    big = n >= bits
    k = np.where(big, 0, n)
    if left:
        return np.where(big, a.dtype.type(0), a << k.astype(a.dtype))
    if a.dtype.kind == "i":
        return a >> np.where(big, bits - 1, n).astype(a.dtype)
    return np.where(big, a.dtype.type(0), a >> k.astype(a.dtype))


def funnel(a, b, c, left, wrap):
    both = (b.astype(U64) << U64(32)) | a.astype(U64)
    n = (c & U32(31)) if wrap else np.minimum(c, U32(32))
    n = n.astype(U64)
    if left:
        return ((both << n) >> U64(32)).astype(U32)
    return (both >> n).astype(U32)


def f2i(x, dtype, how):
    y = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[how](x.astype(F64))
    info = np.iinfo(dtype)
    return np.where(np.isnan(y), 0, np.clip(y, info.min, info.max)).astype(dtype)


def maxnum(a, b):
    """Return the maximum as PTX defines it: numbers are preferred to NaN, and +0 to -0.

    numpy does not define the sign of a zero.
    """
    out = np.fmax(a, b)
    zero = (a == 0) & (b == 0)
    return np.where(zero, (a.view(U32) & b.view(U32)).view(F32), out) if zero.any() else out


def minnum(a, b):
    out = np.fmin(a, b)
    zero = (a == 0) & (b == 0)
    return np.where(zero, (a.view(U32) | b.view(U32)).view(F32), out) if zero.any() else out
