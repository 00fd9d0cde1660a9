"""Refuse settings of the evaluation that contradict each other, such as lengths and intervals."""

from megatron.config.rules.relation import Found, relation


@relation("eval_lengths", "eval_tokens")
def _eval_tokens(lengths: tuple[int, ...], tokens: int) -> Found | None:
    longest = max(lengths, default=0)
    if longest > tokens:
        text = f"{tokens} target tokens are fewer than the longest of eval_lengths, {longest}"
        return "eval_tokens", f"{text}; write at least {longest}"


@relation("eval_lengths", "eval_context_baseline")
def _context_baseline(lengths: tuple[int, ...], context: int) -> Found | None:
    if lengths and context >= max(lengths):
        text = f"{context} is not below the longest of eval_lengths, {max(lengths)}"
        return "eval_context_baseline", f"{text}; write a small context such as 16, or 0 for none"


@relation("eval_lengths", "eval_lengths_interval", "eval_interval")
def _lengths_interval(lengths: tuple[int, ...], interval: int, validation: int) -> Found | None:
    if interval and not lengths:
        return "eval_lengths_interval", f"{interval} without eval_lengths; write the lengths there"
    if interval % validation:
        text = f"{interval} is no multiple of eval_interval {validation}, at which train.py"
        return "eval_lengths_interval", f"{text} validates; write e.g. {validation}, or 0 for none"
