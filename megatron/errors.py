"""The base class of errors that a user can correct."""


class UserError(Exception):
    """An error that the user can correct. Commands print its message without a traceback."""
