"""Models: units built from layers. The public names, re-exported by hand."""

from zeromp.models.gpt import gpt
from zeromp.models.llama import llama
from zeromp.models.mlp import mlp
from zeromp.models.parts import Part
from zeromp.models.tiled import cut_tiles, join_tiles
from zeromp.models.units import (
    Again,
    Layer,
    Model,
    Parameter,
    Saved,
    Scope,
    Unit,
    Visit,
)

__all__ = [
    "Again",
    "Layer",
    "Model",
    "Parameter",
    "Part",
    "Saved",
    "Scope",
    "Unit",
    "Visit",
    "cut_tiles",
    "gpt",
    "join_tiles",
    "llama",
    "mlp",
]
