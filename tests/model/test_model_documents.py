"""Test documents: each one has the logits that it has alone, and masked targets do not count."""

import pytest
import torch

from megatron.attention import choose
from megatron.model import GPT, BlockShape, Documents, GPTShape, LayerAttention, Plan
from megatron.parallel.loss import UNCOUNTED, mean_loss, token_losses
from megatron.positional import load

END, VOCAB = 7, 32
LENGTHS = [[5, 9, 1, 8], [1, 12, 7, 3], [23]]  # of the documents of each sequence; some end early


def packed():
    """Return tokens [3, 23]: documents that end with END, but each sequence's last may not."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(END + 1, VOCAB, (len(LENGTHS), 23), generator=generator)
    for row, lengths in zip(tokens, LENGTHS, strict=True):
        row[torch.tensor(lengths).cumsum(0) - 1] = END
    tokens[0, -1] = 9
    return tokens


def build(name, *, restart=True, window=None, end=END, recompute=False, rows=23, options=None):
    pos = load(name, **options or {})
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float64)
    block = BlockShape(hidden_size=24, num_heads=4)
    shape = GPTShape(2, VOCAB, block, rows, checkpoint_activations=recompute)
    layers = (LayerAttention(pos, attend, slice(None), window),) * 2
    documents = Documents(end, restart) if end is not None else None
    return GPT(Plan(shape, pos, attend, 1, layers=layers, documents=documents)).double()


CASES = {
    "kerple_log": {"restart": False},
    "alibi": {"restart": False},
    "rotary": {},
    "rotary, one count": {"restart": False},  # angles are relative
    "learned": {},
    "sinusoidal": {},
    "rotary + kerple_log": {},
    "kerple_log, window": {"window": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_a_document_has_the_logits_that_it_has_alone(case):
    name = case.partition(",")[0]
    model, tokens = build(name, **CASES[case]), packed()
    alone = build_alone(case)
    logits = model(tokens)
    for row, found, lengths in zip(tokens, logits, LENGTHS, strict=True):
        for piece, ours in zip(row.split(lengths), found.split(lengths), strict=True):
            torch.testing.assert_close(ours, alone(piece[None])[0], rtol=0, atol=1e-12)
    assert not torch.allclose(alone(tokens)[0, 5:], logits[0, 5:], atol=1e-3)


# Biases count from the document, and temperatures from the text, unless they temper the bias.
ONE_COUNT = ("learned", "sinusoidal", "fire", "kerple_log + log_n", "fire + log_n")
TEMPERED = {"log_n": {"temper_bias": True}}
GOES_ON = CASES | {f"{name}, one count": {"restart": False} for name in ONE_COUNT}
GOES_ON |= {
    "fire, near": {"restart": False, "options": {"length": 2}},
    "fire, window": {"restart": False, "options": {"length": 2}, "window": 2},
    "kerple_log + log_n, tempered": {"restart": False, "options": TEMPERED},
    "fire + log_n, tempered": {"restart": False, "options": TEMPERED},
}


@pytest.mark.parametrize("case", GOES_ON)
@torch.no_grad()
def test_generation_after_the_end_of_a_document_does_not_see_that_document(case):
    """As a text without a prompt, which begins with the end-of-document token."""
    model = build(case.partition(",")[0], **GOES_ON[case])
    tokens = torch.tensor([[END, 5, 2, 7, 9], [4, 3, 6, 7, 1]])
    wanted = torch.cat([model(tokens[:1]), model(tokens[1:])])
    cache = model.new_cache(torch.tensor([1, 1]))
    steps = [model.extend(each, cache, last_only=False) for each in tokens.split((1, 2, 1, 1), 1)]
    torch.testing.assert_close(torch.cat(steps, 1), wanted, rtol=0, atol=1e-12)
    alone = build_alone(case)(tokens[:1])
    assert not torch.allclose(wanted[0, 1:], alone[0, 1:], atol=1e-3)


@torch.no_grad()
def test_padding_with_the_id_of_the_end_of_a_document_ends_none():
    """Texts are padded with 0, which ends documents in GPT-NeoX's tokenizer."""
    model = build("learned", end=0)
    tokens, short = torch.tensor([[5, 2, 7, 9, 3, 8]]), torch.tensor([[4, 6]])
    both = torch.cat([tokens, torch.cat([torch.zeros(1, 4, dtype=torch.int64), short], 1)])
    cache = model.new_cache(torch.tensor([6, 2]))
    logits = [model.extend(piece, cache) for piece in both.split((2, 1, 3), 1)][-1]
    wanted = torch.cat([model(tokens)[:, -1], model(short)[:, -1]])
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-12)


def build_alone(case):
    return build(case.partition(",")[0], **(GOES_ON[case] | {"end": None}))


def test_only_a_prompts_last_document_counts_if_no_token_sees_others():
    ids = [4, END, 7, END, 9, 2]
    assert build("rotary").last_document(ids) == [9, 2]
    assert build("rotary").last_document(ids[:4]) == []
    assert build("rotary", end=None).last_document(ids) == ids
    model = build("rotary")
    model.documents = Documents(None, drawn_from=8)  # random positions, but one document
    assert model.last_document(ids) == ids


def test_recomputed_blocks_have_the_same_gradients():
    tokens, grads = packed(), []
    for recompute in (False, True):
        model = build("rotary + kerple_log", recompute=recompute).train()
        model(tokens[:, :-1], tokens[:, 1:]).mean().backward()
        grads.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_starts_of_documents():
    tokens = torch.tensor([[1, END, 2, 3, END, END, 4], [END, 1, 1, 1, 1, 1, END]])
    documents = Documents(END, restart_positions=True)
    starts = documents.starts(tokens)
    assert starts.tolist() == [[0, 0, 2, 2, 2, 5, 6], [0, 1, 1, 1, 1, 1, 1]]
    positions = documents.positions(starts)
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    some = torch.tensor([4, 5])
    assert documents.positions(starts, some).tolist() == [[2, 0], [3, 4]]
    assert Documents(END).positions(starts) is None


def test_uncounted_targets_have_no_loss_and_no_gradient():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[1, UNCOUNTED, 2], [UNCOUNTED, UNCOUNTED, 4]])
    losses = token_losses(logits, targets)
    mean = mean_loss(losses, targets)
    mean.backward()
    counted = targets != UNCOUNTED
    expected = -logits.log_softmax(-1)[counted].gather(-1, targets[counted][:, None]).mean()
    assert mean.item() == pytest.approx(expected.item(), rel=1e-15)
    assert (losses[~counted] == 0).all() and (logits.grad[~counted] == 0).all()
    assert (logits.grad[counted] != 0).all()
    assert mean_loss(torch.zeros(1, 1), torch.full((1, 1), UNCOUNTED)).item() == 0
