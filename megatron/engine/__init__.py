"""The training engine. Only this package and `megatron.plan` import DeepSpeed.

On import, this package sets environment variables. DeepSpeed and torch read these variables later,
when DeepSpeed and torch are imported.
"""

import os
import warnings

import torch

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
# DeepSpeed calls these deprecated functions; a user cannot change that.
warnings.filterwarnings("ignore", message="`torch.distributed.*` is deprecated")
