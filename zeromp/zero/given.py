"""Gradients that a user brings: checked, and written into buckets."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from zeromp.flat import Layout
from zeromp.wire import F32
from zeromp.zero.settings import as_float32


def refusal(
    gradients: Mapping[str, Any], weight: float, layout: Layout, aliases: Mapping[str, str]
) -> ValueError | None:
    """What is wrong with a rank's gradients, if anything."""
    try:
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight {weight} must be finite and not negative")
        for name in gradients:
            _, array, _ = layout.find(aliases.get(name, name))
            if not array.trainable:
                raise ValueError(f"{name!r} is frozen: it takes no gradient")
            shape = np.shape(gradients[name])
            if shape != array.shape:
                raise ValueError(f"gradient of {name!r} has shape {shape}, not {array.shape}")
            as_float32(name, gradients[name], "gradient of")
    except ValueError as error:
        return error
    return None


def write(view: F32, names: list[str], gradients: Mapping[str, Any], factor: np.float32) -> None:
    """Write, to a bucket's view, `factor` times the sum of what is given under a parameter's names.

    Nothing given counts as zeros. Overflow is no error here: the step finds it, and is skipped.
    """
    view.fill(0)
    with np.errstate(over="ignore", invalid="ignore"):
        for i, name in enumerate(name for name in names if name in gradients):
            gradient = as_float32(name, gradients[name], "gradient of")
            if i == 0:
                np.multiply(gradient, factor, out=view)
            else:
                np.add(view, gradient * factor, out=view)
