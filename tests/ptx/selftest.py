"""Test the emulator on handwritten PTX: matrix products, copies, races, bounds and arithmetic.

python tests/ptx/selftest.py
"""

import numpy as np

from tests.ptx.emulator import machine, memory
from tests.ptx.emulator.codegen import Generator, parameter, poisons
from tests.ptx.emulator.parser import parse

HEAD = """
.version 8.4
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry t(.param .u64 .ptr .global .align 16 t_param_0, .param .u64 t_param_1)
.reqntid {threads}, 1, 1
{{
.reg .pred %p<20>; .reg .b16 %rs<20>; .reg .b32 %r<60>; .reg .b64 %rd<20>;
ld.param.b64 %rd1, [t_param_0];
ld.param.b64 %rd2, [t_param_1];
mov.u32 %r1, %tid.x;
{body}
ret;
}}
"""


def run(body, inp, out_bytes, threads=32, shared=4096):
    kernel = parse(HEAD.format(threads=threads, body=body))
    fn, _ = Generator(kernel).generate()
    g, f = memory.Global(), memory.Findings()
    a, b = (
        g.add(inp.view(np.uint8).reshape(-1).copy(), "in"),
        g.add(np.full(out_bytes, 0xFF, np.uint8), "out"),
    )
    g.freeze()
    p = machine.Program(g, f, threads, shared, (0, 0, 0), (1, 1, 1))
    try:
        with np.errstate(all="ignore"):
            fn(p, [parameter("u64", a), parameter("u64", b)], poisons(threads))
    except memory.Stop:
        pass
    return g.back(b, out_bytes).copy(), f.lines()


PRODUCT = """
    mul.lo.s32 %r2, %r1, 16; cvt.u64.u32 %rd3, %r2; add.s64 %rd4, %rd1, %rd3;
    mov.b32 %r3, global_smem; add.s32 %r4, %r3, %r2;
    cp.async.cg.shared.global [ %r4 + 0 ], [ %rd4 + 0 ], 0x10;
    setp.lt.u32 %p1, %r1, 16; add.s64 %rd5, %rd4, 512; add.s32 %r5, %r4, 512;
    @%p1 cp.async.cg.shared.global [ %r5 + 0 ], [ %rd5 + 0 ], 0x10;
    cp.async.commit_group ; WAIT
    bar.sync 0;
    and.b32 %r6, %r1, 15; shl.b32 %r7, %r6, 5; shr.u32 %r8, %r1, 4; shl.b32 %r9, %r8, 4;
    add.s32 %r10, %r7, %r9; add.s32 %r10, %r10, %r3;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r11, %r12, %r13, %r14}, [%r10];
    shl.b32 %r15, %r6, 4; add.s32 %r15, %r15, %r3;
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r16, %r17}, [%r15+512];
    mov.b32 %r20, 0f00000000; mov.b32 %r21, %r20; mov.b32 %r22, %r20; mov.b32 %r23, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r20, %r21, %r22, %r23 },
        { %r11, %r12, %r13, %r14 }, { %r16, %r17 }, { %r20, %r21, %r22, %r23 };
    shr.u32 %r30, %r1, 2; and.b32 %r31, %r1, 3; mad.lo.s32 %r32, %r30, 8, 0;
    mad.lo.s32 %r33, %r31, 2, %r32; mul.wide.u32 %rd6, %r33, 4; add.s64 %rd7, %rd2, %rd6;
    st.global.v2.b32 [ %rd7 + 0 ], { %r20, %r21 };
    st.global.v2.b32 [ %rd7 + 256 ], { %r22, %r23 };
"""
EXCHANGE = """
    shl.b32 %r2, %r1, 2; mov.b32 %r3, global_smem; add.s32 %r4, %r3, %r2; xor.b32 %r5, %r2, 128;
    add.s32 %r6, %r5, %r3;
    st.shared.b32 [%r4], %r1;
    BAR
    ld.shared.b32 %r7, [%r6]; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd2, %rd3;
    st.global.b32 [%rd4], %r7;
"""
ELEMENTWISE = """
    mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    ld.global.b32 %r2, [%rd4];
    INS
    st.global.b32 [%rd5], %r3;
"""


def check_product(rng):
    """Multiply A [16, 16] by B [16, 8], both fp16, with cp.async, ldmatrix and mma.

    Without the wait for cp.async, the result must be NaN and the emulator must report a finding.
    """
    A, B = (
        rng.standard_normal((16, 16)).astype(np.float16),
        rng.standard_normal((16, 8)).astype(np.float16),
    )
    data = np.concatenate([A.ravel(), B.ravel()])
    out, found = run(PRODUCT.replace("WAIT", "cp.async.wait_group 0;"), data, 512)
    err = np.abs(out.view(np.float32).reshape(16, 8) - A.astype(float) @ B.astype(float)).max()
    assert err < 1e-5 and not found, (err, found)
    out, found = run(PRODUCT.replace("WAIT", ""), data, 512)
    assert np.isnan(out.view(np.float32)).all() and any("before its copy" in x for x in found), (
        found
    )


def check_races(rng):
    """Check that the emulator finds a race without a barrier, none with it, and a bad store."""
    data = rng.standard_normal(384).astype(np.float16)
    out, found = run(EXCHANGE.replace("BAR", ""), data, 256, 64)
    assert any(x.startswith("race") for x in found), found
    out, found = run(EXCHANGE.replace("BAR", "bar.sync 0;"), data, 256, 64)
    assert not found and (out.view(np.uint32) == np.arange(64) ^ 32).all(), found
    out, found = run(EXCHANGE.replace("BAR", "bar.sync 0;"), data, 252, 64)
    assert any("out of bounds (store)" in x for x in found), found


def integer_cases(u, s):
    """Return pairs (instruction, its results computed in plain Python).

    Args:
        u: The input words as unsigned numbers.
        s: The same words as signed numbers.
    """
    m = 0xFFFFFFFF
    return (
        ("bfe.u32 %r3, %r2, 5, 7;", [(v >> 5) & 127 for v in u]),
        ("shl.b32 %r3, %r2, 33;", [0 for v in u]),
        ("shr.s32 %r3, %r2, 40;", [-1 & m if v < 0 else 0 for v in s]),
        (
            "prmt.b32 %r3, %r2, %r1, 0x5410U;",
            [(v & 0xFFFF) | (n & 0xFFFF) << 16 for n, v in enumerate(u)],
        ),
        ("mul.hi.u32 %r3, %r2, -766435501;", [(v * 0xD2511F53) >> 32 for v in u]),
        (
            "mul.hi.s32 %r3, %r2, -766435501;",
            [((v * (0xD2511F53 - (1 << 32))) >> 32) & m for v in s],
        ),
        ("rem.s32 %r3, %r2, 7;", [(abs(v) % 7 * (1 if v >= 0 else -1)) & m for v in s]),
        ("div.s32 %r3, %r2, -7;", [(abs(v) // 7 * (-1 if v >= 0 else 1)) & m for v in s]),
        ("shf.l.wrap.b32 %r3, %r2, %r1, 8;", [(n << 8 | v >> 24) & m for n, v in enumerate(u)]),
        ("lop3.b32 %r3, %r2, %r1, 255, 0x1E;", [v ^ (n | 255) for n, v in enumerate(u)]),
        ("bfi.b32 %r3, %r1, %r2, 8, 4;", [(v & ~0xF00) | (n & 15) << 8 for n, v in enumerate(u)]),
        ("shfl.sync.bfly.b32 %r3, %r2, 4, 31, -1;", [u[n ^ 4] for n in range(32)]),
        ("shfl.sync.idx.b32 %r3, %r2, 2, 0x1c1f, -1;", [u[n // 4 * 4 + 2] for n in range(32)]),
        (
            "{ .reg .pred q; setp.lt.s32 q, %r2, 0; selp.b32 %r3, 1, 2, q; }",
            [1 if v < 0 else 2 for v in s],
        ),
    )


def check_integers(rng):
    x = rng.integers(0, 1 << 32, 32, dtype=np.uint32)
    x[:6] = 0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 31
    s = x.view(np.int32).astype(object)
    u = x.astype(object)
    for ins, want in integer_cases(u, s):
        out, found = run(ELEMENTWISE.replace("INS", ins), x, 128)
        got = out.view(np.uint32).astype(object)
        assert list(got) == [int(v) for v in want] and not found, (
            ins,
            list(map(hex, got))[:6],
            [hex(v) for v in want[:6]],
            found,
        )


def check_rounding(rng):
    """Check that fp32 is rounded to the nearest bf16, with ties to even."""
    x = np.concatenate(
        [
            rng.standard_normal(28).astype(np.float32),
            np.array([1.00390625, 1.01171875, np.inf, 3.4e38], np.float32),
        ]
    )
    out, found = run(ELEMENTWISE.replace("INS", "cvt.rn.bf16x2.f32 %r3, %r2, %r2;"), x, 128)
    lo = out.view(np.uint16)[::2].astype(np.uint32) << 16
    back = lo.view(np.float32)
    with np.errstate(all="ignore"):
        step = 2.0 ** (np.floor(np.log2(np.abs(x.astype(float)))) - 7)
        want = np.rint(x.astype(float) / step) * step
    assert (back[:30] == want[:30]).all() and np.isinf(back[30:]).all()


def main():
    rng = np.random.default_rng(0)
    for check in (check_product, check_races, check_integers, check_rounding):
        check(rng)
    print("self test: all as expected")


if __name__ == "__main__":
    main()
