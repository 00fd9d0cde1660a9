"""Define a sum of CPD kernels, b_h(d) = -sum_l p_l log(1 + a_l d) - sum_k c_k d^(q_k).

Each term is a kernel of the KERPLE paper (arXiv 2205.09921), `kerple_log` or `kerple_power`, with
parameters of its own. Sums of conditionally positive definite (CPD) kernels are CPD. The bias of
arXiv 2601.06113, -delta d - beta log(1 + d) - gamma sqrt(d), is such a sum, with one logarithm
(a = 1) and two powers (q = 1 and q = 1/2). Here a and q are learned.
"""

from functools import reduce

from torch import Tensor

from megatron.numerics import WIDE, Numerics
from megatron.positional.base import PositionalEmbedding, PositionalError
from megatron.positional.theta_parameter import ThetaParameter, factor, power


class KerpleSum(PositionalEmbedding):
    """Sum of logarithmic and power KERPLE kernels, each with its own parameters.

    Args:
        logs: The number of biases -p log(1 + a d) at the query-key distance d.
        powers: The number of biases -a d^p.
    """

    def __init__(self, logs: int = 1, powers: int = 2, *, numerics: Numerics = WIDE):
        super().__init__(numerics)
        if min(logs, powers) < 0 or logs + powers < 1:
            raise PositionalError(f"kerple_sum needs a term, not logs {logs} and powers {powers}")
        self.logs = logs
        pairs = [
            (ThetaParameter(f"log_p{n}", low=0.01, scale=2.0), factor(f"log_a{n}"))
            for n in range(logs)
        ]
        pairs += [(power(f"power_q{n}"), factor(f"power_c{n}")) for n in range(powers)]
        self.parameters = tuple(column for pair in pairs for column in pair)

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, *columns = self.columns(theta_HN, d)
        pairs = list(zip(columns[::2], columns[1::2], strict=True))
        terms = [p * self.numerics.log1p(a * d) for p, a in pairs[: self.logs]]
        terms += [c * d**q for q, c in pairs[self.logs :]]
        return -reduce(Tensor.add, terms)
