"""Define the config sections of the data, of the evaluation by sequence length and of logging."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from megatron.config.choices import Tokenizer, choice
from megatron.config.fields import (
    Amount,
    Count,
    Flag,
    Frozen,
    FrozenDict,
    Key,
    Lengths,
    Names,
    Positive,
    PositiveNumber,
    Split,
    Text,
    whole_number,
)
from megatron.config.paths import PathList, Paths, Weights
from megatron.config.sections.base import Section


class DataConfig(Section):
    # a prefix (the path of shards without .bin or .idx), a glob of prefixes, a list of prefixes and
    # globs, builtin:python-stdlib, or a length task such as builtin:copy
    data_path: Paths | None = None
    # options of the length task, such as {max_length: 20}; each task has its own defaults
    task_options: Frozen = Field(default_factory=FrozenDict)
    # an alternative to data_path and split: the corpora of each split, whose samples are taken in
    # proportion to the weights
    train_data_paths: PathList = ()
    valid_data_paths: PathList = ()  # the same for validation
    test_data_paths: PathList = ()  # the same for the test split
    train_data_weights: Weights = ()  # a number for each of train_data_paths; equal by default
    valid_data_weights: Weights = ()  # the same for validation
    test_data_weights: Weights = ()  # the same for the test split
    weight_by_num_documents: Flag = False  # derive the weights from the numbers of documents
    # the exponent of these weights; gpt-neox's default, published code: 0.3
    weighted_sampler_alpha: PositiveNumber = 1.0
    data_dir: Text = "data"  # folder for the token shards of builtin corpora
    split: Split = "969, 30, 1"  # proportions of the documents in train, valid and test
    tokenizer_type: Tokenizer = "GPT2BPETokenizer"  # the tokenizer of the data
    vocab_file: Text | None = None  # the tokenizer's file: vocab.json, tokenizer.json or NAME.model
    merge_file: Text | None = None  # merges.txt of `GPT2BPETokenizer`


class EvaluationConfig(Section):
    """The settings of the evaluation: perplexity by sequence length, and lm-evaluation-harness."""

    # train.py measures the perplexity after training. evaluate.py measures the perplexity and
    # scores the tasks. Only the keys `eval_tasks` and `eval_results_prefix` exist in GPT-NeoX.

    eval_lengths: Lengths = ()  # sequence lengths to measure; of a length task, its lengths
    eval_lengths_interval: Count = 0  # steps between measurements during training; 0 = none
    eval_tokens: Positive = 65536  # number of predicted tokens for each length
    # largest number of sequences of each length (the paper: 320); 0 = all of `eval_tokens`
    eval_sequences: Count = 0
    eval_examples: Positive = 500  # number of examples of a length task for each length
    eval_context_baseline: Count = 0  # context length of a baseline evaluation; 0 = no baseline
    # the split that is measured
    eval_split: Annotated[str, choice("valid test")] = "valid"
    eval_batch_tokens: Positive = 4096  # tokens in a batch
    eval_suite_tokens: Positive = 65536  # tokens that `evaluate.py --suite` reads for each result
    eval_distance_scale: PositiveNumber = 1.0  # the kernel sees every distance times this factor
    # tasks of lm-evaluation-harness: their names, or paths of their YAML files
    eval_tasks: Names = ()
    # the results of tasks are in PREFIX_eval_results_TIME.json
    eval_results_prefix: Text | None = None


class LoggingConfig(Section):
    use_wandb: Flag = False  # log to Weights & Biases
    wandb_project: Text | None = None  # project in Weights & Biases
    wandb_team: Text | None = None  # team in Weights & Biases
    wandb_group: Text | None = None  # group of the run
    wandb_host: Text | None = None  # address of a server of your own
    # default: the environment variable WANDB_MODE, or online
    wandb_mode: Annotated[str, choice("online offline disabled")] | None = None
    tensorboard_dir: Text | None = None  # TensorBoard's files go into its folder named like `save`
    peak_theoretical_tflops: PositiveNumber | None = None  # of one device, for train/mfu
    profile: Flag = False  # write a trace of some steps, and a table of the costliest operations
    profile_step_start: Count = 10  # the first step that is profiled; 0 is the same as 1
    profile_step_stop: Positive = 12  # the last step that is profiled
    memory_profiling: Flag = False  # record the GPU's memory during these steps
    memory_profiling_path: Text | None = None  # its folder; default: the folder `save`
    # DeepSpeed's profiler: operations, parameters and time of each module in one forward pass.
    flops_profiler_enabled: Annotated[Flag, Key("flops_profiler.enabled")] = False
    # what a forward pass that is computed again adds, as a multiple of the forward pass
    flops_profiler_recompute_fwd_factor: Annotated[
        Amount, Key("flops_profiler.recompute_fwd_factor")
    ] = 0.0
    # the step that is profiled, counted from 0
    flops_profiler_profile_step: Annotated[Count, Key("flops_profiler.profile_step")] = 1
    # the depth of the modules that are summed up; -1 for the innermost
    flops_profiler_module_depth: Annotated[
        int, Key("flops_profiler.module_depth"), BeforeValidator(whole_number(-1))
    ] = -1
    # the number of modules that are named at each depth
    flops_profiler_top_modules: Annotated[Positive, Key("flops_profiler.top_modules")] = 1
    # also print each module
    flops_profiler_detailed: Annotated[Flag, Key("flops_profiler.detailed")] = True
    # the file that is written; by default, the report is printed
    flops_profiler_output_file: Annotated[Text | None, Key("flops_profiler.output_file")] = None
