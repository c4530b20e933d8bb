"""Where arrays live: device, host and disk; and the ledgers of what is held and moved."""

from zeromp.store import numa
from zeromp.store.disk import Disk
from zeromp.store.ledger import OverBudget
from zeromp.store.placement import KINDS, TIERS, Placement, page_up
from zeromp.store.stack import Stack
from zeromp.store.store import Store

__all__ = ["KINDS", "TIERS", "Disk", "OverBudget", "Placement", "Stack", "Store", "numa", "page_up"]
