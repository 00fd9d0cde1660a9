"""The edges of the fused passes in Triton's interpreter."""

from tests.kernels.edges import EdgeCases


class TestEdges(EdgeCases):
    pass
