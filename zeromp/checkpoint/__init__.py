"""Checkpoints: written by N ranks, read by any number of them, or by any HDF5 tool."""

from zeromp.checkpoint.errors import Broken, Mismatch
from zeromp.checkpoint.folders import complete, find
from zeromp.checkpoint.loading import LoadReport
from zeromp.checkpoint.reading import Checkpoint

__all__ = ["Broken", "Checkpoint", "LoadReport", "Mismatch", "complete", "find"]
