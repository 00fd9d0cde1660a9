"""Join torchrun's job, or start a job of one process.

DeepSpeed, whose import takes seconds, is imported only to join torchrun's job.
"""

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron.config import Config
from megatron.parallel.groups import Groups, build_groups


def job_or_alone(config: Config) -> AbstractContextManager[Groups]:
    """Return a context manager that joins the job that torchrun started.

    If torchrun did not start this process, the job consists of this process alone.
    """
    if "RANK" in os.environ:
        from megatron.engine.job.join import joined_job

        return joined_job(config.parallel)
    return nullcontext(alone())


def alone() -> Groups:
    """Return process groups for a job with one process, on the GPU if there is one."""
    return build_groups(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
