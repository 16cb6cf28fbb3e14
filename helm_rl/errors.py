"""The one exception that stands for a user's mistake."""


class UserError(Exception):
    """Bad input, told in one sentence: what was wrong, where (file, line, field), what would be right.

    The command line prints it without a traceback and exits with status 2.
    """
