"""What the papers predict: bytes held per rank, bytes sent per step. From sizes, never from arrays.

With psi parameters, N ranks, and Adam on a 16-bit wire, a rank holds (K = 12 bytes of states)

    stage 0   2 psi + 2 psi + 12 psi            = 16 psi
    stage 1   2 psi + 2 psi + 12 psi / N        =  4 psi + 12 psi / N
    stage 2   2 psi + 2 psi / N + 12 psi / N    =  2 psi + 14 psi / N
    stage 3   (2 + 2 + 12) psi / N              = 16 psi / N

and sends, with (N-1)/N of each reduce-scatter or all-gather going to other ranks, 2 psi elements
per step at stages 0 to 2 and 3 psi at stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054, sections
5 and 7). Exactly: rank r owns p_r = n(r+1)//N - nr//N of a unit's n elements, sends n - p_r in a
reduce-scatter, and p_r (N-1) in an all-gather, which over all ranks makes n (N-1) both times.
"""

from zeromp.account.case import ITEMSIZE, Case, FlatCase
from zeromp.account.held import held, held_by_tier, lowest_rung, lowest_stage
from zeromp.account.paper import FORMULAS, largest_model, model_state_bytes, traffic_elements
from zeromp.account.sent import AGREED_NUMBERS, NUMBER_BYTES, moved, sent

__all__ = [
    "AGREED_NUMBERS",
    "FORMULAS",
    "ITEMSIZE",
    "NUMBER_BYTES",
    "Case",
    "FlatCase",
    "held",
    "held_by_tier",
    "largest_model",
    "lowest_rung",
    "lowest_stage",
    "model_state_bytes",
    "moved",
    "sent",
    "traffic_elements",
]
