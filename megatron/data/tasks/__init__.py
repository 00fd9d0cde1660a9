"""Length tasks, such as copying n symbols, test a model on longer examples than in training.

The examples are generated. In training, the length n of each example is random. In evaluation, n is
given.
"""
