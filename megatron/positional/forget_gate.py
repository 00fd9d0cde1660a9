"""Define the forget gate, by which each token decides how much a head forgets earlier keys.

Lin et al. 2025 (arXiv 2503.02130, Forgetting Transformer). Each layer computes a gate f in (0, 1)
per token and head, f = sigmoid(w . x + b). x is the token's hidden state, and w and b are trained.
The sum of log f over the tokens after key j, up to query i, is added to the logit of i and j:

    log f_{j+1} + ... + log f_i = c_i - c_j        c_i = log f_1 + ... + log f_i
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.positional.base import PositionalEmbedding


class ForgetGate(PositionalEmbedding):
    """Forget gate f = sigmoid(w . x + b) for a token's hidden state x.

    Each layer of the model has its own trained w and b. This class does not contain w and b.
    """

    def decay(self, gate_BHT: Tensor) -> Tensor:
        """Return the decay c [batch, heads, positions] in fp64.

        c_i is the sum of log f over all positions up to i, where f is the forget gate.

        Args:
            gate_BHT: The gates before the sigmoid [batch, heads, positions], in any floating dtype.
        """
        wide = torch.promote_types(gate_BHT.dtype, torch.float32)
        # in fp64, because c is large in a long sequence, and its differences matter
        return F.logsigmoid(gate_BHT.to(wide)).double().cumsum(-1)
