"""Log the losses that GPT-NeoX prints with `train_iters: 0`, measured on GPT-NeoX's batches."""

from dataclasses import replace

from megatron.engine.job_data import JobData
from megatron.engine.run_log.log import RunLog
from megatron.engine.training.pipeline_engine import Engine, loss_of_batches
from megatron.parallel.loss import perplexity


def log_published_losses(data: JobData, engine: Engine, log: RunLog, step: int) -> None:
    """Log the loss on the `valid` and `test` batches that GPT-NeoX would evaluate.

    Every rank must call this function.

    Args:
        step: The number of optimizer steps that the model was trained for.
    """
    # The perplexity is logged, too.
    config = data.config
    wanted = config.training.eval_iters * config.batch.gradient_accumulation_steps
    for name in ("valid", "test"):
        loader = data.held_out_at(name, iteration=step)
        count = 0 if loader is None else min(wanted, loader.batches_left)
        if loader is None or count == 0:
            log.line(f"{name}: the split holds no batch to evaluate")
            continue
        first = loader.consumed_samples
        counting = replace(data.counting, per_token=False)
        loss = loss_of_batches(engine, loader, count, data.groups, counting)
        short = f", all that are left of {wanted} batches" if count < wanted else ""
        sequences = count * loader.micro_batch * loader.dp_size
        text = (
            f"{name} loss at iteration {step}: {loss:.6f} | perplexity "
            f"{perplexity(loss):.4f} | {sequences} sequences of "
            f"{config.model.seq_length_val} tokens, from sample {first} on{short}"
        )
        values = {f"final/{name}_loss": loss, f"final/{name}_ppl": perplexity(loss)}
        log.metrics(step, values, text)
