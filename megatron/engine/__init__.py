"""The training engine: the only package that imports DeepSpeed.

What must be said to DeepSpeed and torch before their first import is said here.
"""

import os
import warnings

import torch

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it found no GPU
# DeepSpeed's own calls, nothing that a user could change.
warnings.filterwarnings("ignore", message="`torch.distributed.*` is deprecated")
