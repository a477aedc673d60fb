"""The one exception that the tools show to a person without a traceback."""


class BuildError(Exception):
    """What is wrong with the project, the machine or the command line, in words for its user."""
