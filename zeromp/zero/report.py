"""What a step did."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """What a step did; equal on all ranks.

    Parameters
    ----------
    applied : bool
        False if the step was skipped: no weight, moment or counter of it has changed.
    loss : float
        Mean over all micro-batches and ranks, by weight (tokens); NaN if none was given.
    grad_norm : float
        Norm of the mean gradient over all parameters, before clipping.
    clip_factor : float
        What clipping multiplied the gradient by: min(1, clip / grad_norm).
    lr : float
        Learning rate used, or that would have been used.
    loss_scale : float
        Scale under which the gradients of this step were made.
    weight : float
        Sum of weights (tokens) of all ranks and micro-batches.
    reason : str
        Why the step was skipped, with the first parameter concerned; "" if applied.
    """

    applied: bool
    loss: float
    grad_norm: float
    clip_factor: float
    lr: float
    loss_scale: float
    weight: float
    reason: str = ""
