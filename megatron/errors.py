"""The base class of errors that a user can correct."""


class UserError(Exception):
    """A command prints this error as one message, without a traceback."""
