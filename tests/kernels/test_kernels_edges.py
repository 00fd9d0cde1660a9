"""Run the edge cases of the fused kernels in Triton's interpreter."""

from tests.kernels.edges import EdgeCases


class TestEdges(EdgeCases):
    pass
