"""The one exception that stands for a user's mistake, and text that a terminal may be shown."""


class UserError(Exception):
    """Bad input, told in one sentence: what was wrong, where (file, line, field), what would be right.

    The command line prints it without a traceback and exits with status 2.
    """


def printable(text: str) -> str:
    """Return text with what would move a terminal's cursor, or change its colours, written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
