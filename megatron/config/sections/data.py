"""Define the config sections of the data, of the evaluation by sequence length and of logging."""

from __future__ import annotations

from pydantic import Field

from megatron.config.choices import EvalSplit, Tokenizer, WandbMode
from megatron.config.fields import (
    Count,
    Flag,
    Frozen,
    FrozenDict,
    Lengths,
    Names,
    Positive,
    PositiveNumber,
    Split,
    Text,
)
from megatron.config.paths import PathList, Paths, Weights
from megatron.config.sections.base import Section


class DataConfig(Section):
    # A prefix (the path of shards without .bin or .idx), a glob of prefixes, a list of prefixes and
    # globs, builtin:python-stdlib, or a length task such as builtin:copy.
    data_path: Paths | None = None
    # Options of the length task, such as {max_length: 20}. Each task has its own defaults.
    task_options: Frozen = Field(default_factory=FrozenDict)
    # An alternative to data_path and split: the corpora of each split. Samples are taken from them
    # in proportion to the weights, which are equal by default.
    train_data_paths: PathList = ()
    valid_data_paths: PathList = ()
    test_data_paths: PathList = ()
    train_data_weights: Weights = ()
    valid_data_weights: Weights = ()
    test_data_weights: Weights = ()
    weight_by_num_documents: Flag = False
    weighted_sampler_alpha: PositiveNumber = 1.0  # gpt-neox's default; published code: 0.3
    data_dir: Text = "data"  # folder for the token shards of builtin corpora
    split: Split = "969, 30, 1"
    tokenizer_type: Tokenizer = "GPT2BPETokenizer"
    vocab_file: Text | None = None
    merge_file: Text | None = None


class EvaluationConfig(Section):
    """The settings for perplexity by sequence length, and the tasks of lm-evaluation-harness.

    train.py measures the perplexity after training, evaluate.py both. Only the last two keys exist
    in GPT-NeoX.
    """

    eval_lengths: Lengths = ()
    eval_lengths_interval: Count = 0  # steps between measurements during training; 0 = none
    eval_tokens: Positive = 65536  # number of predicted tokens for each length
    eval_examples: Positive = 500  # number of examples of a length task for each length
    eval_context_baseline: Count = 0  # context length of a baseline evaluation; 0 = no baseline
    eval_split: EvalSplit = "valid"
    eval_batch_tokens: Positive = 4096  # tokens in a batch
    eval_suite_tokens: Positive = 65536  # tokens that `evaluate.py --suite` reads for each result
    eval_distance_scale: PositiveNumber = 1.0  # the kernel sees every distance times this factor
    eval_tasks: Names = ()  # names of tasks, or paths of their YAML files
    eval_results_prefix: Text | None = None  # the results: PREFIX_eval_results_TIME.json


class LoggingConfig(Section):
    use_wandb: Flag = False
    wandb_project: Text | None = None
    wandb_team: Text | None = None
    wandb_group: Text | None = None
    wandb_host: Text | None = None
    wandb_mode: WandbMode | None = None
