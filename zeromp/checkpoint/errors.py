"""What can be wrong with a checkpoint."""


class Broken(ValueError):
    """A file of a checkpoint is missing, truncated or damaged; names it, and the dataset."""


class Mismatch(ValueError):
    """A checkpoint is of another model or optimizer; lists the differences."""
