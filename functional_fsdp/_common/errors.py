"""The errors a user can meet. Each text says what was given, where, what was expected, and what to do."""


class FsdpError(Exception):
    """Base of every error that this package raises on purpose."""


class SpecError(FsdpError, ValueError):
    """A spec, placement, precision or unit rule that cannot be honoured."""


class TreeError(FsdpError, ValueError):
    """A pytree (parameters, gradients, weights) whose structure, shapes or dtypes do not fit the layout."""


class StaleStateError(FsdpError, RuntimeError):
    """A State that a later call has consumed, or that a restart has dropped."""


class ScheduleError(FsdpError, RuntimeError):
    """A verb called out of order: a unit used before it was gathered, a step without gradients, ranks out of order."""


class CheckpointError(FsdpError, ValueError):
    """A checkpoint that is damaged, or not the same for every rank."""


class CommError(FsdpError, RuntimeError):
    """A collective that could not complete: a rank died, hung, or issued something else. No state of this mesh can go
    on: restart the job from its last checkpoint."""


class RestartError(FsdpError, RuntimeError):
    """Another rank abandoned this step. Nothing is lost: go on from the state that the step started from."""
