"""Time the exported class of transformers beside transformers' GPTNeoX with SDPA, on the CPU.

    python benchmarks/host/hub_forward.py --out benchmarks/results/hub_forward.md

Both models have random weights, and the same layers, width, heads and vocabulary. A step is the
forward and the backward pass of one text. A token is decoded with a cache, after a prompt. The
models take turns, each with one thread, and the times are CPU seconds of the process, so a busy
machine changes them little. The table has the smallest of the rounds. Peak memory is what a step of
two layers allocates, without the weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import DynamicCache, GPTNeoXConfig, GPTNeoXForCausalLM

from benchmarks.report import facts
from megatron.hub.modeling_kerple import KerpleConfig, KerpleForCausalLM
from tests.helpers.peak import peak_bytes

VOCABULARY, PROMPT, TOKENS = 8192, 512, 32
MB = 1 << 20
HEAD = "| what | GPTNeoX | export | export / GPTNeoX |\n|---|---|---|---|"


def models(layers: int, width: int, pos_emb: str) -> list:
    """Return a GPTNeoX and an exported model with random weights."""
    heads = width // 64
    shape = {"vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": heads, "intermediate_size": 4 * width}
    shape |= {"max_position_embeddings": 16384, "attn_implementation": "sdpa"}
    torch.manual_seed(0)
    theirs = GPTNeoXForCausalLM(GPTNeoXConfig(**shape, use_parallel_residual=False))
    config = KerpleConfig(**shape, num_key_value_heads=heads, pos_emb=pos_emb)
    return [theirs, KerpleForCausalLM(config)]


def step(model: torch.nn.Module, length: int) -> Callable[[], None]:
    ids = torch.randint(VOCABULARY, (1, length))

    def run() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return run


@torch.no_grad()
def decode(model: torch.nn.Module) -> float:
    """Return the CPU seconds for one token after the prompt."""
    cache = DynamicCache()
    model(input_ids=torch.randint(VOCABULARY, (1, PROMPT)), past_key_values=cache)
    begin = time.process_time()
    for _ in range(TOKENS):
        model(input_ids=torch.randint(VOCABULARY, (1, 1)), past_key_values=cache)
    return (time.process_time() - begin) / TOKENS


def seconds(run: Callable[[], None]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def row(name: str, values: list[float], digits: int, unit: str) -> str:
    theirs, ours = (f"{value:,.{digits}f} {unit}" for value in values)
    return f"| {name} | {theirs} | {ours} | {values[1] / values[0]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Exported models beside GPTNeoX")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--pos-emb", default="kerple_log")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = f"{args.layers} layers, width {args.width}, {args.pos_emb}, one thread"
    lines = ["# Exported models beside GPTNeoX", ""]
    lines += [f"- {fact}" for fact in (*facts("benchmarks/host/hub_forward.py"), shape)]
    lines += ["", HEAD]
    for line in rows(args.layers, args.width, args.pos_emb, args.lengths):
        lines.append(line)
        print(line, flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def rows(layers: int, width: int, pos_emb: str, lengths: list[int]) -> Iterator[str]:
    both = models(layers, width, pos_emb)
    for run in [step(model, lengths[0]) for model in both]:
        run()
    for length in lengths:
        steps = [step(model, length) for model in both]
        rounds = max(1, min(3, 4096 // length))
        times = [[seconds(run) for run in steps] for _ in range(rounds)]
        best = [min(column) for column in zip(*times, strict=True)]
        yield row(f"forward and backward, {length:,} tokens", best, 2, "s")
    times = [[1e3 * decode(model.eval()) for model in both] for _ in range(3)]
    best = [min(column) for column in zip(*times, strict=True)]
    yield row(f"one token after {PROMPT}", best, 1, "ms")
    small = models(2, width, pos_emb)
    for length in lengths:
        with tempfile.TemporaryDirectory() as folder:
            peaks = [peak_bytes(step(model, length), Path(folder)) / MB for model in small]
        yield row(f"peak memory of two layers, {length:,} tokens", peaks, 0, "MB")


if __name__ == "__main__":
    main()
