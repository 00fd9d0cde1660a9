"""Measure perplexity by sequence length L, on sequences s with tokens x_{s,t} at positions t.

    loss(L)   = mean over sequences s and positions t of -log p(x_{s,t+1} | x_{s,<=t})   [nats]
    ppl(L)    = exp(loss(L))
    bits/byte = loss(L) * tokens / (ln 2 * bytes)
    stderr(L) = std over sequences of the sequence's mean loss / sqrt(number of sequences)

Here `tokens` is the number of target tokens, and `bytes` is the number of UTF-8 bytes of these
tokens. Each token is predicted from all earlier tokens of its sequence. Sequences do not overlap.
All lengths are measured on the same text, or on its first `eval_sequences` sequences. If no common
multiple of the lengths is small enough, each leaves out the tokens that fill no sequence.

Three baselines measure the same model with short contexts of c tokens. The first one splits the
text into sequences of c tokens. The second one scores single tokens with exactly c predecessors.
The third one is the windowed twin: in each layer, a token sees only the last c tokens.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from megatron import pictures
from megatron.config import Config
from megatron.data.errors import DataError
from megatron.data.samples.evaluation import eval_sequences, eval_span
from megatron.data.samples.split import SPLITS
from megatron.data.tasks.base import Task
from megatron.data.tokenizers.base import Tokenizer
from megatron.engine.job.job_or_alone import job_or_alone
from megatron.engine.open_run import open_run
from megatron.engine.open_text import Text, open_text
from megatron.evaluation import length_report
from megatron.evaluation.accuracy import Accuracy, evaluate_task
from megatron.evaluation.losses import NOT_FINITE, LossFn, MeasuredModel, losses_of_sequences
from megatron.evaluation.perplexity_statistics import (
    LengthResult,
    TokenBytes,
    measured_with,
    scaled,
    summarise,
)
from megatron.model.block import limited_window
from megatron.model.theta import columns_of, trained_theta
from megatron.parallel.groups import Groups
from megatron.positional import PositionalEmbedding
from megatron.run_folder import RunFolder


@dataclass(frozen=True)
class Measurement:
    """The setup of a measurement: a model, the text that it predicts, and the size of a batch.

    Attributes:
        loss_fn: The function that returns the loss of each target token.
        read: A function of two lengths. It cuts the text that is measured at the second length into
            sequences of the first one, int64 [sequences, length + 1]. Their last tokens are targets
            only.
        token_bytes: A function from token ids to the number of UTF-8 bytes of each token.
        batch_tokens: The approximate number of tokens in a forward pass.
        groups: The job's process groups. Each data-parallel rank measures some of the sequences.
        uncounted_after: The id of a token. Targets directly after this token are not scored. None
            scores all targets.
    """

    loss_fn: LossFn
    read: Callable[[int, int], np.ndarray]
    token_bytes: TokenBytes
    batch_tokens: int
    groups: Groups
    uncounted_after: int | None = None

    def at_length(self, length: int, text_of: int | None = None) -> LengthResult:
        """Measure the model on sequences of `length` tokens. Every rank must call this method.

        If `text_of` is given, the text is that which is measured at the length `text_of`.
        """
        sequences = self.read(length, text_of or length)
        losses = losses_of_sequences(
            self.loss_fn, sequences, self.groups,
            batch_tokens=self.batch_tokens, uncounted_after=self.uncounted_after,
        )  # fmt: skip
        counted = sequences[:, :-1] != self.uncounted_after
        return summarise(length, losses, self.token_bytes(sequences)[:, 1:][counted])

    def at_lengths(self, lengths: Sequence[int], say: Callable[[str], None]) -> list[LengthResult]:
        """Measure the model at each of `lengths`, and return the results in the same order.

        Every rank must call this method.

        Args:
            lengths: The sequence lengths, in tokens.
            say: A function that prints a text. It gets the result of each length.
        """
        results = []
        for length in lengths:
            start = time.monotonic()
            result = self.at_length(length)
            rate = result.sequences * length / (time.monotonic() - start)
            say(
                f"length {length}: perplexity {result.perplexity:.4f} over {result.sequences} "
                f"sequences ({rate:,.0f} tokens/s)"
            )
            results.append(result)
        return results

    def with_context(self, context: int, *, length: int, targets: int) -> LengthResult:
        """Measure the loss of single tokens with exactly `context` tokens of context.

        Every rank must call this method.

        Args:
            context: The number of tokens before each scored token.
            length: The length of the sequences into which the text is cut. No context crosses a
                cut.
            targets: The approximate number of scored tokens, which are equally spaced in the text.
        """
        windows = np.lib.stride_tricks.sliding_window_view(
            self.read(length, length), context + 1, axis=1
        )
        counted = np.argwhere(windows[..., -2] != self.uncounted_after)
        windows = windows[tuple(counted[:: max(1, len(counted) // targets)].T)]
        losses = losses_of_sequences(
            self.loss_fn, windows, self.groups, batch_tokens=self.batch_tokens, last_only=True
        )
        return summarise(context, losses, self.token_bytes(windows[:, -2:])[:, 1:])


def evaluate_checkpoint(
    config: Config, load: Path, *, out: Path | None = None, say: Callable[[str], None] = print
) -> list[LengthResult] | list[Accuracy]:
    """Evaluate the newest checkpoint in the run folder `load` at the config's `eval_lengths`.

    Every process of the job must call this function.

    Args:
        config: The config.
        load: The run folder.
        out: The folder for the CSV files and the plots; None means `load`.
        say: A function that prints a text. Only the main rank calls it.

    Raises:
        CheckpointError: `load` contains no checkpoint, or the checkpoint does not fit the config.
    """
    with job_or_alone(config) as groups:
        say = say if groups.is_main else lambda text: None
        run = open_run(load, config, groups)
        text, model = open_text(config, run.tokenizer), run.model
        say(run.said())
        parts = [theta.detach().float().cpu() for theta in model.theta_parts]
        theta_HN = trained_theta(model.pos, parts) if parts else None
        step = run.saved.step
        measured = MeasuredModel(config, groups, model, model, run.tokenizer, theta_HN, step)
        return evaluate_lengths(measured, text, out or load, say)


def evaluate_lengths(
    model: MeasuredModel, text: Text | Task, run_dir: Path, say: Callable[[str], None]
) -> list[LengthResult] | list[Accuracy]:
    """Measure `model` at the config's `eval_lengths`, print a table, and write CSV files and plots.

    Every rank must call this function.

    Args:
        model: The model.
        text: The text, or a length task. On a text, the perplexity is measured. On a length task,
            the accuracy is measured.
        run_dir: The folder into which the CSV files and the plots are written.
        say: A function that prints a text.

    Raises:
        DataError: The text is shorter than one sequence of the largest length.
    """
    if isinstance(text, Task):
        return evaluate_task(model, text, run_dir, say)
    config, groups, pos = model.config, model.groups, model.module.pos
    chosen, lengths = config.evaluation, sorted(set(config.evaluation.eval_lengths))
    measurement, span = measurement_of(
        config, groups, model.loss_fn, model.tokenizer, text, chosen.eval_tokens
    )
    left = [f"length {each:,} leaves out {span % each:,}" for each in lengths if span % each]
    if left and not chosen.eval_sequences:
        say(f"the lengths do not have the same text: of {span:,} tokens, {', '.join(left)}")
    results = measurement.at_lengths(lengths, say)
    if not all(math.isfinite(result.loss) for result in results):
        say(NOT_FINITE)
    baselines: dict[str, LengthResult] = {}
    if context := chosen.eval_context_baseline:
        with limited_window(model.module, context):
            twin = replace(measurement.at_length(max(lengths)), length=context)
        baselines = {
            f"the text cut into pieces of {context} tokens": measurement.at_length(
                context, max(lengths)
            ),
            f"the {context} tokens before each scored one": measurement.with_context(
                context, length=max(lengths), targets=max(1, span // context)
            ),
            f"the last {context} tokens in each layer, of {max(lengths):,}": twin,
        }
    if groups.is_main:
        train_length = config.model.seq_length
        what = scaled("Perplexity by length", config)
        title = length_report.picture_title(what, pos.name, config, model.step)
        shown = results, run_dir, train_length, baselines, title
        about = measured_with(config, model.step, "eval_tokens", "eval_sequences")
        say(length_report.write_extrapolation(*shown, about))
        if pos.has("distance"):
            draw_kernels(pos, model.theta_HN, config, run_dir, model.step)
        say(f"written to {run_dir}: {RunFolder(run_dir).extrapolation.name} and pictures")
    return results


def measurement_of(
    config: Config, groups: Groups, loss_fn: LossFn, tokenizer: Tokenizer, text: Text, tokens: int
) -> tuple[Measurement, int]:
    """Return a `Measurement` on the config's text, and the largest number of target tokens.

    Args:
        loss_fn: The function that returns the loss of each target token.
        tokenizer: The tokenizer with which the text was made.
        text: The text, of which the split `eval_split` is read.
        tokens: The maximum number of target tokens at each length.

    Raises:
        DataError: The text is shorter than one sequence of the largest length.
    """
    chosen, lengths = config.evaluation, config.evaluation.eval_lengths
    documents = text.splits[SPLITS.index(chosen.eval_split)]
    span = eval_span(text.shards, documents, lengths, tokens)
    if span == 0:
        raise DataError(
            f"the {chosen.eval_split} split ({documents[1] - documents[0]} documents) is shorter "
            f"than one sequence of {max(lengths)} tokens; evaluate shorter lengths, or give it a "
            "larger part of `split`"
        )

    def read(length: int, text_of: int) -> np.ndarray:
        targets = min(span, text_of * (chosen.eval_sequences or span))
        return eval_sequences(text.shards, documents, length, targets)

    uncounted = tokenizer.eod if config.training.eod_mask_loss else None
    size = chosen.eval_batch_tokens
    return Measurement(loss_fn, read, tokenizer.token_bytes, size, groups, uncounted), span


def draw_kernels(
    pos: PositionalEmbedding, trained_HN: torch.Tensor | None, config: Config, run_dir: Path,
    step: int, *, few: bool = False,
) -> list[Path]:  # fmt: skip
    """Plot the bias and the weight of each head as functions of the query-key distance.

    Args:
        pos: The model's positional embedding.
        trained_HN: The learned parameters [heads, parameters per head]; None if there are none.
        config: The config of the model.
        run_dir: The folder for the pictures.
        step: The number of optimizer steps that the model was trained for.
        few: Whether to plot at most three kernels: the first, the middle and the last.

    Returns:
        The paths of the PNG files.
    """
    # The distances go up to the longest length, which is also the position of the query.
    path = RunFolder(run_dir).kernels
    longest = max([*config.evaluation.eval_lengths, config.model.seq_length])
    theta_HN = pos.initial_theta(config.model.num_attention_heads, torch.Generator())
    if trained_HN is not None:
        theta_HN[:, columns_of(pos, trained=True)] = trained_HN.cpu()
    distances = torch.logspace(0, math.log10(longest), 400).round().long().unique()
    position = torch.full_like(distances, longest)
    kernels = {}
    for index in range(config.model.num_layers):
        layer_pos, columns = pos.of_layer(index)
        part = (index, *layer_pos.kernel_part(theta_HN[:, columns]))
        kernels.setdefault((layer_pos, columns.start), part)
    parts = [part for part in kernels.values() if part[2] is not None and part[1].has("distance")]
    drawn = [parts[0], parts[len(parts) // 2], parts[-1]] if few and len(parts) > 3 else parts
    files = []
    for index, kernel, kernel_HN in drawn:
        found = {
            "bias b(d)": kernel.bias_at(kernel_HN, distances, position),
            "weight w(d)": kernel.weight(kernel_HN, distances),
        }
        values = {name: each.double().numpy() for name, each in found.items() if each is not None}
        one, what = len(kernels) == 1, "The kernel of each head"
        what += "" if one else f" in layer {index}"
        what += "" if drawn is parts else f" (3 of {len(parts)} kernels)"
        title = length_report.picture_title(what, kernel.name, config, step)
        length = config.model.seq_length
        figure = length_report.kernels_figure(values, distances.numpy(), length, title)
        files.append(path if one else path.with_stem(f"{path.stem}_layer{index}"))
        pictures.save(figure, files[-1])
    return files
