"""Compute causal attention with a distance kernel in float64, without any code of this project.

    x_ij = scale q_i.k_j w(d) + b(d), d = offset + i - j >= 0;  out = (keep * softmax(x) / (1-p)) v

The gradients are derived by hand. `keep` is the dropout mask, drawn by Philox 4x32-10 (Salmon et
al. 2011), which is implemented here from the paper.
"""

from __future__ import annotations

import numpy as np


def terms(kind: str, theta, d):
    """Return (b, w, derivatives of b, derivatives of w) at the distances d (float64, >= 0).

    The derivatives are lists with one entry for each column of theta.
    """
    zero, one = np.zeros_like(d), np.ones_like(d)
    with np.errstate(all="ignore"):
        logd = np.where(d > 0, np.log(np.where(d > 0, d, 1)), 0)

    def powers(p):
        x = np.where(d > 0, np.exp(p * logd), 0)
        return x, x * logd

    if kind == "none":
        return zero, one, [], []
    if kind == "alibi":
        return -theta[0] * d, one, [], []
    if kind == "kerple_log":
        p, a = theta
        return -p * np.log1p(a * d), one, [-np.log1p(a * d), -p * d / (1 + a * d)], [zero, zero]
    if kind == "kerple_log3":
        p, a, r = theta
        x, y = powers(r)
        db = [-np.log1p(a * x), -p * x / (1 + a * x), -p * a * y / (1 + a * x)]
        return -p * np.log1p(a * x), one, db, [zero] * 3
    if kind == "kerple_power":
        p, a = theta
        x, y = powers(p)
        return -a * x, one, [-a * y, -x], [zero, zero]
    if kind == "kerple_sum":  # one logarithm, two powers
        p, a, p1, a1, p2, a2 = theta
        (x1, y1), (x2, y2) = powers(p1), powers(p2)
        db = [-np.log1p(a * d), -p * d / (1 + a * d), -a1 * y1, -x1, -a2 * y2, -x2]
        return -p * np.log1p(a * d) - a1 * x1 - a2 * x2, one, db, [zero] * 6
    if kind == "kerple_power_mul":
        p, a = theta
        x, y = powers(p)
        w = np.exp(-a * x)
        return zero, w, [zero, zero], [-a * y * w, -x * w]
    if kind == "kerple_power_add_mul":
        p, a, p2, a2 = theta
        x, y = powers(p)
        x2, y2 = powers(p2)
        w = np.exp(-a2 * x2)
        return -a * x, w, [-a * y, -x, zero, zero], [zero, zero, -a2 * y2 * w, -x2 * w]
    if kind == "rpe":  # buckets as in T5, causal
        K, exact, far = len(theta), len(theta) // 2, 128
        with np.errstate(all="ignore"):
            ratio = np.log(np.maximum(d, exact).astype(np.float32) / np.float32(exact))
            ratio = np.float32(ratio / np.float32(np.log(far / exact)))
            big = exact + np.floor(ratio * np.float32(K - exact))
        bucket = np.where(d < exact, d, np.minimum(big, K - 1)).astype(int)
        return theta[bucket], one, [(bucket == n).astype(float) for n in range(K)], None
    raise KeyError(kind)


def philox(seed: int, c0, c1, c2, c3):
    m = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in np.broadcast_arrays(c0, c1, c2, c3))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        x, y = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        high_x, high_y = x >> np.uint64(32), y >> np.uint64(32)
        c0, c1, c2, c3 = high_y ^ c1 ^ np.uint64(k0), y & m, high_x ^ c3 ^ np.uint64(k1), x & m
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def mask(seed, B, H, T, S, p):
    keys = (S + 3) // 4
    item = np.arange(B * H).reshape(B, H, 1, 1)
    bits = np.stack(philox(seed, np.arange(keys), np.arange(T)[:, None], item, 0), -1)
    threshold = np.uint64(round((1 - p) * (1 << 24)))
    return (bits.reshape(B, H, T, 4 * keys)[..., :S] >> np.uint64(8)) < threshold


def attention(kind, q, k, v, do, theta, scale, offset=0, keep=None, p=0.0, half=None, given=None):
    """Return a dictionary with the arrays out, lse (to base 2), dq, dk, dv and dtheta.

    Args:
        keep: The dropout mask, true where a weight is kept; None without dropout.
        half: A function that rounds values to 16 bits, used where 16-bit kernels must round.
        given: The output from which delta = do . out is computed; None takes the exact output.
    """
    r = half or (lambda x: x)
    B, H, T, E = q.shape
    S, group = k.shape[2], H // k.shape[1]
    k_, v_ = np.repeat(k, group, 1), np.repeat(v, group, 1)
    d = offset + np.arange(T)[:, None] - np.arange(S)[None, :]
    seen, d = d >= 0, np.maximum(d, 0).astype(np.float64)
    out, lse = np.zeros((B, H, T, E)), np.zeros((B, H, T))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dtheta = None if theta is None else np.zeros_like(theta)
    rescale = 1 / (1 - p)
    for h in range(H):
        b, w, db, dw = terms(kind, None if theta is None else theta[h], d)
        for n in range(B):
            s = scale * (q[n, h] @ k_[n, h].T)
            x = np.where(seen, s * w + b, -np.inf)
            top = x.max(1, keepdims=True)
            e = np.exp(x - top)
            total = e.sum(1, keepdims=True)
            P = e / total
            lse[n, h] = ((top + np.log(total)) / np.log(2))[:, 0]
            kept = P if keep is None else P * keep[n, h]
            out[n, h] = r((r(kept * total) @ v_[n, h]) * rescale / total)
            dp = do[n, h] @ v_[n, h].T
            if keep is not None:
                dp = dp * keep[n, h] * rescale
            delta = (do[n, h] * (out if given is None else given)[n, h]).sum(1, keepdims=True)
            ds = P * (dp - delta)
            dq[n, h] = r(scale * (r(ds * w) @ k_[n, h]))
            dk[n, h // group] += scale * (r(ds * w).T @ q[n, h])
            dv[n, h // group] += r(kept * rescale).T @ do[n, h]
            if theta is not None:
                for m, one in enumerate(db):
                    through_w = 0 if dw is None else (ds * s * dw[m]).sum()
                    dtheta[h, m] += (ds * one).sum() + through_w
    return {"out": out, "lse": lse, "dq": dq, "dk": r(dk), "dv": r(dv), "dtheta": dtheta}
