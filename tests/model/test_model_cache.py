"""Test that a model continues a text with cached keys as if it read the whole text again."""

from __future__ import annotations

import pytest
import torch

from megatron.attention import choose
from megatron.model import GPT, BlockShape, GPTShape, LayerAttention, Plan, cache
from megatron.positional import PositionalError, load, names
from tests.helpers.peak import peak_bytes

VOCAB, TRAINED = 32, 4
CROSSES = [
    "rotary + kerple_log",
    "kerple_log + forget_gate",
    "rotary + log_n + sink",
    "sinusoidal + kerple_power_mul + log_n + forget_gate + sink",
]
LENGTH = 16 * TRAINED


def build(name, *, backend="auto", window=None, rows=LENGTH, offset=0, **block):
    pos = load(name)
    attend = choose(
        backend, pos, device_type="cpu", dtype=torch.float64, training=False, masked=True,
        decays=pos.has("gate"),
    )  # fmt: skip
    shape = BlockShape(**({"hidden_size": 16, "num_heads": 2, "rotary_pct": 0.5} | block))
    # The second layer has no window, so that the two caches differ.
    layers = tuple(LayerAttention(pos, attend, slice(None), each) for each in (window, None))
    whole = GPTShape(2, VOCAB, shape, rows, position_offset=offset)
    plan = Plan(whole, pos, attend, 1, layers=layers)
    model = GPT(plan).double().eval()
    with torch.no_grad():
        for each in model.parameters():  # so that every term and every layer counts
            each.add_(torch.rand_like(each), alpha=0.3)
    return model


def tokens(count=1, length=LENGTH):
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(3))


def in_pieces(model, ids, sizes):
    """Return the logits of all positions, from pieces of these sizes and then one by one."""
    kept = model.new_cache(torch.full((len(ids),), ids.shape[1]))
    sizes = [*sizes, *[1] * (ids.shape[1] - sum(sizes))]
    return torch.cat([model.extend(x, kept, last_only=False) for x in ids.split(sizes, 1)], 1)


@torch.no_grad()
@pytest.mark.parametrize("name", [*names(), *CROSSES])
def test_cached_logits_equal_those_of_the_whole_text(monkeypatch, name):
    """The text is 16 times as long as the training length, and the cache grows several times."""
    monkeypatch.setattr(cache, "SPARE", 20)
    model, ids = build(name), tokens(2)
    whole = model(ids)
    torch.testing.assert_close(in_pieces(model, ids, [11, 5, 22]), whole, rtol=0, atol=1e-12)
    padded, lengths = ids[:, -30:], [30, 13]
    kept = model.new_cache(torch.tensor(lengths))
    found = torch.cat([model.extend(x, kept, last_only=False) for x in padded.split(9, 1)], 1)
    for row, length in enumerate(lengths):
        alone = model(padded[row : row + 1, -length:])
        torch.testing.assert_close(found[row, -length:], alone[0], rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "blocked", "sdpa"])
@pytest.mark.parametrize("window", [0, 1, 7])
def test_a_window_forgets_keys_that_nobody_sees(monkeypatch, backend, window):
    monkeypatch.setattr(cache, "SPARE", 4)
    model = build("rotary + kerple_log + forget_gate", backend=backend, window=window)
    ids = tokens(2)
    lengths = [9, 4]
    kept = model.new_cache(torch.tensor(lengths))
    pieces = ids.split([9, 3, *[1] * (LENGTH - 12)], 1)
    found = torch.cat([model.extend(x, kept, last_only=False) for x in pieces], 1)
    whole = model(ids[:1]), model(ids[1:, 5:])
    torch.testing.assert_close(found[:1], whole[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1:, 5:], whole[1], rtol=0, atol=1e-12)
    new = (*[torch.zeros(2, 2, 1, 8)] * 2, torch.zeros(2, 2, 1))
    keys = [kept[i].extend(*new)[0] for i in (0, 1)]
    assert keys[0].shape[2] <= window + 4 + 1 and keys[1].shape[2] == LENGTH + 1


@torch.no_grad()
@pytest.mark.parametrize(
    "block", [{"gpt_j_residual": True}, {"norm": "rmsnorm", "activation": "geglu"}]
)
def test_other_blocks(block):
    model, ids = build("rotary", **block), tokens(1, 40)
    torch.testing.assert_close(in_pieces(model, ids, [7]), model(ids), rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_last_logits_alone():
    model, ids = build("kerple_log"), tokens(2, 10)
    last = model.extend(ids, model.new_cache(torch.tensor([10, 10])))
    torch.testing.assert_close(last, model(ids)[:, -1], rtol=0, atol=1e-12)


def test_a_position_table_ends():
    model = build("learned", rows=TRAINED)
    kept = model.new_cache(torch.tensor([TRAINED, 3]))
    model.extend(tokens(2, TRAINED), kept)
    with pytest.raises(PositionalError, match=f"has {TRAINED} positions, .* of {TRAINED + 1} "):
        model.extend(tokens(2, 1), kept)


@torch.no_grad()
def test_memory_is_linear_in_the_length(tmp_path):
    def peak(length):
        model, ids = build("kerple_log"), tokens(1, length)

        def call():
            kept = model.new_cache(torch.tensor([64]))
            for piece in ids.split(64, 1):
                model.extend(piece, kept)
            for _ in range(3):
                model.extend(ids[:, :1], kept)

        return peak_bytes(call, tmp_path)

    short, long = peak(512), peak(2048)
    assert long < 4.2 * short


@pytest.mark.parametrize(
    "name, offset, longest",
    [
        ("kerple_log", 0, None),
        ("none", 0, None),
        ("rotary", 0, 48),
        ("sinusoidal", 0, 48),
        ("rotary + kerple_log", 0, 48),
        ("learned", 2, 46),
    ],
)
def test_the_longest_text_that_clients_may_give(name, offset, longest):
    assert build(name, rows=48, offset=offset).longest_text == longest
