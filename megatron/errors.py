"""The base class of errors that a user can correct, and all errors that need no traceback."""


class UserError(Exception):
    """An error that the user can correct. Commands print its message without a traceback."""


# An OSError is, for example, a full disk or a missing permission. Its message names the path.
USER_ERRORS = (UserError, OSError)
