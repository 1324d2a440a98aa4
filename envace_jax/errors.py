"""The errors a user can cause and can mend. The command line prints them as one line, without a traceback.

Each message names the thing, the place and the remedy. Whatever is not an `EnvaceError` is a bug of ours.
"""


class EnvaceError(Exception):
    """Base of every error that a setting, a file or an endpoint of the user's can cause."""


class ConfigError(EnvaceError):
    """A configuration that cannot be meant: unknown key, wrong type or choice, or settings that exclude each other."""


class CheckpointError(EnvaceError):
    """A checkpoint or model directory that is missing, incomplete, or belongs to another run."""


class EndpointError(EnvaceError):
    """A judge, simulator or model endpoint that cannot be reached or does not answer as it must."""
