"""A model trained by hand, without an engine: the loop over its layers, in small."""

import numpy as np

from zeromp.models import Scope

TRAIN = Scope(seed=3, step=5, first_sample=40, train=True)


def initial(model, seed=0, spread=0.0):
    """Initial weights; with a spread, noise on all of them, so that none is a special value."""
    w = {}
    for unit in model.units:
        w.update(model.initial(unit, seed))
    rng = np.random.default_rng(seed)
    return {n: a + spread * rng.standard_normal(a.shape, dtype=np.float32) for n, a in w.items()}


def forward(model, w, x, scope):
    kept = []
    for visit in model.path:
        y, saved = visit.layer.forward(w, x, scope)
        kept.append((x, saved))
        x = y
    return x, kept


def gradients(model, w, x, y, scope=TRAIN, frozen=(), recompute=False):
    """Mean loss and all gradients: the loop of the engine, in small."""
    model.check(x, y)
    out, kept = forward(model, w, x, scope)
    loss = model.loss(out, y, 1 / model.count(y)) / model.count(y)
    g = {n: np.full_like(a, np.nan) for n, a in w.items() if n not in frozen}
    met = set()
    dy = out
    for visit, (given, saved) in zip(reversed(model.path), reversed(kept), strict=True):
        if recompute:
            _, saved = visit.layer.forward(w, given, scope)
        for name in visit.adds:
            if name in g and name not in met:
                g[name].fill(0)
        names = visit.writes + visit.adds
        met.update(names)
        dy = visit.layer.backward(w, saved, dy, {n: g[n] for n in names if n in g}, scope)
    assert dy is None  # the first layer of a model has no gradient to hand on
    return loss, g


def tokens(vocab, *shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, vocab, shape), rng.integers(0, vocab, shape)


def same(a, b):
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)
