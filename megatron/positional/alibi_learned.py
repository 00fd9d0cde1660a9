"""Define ALiBi with learned slopes, b_h(d) = -m_h d with m_h >= 0.

Press, Smith, Lewis, ICLR 2022 (arXiv 2108.12409) fix the slopes. Here the slopes are trained, and
ALiBi's slopes are the initial values. The bias is conditionally positive definite for m_h >= 0.
With m_h = 0 the head sees no positions. The slope's gradient is not 0 even then, so training can
raise the slope again. Adam changes every slope by about the learning rate in each step. So small
slopes (from 2^-8) change much faster, relative to their size, than large ones.
"""

from megatron.positional.alibi import Alibi
from megatron.positional.theta_parameter import ThetaParameter


class AlibiLearned(Alibi):
    """ALiBi with learned slopes: the bias -m d at the query-key distance d.

    Each head has a slope m >= 0. The initial slopes are ALiBi's.
    """

    parameters = (ThetaParameter("slope", low=0.0),)
