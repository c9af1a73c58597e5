"""The one exception that a user is meant to read."""


class CskvError(Exception):
    """A failure with a cause the user can act on.

    Args:
        message: what is wrong, in one line that names the file, layer or tensor.
        hint: what to do about it, usually the command to run next.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
