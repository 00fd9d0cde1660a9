"""The training engine: the only package that imports DeepSpeed.

DeepSpeed and torch read these settings when they are first imported.
"""

import os
import warnings

import torch

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it found no GPU
# DeepSpeed calls it; a user cannot change that.
warnings.filterwarnings("ignore", message="`torch.distributed.*` is deprecated")
