"""Training jobs by name: zeromp's, and those of the peers that are installed."""

import launcher


def zeromp(name, size, stage, wire, ranks=2, watch=False, **settings):
    """A job of `gpt_zeromp.py`."""
    told = {"size": size, "stage": stage, "wire": wire, **settings}
    return launcher.Case(name, "gpt_zeromp.py", told, ranks, watch=watch)


def peers(modes, python, size, label, ranks=2, watch=False, **settings):
    """Jobs of `gpt_torch.py`, one per mode that `python` has the libraries for."""
    found = []
    for mode in modes:
        library = "deepspeed" if mode.startswith("deepspeed") else "torch"
        if launcher.has(python, library):
            told = {"size": size, "mode": mode, **settings}
            name = label.format(mode)
            found.append(
                launcher.Case(name, "gpt_torch.py", told, ranks, python, mpi=False, watch=watch)
            )
    return found
