"""Length tasks, such as copying or sorting n symbols. They test a model on longer examples.

The examples are generated. Training draws their lengths n at random, and evaluation chooses n.
"""
