"""Define the released KERPLE code's variant of ALiBi, b_h(d) = -max(m_h, 0.01) d.

The m_h are ALiBi's fixed slopes. The released code raises slopes below 0.01 to 0.01, so this
embedding is not exactly ALiBi. For example, ALiBi's last slope is 1/256 whenever the number of
heads is a power of two. This file reproduces the released code. Use `alibi` for ALiBi itself.
"""

from megatron.positional.alibi import Alibi
from megatron.positional.theta_parameter import ThetaParameter


class KerplePowerOriginal(Alibi):
    """The released KERPLE code's variant of ALiBi: the bias -m d at the query-key distance d.

    The slope m of each head is fixed. It is ALiBi's slope, or 0.01 if ALiBi's slope is smaller.
    """

    parameters = (ThetaParameter("bias_a", low=0.01, trained=False),)
