"""Compute the batch sizes that are not given, and refuse sizes that violate this equation:

train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x
                   data_parallel_size
"""

from collections.abc import Iterator

from megatron.config.rules.parallel_layout import factors
from megatron.config.rules.relation import Found, Values

_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def derive_batch_sizes(values: Values) -> Iterator[Found]:
    """Compute the batch sizes that are None. If that is impossible, yield the problem.

    The sizes must be whole numbers that satisfy this equation:

        train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x
                           data_parallel_size

    Args:
        values: Maps the names of fields to their values. It is changed in place.
    """
    # The config must give the train batch size or the micro-batch size. If the given sizes do not
    # determine the number of accumulation steps, this number becomes 1.
    total, micro, steps = _SIZES
    if not all(name in values for name in (*_SIZES, "data_parallel_size")):
        return
    t, m, g = (values[name] for name in _SIZES)
    if t is None and m is None:
        return  # reported as a missing required key
    dp = values["data_parallel_size"]
    ranks = f"data-parallel size {dp} (= {values['world_size']} process(es) / ({factors(values)}))"
    if t is None:
        t = values[total] = m * (g or 1) * dp
    if m is not None and g is not None:
        if t != m * g * dp:
            text = f"{t} is not {micro} {m} x {steps} {g} x {ranks}: {m} x {g} x {dp} = "
            text += f"{m * g * dp}; write {total}: {m * g * dp}, or leave one of the three out"
            yield total, text
        return
    known, free = (f"{micro} {m}", steps) if m else (f"{steps} {g or 1}", micro)
    per_step = (m or g or 1) * dp
    if t % per_step:
        below = t // per_step * per_step
        near = f"{total}: {below} or {below + per_step}" if below else f"{total}: {per_step}"
        if m and t % dp == 0:
            most = max(size for size in range(1, m + 1) if t // dp % size == 0)
            near = f"{micro}: {most}, or {near}"
        text = f"{t} = {known} x {free} x {ranks} leaves {free} = {t} / {per_step} = "
        yield total, f"{text}{t / per_step:.4g}, not whole; write {near}"
        return
    values[free] = t // per_step
    values[steps] = values[steps] or 1
