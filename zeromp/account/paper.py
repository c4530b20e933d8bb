"""The papers' closed forms."""

FORMULAS = ("2 + 2 + 12", "4 + 12/N", "2 + 14/N", "16/N")  # of `model_state_bytes`, by stage


def model_state_bytes(psi: float, num_ranks: int, stage: int, states: int = 12) -> float:
    """Bytes per rank of parameters, gradients and optimizer states on a 16-bit wire.

    Parameters
    ----------
    psi : float
        Parameters.
    num_ranks, stage : int
    states : int
        Bytes of optimizer states per parameter, K in the paper: 12 for mixed-precision Adam.

    Returns
    -------
    float

    References
    ----------
    Rajbhandari et al. 2020, arXiv:1910.02054, section 5 and figure 1.
    """
    shares = [1 / num_ranks if stage >= thing else 1.0 for thing in (3, 2, 1)]
    return psi * sum(b * share for b, share in zip((2, 2, states), shares, strict=True))


def largest_model(device_bytes: float, num_ranks: int, stage: int) -> float:
    """Parameters whose states fill a device: the inverse of `model_state_bytes` (table 2)."""
    return device_bytes / model_state_bytes(1.0, num_ranks, stage)


def traffic_elements(psi: float, num_ranks: int, stage: int) -> float:
    """Elements that a rank sends per step, one micro-batch, no unit visited twice (section 7)."""
    return (3 if stage >= 3 else 2) * psi * (num_ranks - 1) / num_ranks
