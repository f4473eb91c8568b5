"""Errors that are the user's to mend."""


class InputError(Exception):
    """Something is wrong with the input or the machine; the message says what and how to mend it.

    The command prints it without a traceback.
    """
