"""Weights: whole arrays by name, out to .safetensors and .npz files and in again, one at a time."""

from zeromp.weights.reading import Weights, load
from zeromp.weights.writing import CODES, check_target, export, writing

__all__ = ["CODES", "Weights", "check_target", "export", "load", "writing"]
