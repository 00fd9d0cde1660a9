"""KERPLE-NeoX: pretraining with kernelized relative positional embeddings, in GPT-NeoX's dialect.

The packages stand on floors and import only from floors strictly below their own
(``ARCHITECTURE.md`` explains them, ``tests/test_architecture.py`` enforces them)::

    F4 engine       runs, training loop, checkpoints, evaluation; the only one that knows DeepSpeed
    F3 model        the GPT itself
    F2 attention    one signature, several implementations, the eager one being the truth
    F1 data, parallel, kernels, positional
    F0 config       the YAML dialect, validated into frozen sections
"""

import os

# OpenMP's threads spin while they wait. On a machine that does anything else besides, a training
# step then takes up to ten times as long; sleeping costs nothing measurable. Read by the OpenMP
# library when torch is first imported, hence here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
