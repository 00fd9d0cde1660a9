"""Make a job small enough to rehearse, with a narrow model and short sequences.

The small job has the same parallel layout and the same kinds of layers. The layout, the layers and
the options determine which collectives a step calls. The width of the model and the length of the
sequences determine only the sizes of the messages.
"""

from pathlib import Path

import numpy as np

from megatron.config import Config
from megatron.config.builtin import task_name
from megatron.data.shards.writer import ShardWriter

# One step, a validation and a save, in a fresh run that only writes its folder.
STEP = """train_iters=1 lr_decay_iters=null eval_interval=1 eval_iters=1 log_interval=1 save=run
load=null finetune=false save_interval=null exit_interval=null exit_duration_in_mins=null
curriculum=null curriculum_learning=null train_batch_size=null train_micro_batch_size_per_gpu=1
eval_examples=2 eval_context_baseline=0 rotary_pct=1 attention_backend=auto distributed_backend=null
torch_compile=false profile=false memory_profiling=false flops_profiler.enabled=false
use_wandb=false tensorboard_dir=null retrofit_init=gentle retrofit_anneal=0"""
TEXT = """train_data_paths=null train_data_weights=null valid_data_paths=null
valid_data_weights=null test_data_paths=null test_data_weights=null weight_by_num_documents=false
tokenizer_type=ByteLevelTokenizer vocab_file=null merge_file=null"""
DOCUMENTS, TOKENS = 2000, 40  # the text that is read instead of the run's


def narrow(config: Config, folder: Path) -> list[str]:
    """Return config overrides that make a run small enough to rehearse.

    The small run takes one training step, validates, and saves a checkpoint.

    Args:
        folder: The folder into which a short training text is written.
    """
    # It has narrow heads and short sequences. A step has at most one more micro-batch than the
    # pipeline has stages. There is one block per stage (two without a pipeline), because all blocks
    # communicate in the same way. If the number of blocks is not a multiple of the number of
    # stages, the remainder is added. If the config sets `pos_emb` or `sliding_window_width` per
    # layer, all layers are kept.
    m, p, layers = config.model, config.parallel, config.model.num_layers
    slices, stages = p.context_parallel_size * p.model_parallel_size, p.pipe_parallel_size
    if not any(isinstance(each, tuple) for each in (m.pos_emb, m.sliding_window_width)):
        layers = min(layers, max(2, stages) + layers % stages)
    # A third of the intermediate size is the inner width of a gated activation.
    heads, length = m.num_attention_heads, slices * -(-16 // slices)
    micro_batches = min(config.batch.gradient_accumulation_steps, stages + 1)
    changes = STEP.split()
    changes += [f"num_layers={layers}", f"gradient_accumulation_steps={micro_batches}"]
    changes += [f"hidden_size={4 * heads}", f"intermediate_size={12 * heads}"]
    lengths = list(config.evaluation.eval_lengths[:1])
    if task_name(config.data.data_path) is None:
        changes += [*_text(config, folder), f"seq_length={length}", f"seq_length_val={length}"]
        lengths = [length] if lengths else []
    if config.training.precision == "fp16":
        changes.append("fp16.initial_scale_power=0")  # nothing overflows, on no rank alone
    tokens = 2 * max([length, *lengths])
    return [*changes, f"eval_lengths={lengths}", f"eval_tokens={tokens}"]


def _text(config: Config, folder: Path) -> list[str]:
    """Write a text of random bytes into `folder`, and return config overrides that select it."""
    rng = np.random.default_rng(config.training.seed)
    tokens = rng.integers(97, 123, (DOCUMENTS, TOKENS), dtype=np.uint16)
    tokens[:, -1] = 256  # the end of the document
    with ShardWriter(folder / "text", np.uint16) as writer:
        writer.add_documents(tokens.ravel(), np.full(DOCUMENTS, TOKENS))
    split = config.data.split if config.data.data_path else "8, 1, 1"
    return [*TEXT.split(), f"data_path={folder / 'text'}", f"split='{split}'"]
