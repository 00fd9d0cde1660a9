"""Time a generated token beside transformers' GPTNeoX, on the CPU.

    python benchmarks/host/generation_speed.py --out benchmarks/results/generation_speed.md

Both models have random weights, and the same layers, width, heads and vocabulary. They continue the
same random prompt greedily: this project as `generate.py` does, transformers by `generate`. They
take turns, each with one thread. The times are CPU seconds of the process, from the first new token
to the last, so a busy machine changes them little. The table has the smallest of the rounds.

The last row is the time of one vector's products with all of GPTNeoX's matrices, by torch's
`linear`. transformers computes a token with it, and this project with
`megatron.parallel.matmul_library`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from unittest import mock

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, StoppingCriteriaList

from benchmarks.report import facts
from megatron.attention import choose
from megatron.data.tokenizers.build import build_tokenizer
from megatron.generation import loop
from megatron.generation.sampling import Sampling
from megatron.generation.text import Continuation
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.parallel.groups import ALONE
from megatron.positional import load

VOCABULARY, PROMPT, ROUNDS = 50304, 512, 5


def theirs(layers: int, width: int) -> GPTNeoXForCausalLM:
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 64, intermediate_size=4 * width,
        max_position_embeddings=16384, attn_implementation="sdpa", use_parallel_residual=False,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).eval()


def ours(layers: int, width: int, pos_emb: str) -> GPT:
    pos = load(pos_emb)
    attend = choose("auto", pos, device_type="cpu", dtype=torch.float32)
    shape = GPTShape(layers, VOCABULARY, BlockShape(width, width // 64), 16384, tie_weights=False)
    return GPT(Plan(shape, pos, attend, 1)).eval()


def seconds_of_theirs(model: GPTNeoXForCausalLM, ids: list[int], tokens: int) -> float:
    """Return the CPU seconds of a token."""
    times = []

    def stamp(*_: object, **__: object) -> bool:
        times.append(time.process_time())
        return False

    given = torch.tensor([ids])
    model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=tokens,
        min_new_tokens=tokens, pad_token_id=0, stopping_criteria=StoppingCriteriaList([stamp]),
    )  # fmt: skip
    assert len(times) == tokens
    return (times[-1] - times[0]) / (tokens - 1)


def seconds_of_ours(model: GPT, ids: list[int], tokens: int) -> float:
    """Return the CPU seconds of a token."""
    speed, tokenizer = loop.Speed(), build_tokenizer("ByteLevelTokenizer")
    with mock.patch.object(loop.time, "monotonic", time.process_time):
        loop.continue_texts(
            model, [ids], [Continuation(tokenizer, ids)], [torch.Generator()], speed=speed,
            how=Sampling(temperature=0.0), max_new_tokens=tokens, banned=[tokenizer.eod], tp=ALONE,
        )  # fmt: skip
    assert speed.tokens == tokens - 1
    return speed.seconds / speed.tokens


def seconds_of_products(model: GPTNeoXForCausalLM, tokens: int) -> float:
    """Return the CPU seconds of a token's products with the model's matrices, and nothing else."""
    weights = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear)]
    vectors = {weight.shape[1]: torch.randn(1, weight.shape[1]) for weight in weights}
    with torch.inference_mode():
        began = time.process_time()
        for _ in range(tokens):
            for weight in weights:
                torch.nn.functional.linear(vectors[weight.shape[1]], weight)
        return (time.process_time() - began) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second beside GPTNeoX")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (PROMPT,)).tolist()
    neox = theirs(args.layers, args.width)
    models = {name: ours(args.layers, args.width, name) for name in ("rotary", "kerple_log")}
    names = ("transformers' GPTNeoX", *models, "the products alone, by torch")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        found["transformers' GPTNeoX"].append(seconds_of_theirs(neox, ids, args.tokens))
        for name, model in models.items():
            found[name].append(seconds_of_ours(model, ids, args.tokens))
        found["the products alone, by torch"].append(seconds_of_products(neox, args.tokens))
    best = {name: min(values) for name, values in found.items()}
    yardstick = best["transformers' GPTNeoX"]
    shape = f"{args.layers} layers, width {args.width}, vocabulary {VOCABULARY:,}, one thread, "
    shape += f"{args.tokens} tokens after {PROMPT}, fp32, batch 1, {ROUNDS} rounds"
    lines = ["# Generation beside GPTNeoX", ""]
    lines += [f"- {fact}" for fact in (*facts("benchmarks/host/generation_speed.py"), shape)]
    lines += ["", "| model | a token | tokens/s | / GPTNeoX |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {1e3 * value:.1f} ms | {1 / value:.1f} | {yardstick / value:.2f} |"
        for name, value in best.items()
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
