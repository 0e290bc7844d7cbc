"""The one exception that a user's mistake raises; command lines print it as one line and exit with 2."""


class UserError(ValueError):
    """Says what was wrong, what was expected and what to change.

    Libraries may catch it as the ValueError that it is. Anything else that escapes is a bug of ours
    and keeps its traceback.
    """
