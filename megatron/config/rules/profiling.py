"""Refuse settings with which no profile would be recorded."""

from megatron.config.rules.relation import Found, relation


@relation("profile", "memory_profiling", "profile_step_start", "profile_step_stop", "train_iters")
def _profile(trace: bool, memory: bool, first: int, last: int, steps: int) -> Found | None:
    if not (trace or memory) or steps == 0:
        return None
    if last < first:
        return "profile_step_stop", f"{last} is below profile_step_start {first}; write {first}"
    if first > steps:
        text = f"{first} is above train_iters {steps}, so no step is profiled"
        return "profile_step_start", f"{text}; write a smaller one"


@relation("flops_profiler_enabled", "pipe_parallel_size")
def _flops(enabled: bool, stages: int) -> Found | None:
    if enabled and stages > 1:
        text = "true with a pipeline, in which DeepSpeed begins the profile and never ends it"
        return "flops_profiler_enabled", f"{text}; write profile: true instead"
