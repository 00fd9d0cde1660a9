"""Make a job small enough to rehearse: the same layout and layers, with few numbers in each.

The collectives of a step follow from the layout, the layers and the options. Their sizes follow
from the width of the model and from the length of the sequences.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.config import Config
from megatron.config.builtin import task_name
from megatron.data.shards.writer import ShardWriter

HEAD_SIZE = 4
"""The dimensions of each head of the narrow model."""
DOCUMENTS, TOKENS = 2000, 40
"""The number of documents of the text that is read instead of the run's, and their length."""


def narrow(config: Config, folder: Path) -> list[str]:
    """Return config overrides for a rehearsal of `config`, and write a text into `folder`.

    The rehearsed job takes one step, validates and saves. Each head has few dimensions, and each
    sequence few tokens. A step has as many micro-batches as fill the pipeline, and one more. Blocks
    communicate alike, so there is one for each stage (two without a pipeline), and those that a
    division leaves over. If a key names the layers one by one, all of them remain.
    """
    m, p, t = config.model, config.parallel, config.training
    slices = p.context_parallel_size * p.model_parallel_size
    length = slices * -(-16 // slices)
    micro_batches = min(config.batch.gradient_accumulation_steps, p.pipe_parallel_size + 1)
    layers, stages = m.num_layers, p.pipe_parallel_size
    if not any(isinstance(each, tuple) for each in (m.pos_emb, m.sliding_window_width)):
        layers = min(layers, max(2, stages) + layers % stages)
    changes = {
        "num_layers": layers,
        "hidden_size": HEAD_SIZE * m.num_attention_heads,
        # a third of it is the inner width of a gated activation
        "intermediate_size": 12 * m.num_attention_heads,
        "rotary_pct": 1,
        "attention_backend": "auto",
        "train_batch_size": "null",
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "train_iters": 1,
        "lr_decay_iters": "null",
        "eval_interval": 1,
        "eval_iters": 1,
        "log_interval": 1,
        "save": "run",
        "load": "null",
        "finetune": "false",
        "save_interval": "null",
        "exit_interval": "null",
        "exit_duration_in_mins": "null",
        "distributed_backend": "null",
        "torch_compile": "false",
        "profile": "false",
        "memory_profiling": "false",
        "flops_profiler.enabled": "false",
        "use_wandb": "false",
        "tensorboard_dir": "null",
    }
    lengths = list(config.evaluation.eval_lengths[:1])
    if task_name(config.data.data_path) is None:
        lengths = [length] if lengths else []
        changes |= _text(config, folder) | {"seq_length": length, "seq_length_val": length}
    if t.precision == "fp16":
        changes["fp16.initial_scale_power"] = 0  # nothing overflows, on no rank alone
    changes |= {"eval_lengths": lengths, "eval_tokens": 2 * length, "eval_examples": 2}
    return [f"{key}={value}" for key, value in changes.items()]


def _text(config: Config, folder: Path) -> dict[str, object]:
    """Write a text of random bytes into `folder`, and return the config keys that select it."""
    rng = np.random.default_rng(config.training.seed)
    tokens = rng.integers(97, 123, (DOCUMENTS, TOKENS), dtype=np.uint16)
    tokens[:, -1] = 256  # the end of the document
    with ShardWriter(folder / "text", np.uint16) as writer:
        writer.add_documents(tokens.ravel(), np.full(DOCUMENTS, TOKENS))
    splits = [f"{split}_data" for split in ("train", "valid", "test")]
    keys: dict[str, object] = {
        f"{name}_{what}": "null" for name in splits for what in ("paths", "weights")
    }
    split = config.data.split if config.data.data_path else "8, 1, 1"
    return keys | {
        "data_path": folder / "text",
        "split": f"'{split}'",
        "weight_by_num_documents": "false",
        "tokenizer_type": "ByteLevelTokenizer",
        "vocab_file": "null",
        "merge_file": "null",
    }
