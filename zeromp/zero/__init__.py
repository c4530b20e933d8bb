"""Zero: the state of N ranks, sharded; and its settings."""

from zeromp.zero.report import Report
from zeromp.zero.settings import Group, Options, Source
from zeromp.zero.zero import Zero

__all__ = ["Group", "Options", "Report", "Source", "Zero"]
