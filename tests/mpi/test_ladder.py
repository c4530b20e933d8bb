"""The ladder: stages 0 to 3 give the same bytes, hold and send what `account` predicts.

One small GPT, whose units no number of ranks from 2 to 4 divides, in three formats and three ways
to reduce. Released weights are NaN (poison), so that a use after release would show. Ranks have
different numbers of rows, and some targets do not count.
"""

import hashlib

import numpy as np
import pytest

import zeromp as zm

STAGES = (0, 1, 2, 3)
WIRES = ("float32", "bfloat16", "float16")
WAYS = ("mpi", "ordered", "shared")
STEPS = 20
VOCAB, LAYERS, WIDTH, HEADS, CONTEXT = 31, 2, 25, 5, 8

CASES = {
    "plain": {},
    "recompute, clip": {"recompute": True, "clip": 0.5},
    "dropout": {"dropout": 0.2, "prefetch": 0},
    "untied, SGD": {"tied": False, "sgd": True, "clip": 0.3, "prefetch": 3},
    "mixed": {"frozen": ["blocks.0.*"], "keep_float32": ["*ln*"], "reduce_wire": "float32"},
}


def model_of(tied=True, dropout=0.0):
    return zm.models.gpt(VOCAB, LAYERS, WIDTH, HEADS, CONTEXT, dropout, tied)


def rule_of(sgd):
    return zm.SGD(lr=0.2, momentum=0.9) if sgd else zm.AdamW(lr=1e-2, weight_decay=0.1)


def rows(ranks, step, micro=0):
    """A global batch, and where each rank's rows begin: 2, 3, 2, 3, ... of them."""
    edges = np.cumsum([0, *(2 + r % 2 for r in range(ranks))])
    rng = np.random.default_rng([ranks, step, micro])
    x = rng.integers(0, VOCAB, (edges[-1], CONTEXT))
    y = (x + 1) % VOCAB  # easy to learn
    y[rng.random(y.shape) < 0.1] = -1
    return x, y, edges


def build(world, stage, wire, **case):
    """Engine of a case, and how it is to be trained."""
    case = dict(case)
    model = case.pop("model", None) or model_of(case.pop("tied", True), case.pop("dropout", 0.0))
    clip = case.pop("clip", None)
    groups = [zm.Group("flat", lambda name, shape: len(shape) == 1, weight_decay=0.0)]
    rule = rule_of(case.pop("sgd", False))
    case.setdefault("poison", True)
    if wire == "float16":
        case.setdefault("loss_scale", 1024.0)
    engine = zm.Engine(
        model, world=world, stage=stage, wire=wire, optimizer=rule, groups=groups, seed=5, **case
    )
    return engine, clip


def train(engine, clip, steps=STEPS):
    """Reports, and losses of each micro-batch."""
    world, found = engine.world, []
    for step in range(steps):
        for micro in range(engine.zero.options.micro_batches):
            x, y, edges = rows(world.size, step, micro)
            mine = slice(edges[world.rank], edges[world.rank + 1])
            found.append(engine.backward(x[mine], y[mine]))
        found.append(engine.step(clip=clip))
    return found


def digest(engine, found):
    """Of all weights, masters, moments and reports."""
    h = hashlib.sha256(repr(found).encode())
    for name in engine.zero.names:
        h.update(engine.full(name).tobytes() + engine.master(name).tobytes())
        for kind, moment in engine.moments(name).items():
            h.update(kind.encode() + moment.tobytes())
    return h.hexdigest()


def run(world, stage, wire, steps=STEPS, **case):
    """Train on all ranks of a world; compare both ledgers with the prediction; return a digest."""
    engine, clip = build(world, stage, wire, **case)
    found = train(engine, clip, steps)
    check_ledgers(engine, stage)
    return digest(engine, found), found


def check_ledgers(engine, stage):
    zero, world = engine.zero, engine.world
    expected = zm.account.held(zero.case, stage)
    held = {kind: size for kind, size in zero.store.held.items() if size}
    assert held == {kind: size for kind, size in expected.items() if size}
    peak = dict(zero.store.peak)
    assert peak.pop("activations") > 0
    assert {k: v for k, v in peak.items() if v} == held  # at no time more, but for activations
    path = [visit.unit for visit in engine.model.path]
    sent = zm.account.sent(zero.case, stage, applied=zero.applied, skipped=zero.skipped, path=path)
    assert {verb: world.ledger.sent(verb) for verb in sent} == sent
    assert world.ledger.sent("broadcast") == 0


def fresh(world, reduce):
    return zm.World(world.transport, reduce=reduce)


def same_bytes(world, results):
    """All digests equal, on all ranks."""
    kinds = {key: result[0] for key, result in results.items()}
    assert len(set(kinds.values())) == 1, kinds
    world.same("digest", next(iter(kinds.values())))


PICKED = [  # the first two cases in full, the others with one way to reduce for each format
    (way, wire, case)
    for i, case in enumerate(CASES)
    for j, wire in enumerate(WIRES)
    for k, way in enumerate(WAYS)
    if i < 2 or (i + j + k) % 2
]


@pytest.mark.spread
@pytest.mark.parametrize(("way", "wire", "case"), PICKED)
def test_stages_give_the_same_bytes(world, way, wire, case):
    results = {s: run(fresh(world, way), s, wire, **CASES[case]) for s in STAGES}
    same_bytes(world, results)
    reports = results[0][1][1::2]
    assert all(r.applied for r in reports)
    losses = [r.loss for r in reports]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.2  # it has learnt
    if "clip" in CASES[case]:
        assert any(r.clip_factor < 1 for r in reports)


@pytest.mark.parametrize("recompute", [False, True])
def test_stages_of_llama_give_the_same_bytes(world, recompute):
    model = zm.models.llama(VOCAB, LAYERS, 26, 1, CONTEXT, hidden=7)
    case = {"model": model, "recompute": recompute, "clip": 0.5}
    results = {s: run(fresh(world, "auto"), s, "bfloat16", 5, **case) for s in STAGES}
    same_bytes(world, results)


@pytest.mark.spread
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("way", ["ordered", "shared"])
def test_ordered_and_shared_give_the_bytes_of_threads(world, way, wire, case):
    """And so MPICH, Open MPI and threads give the same."""
    stage = (list(CASES).index(case) + WIRES.index(wire)) % 4
    mine = run(fresh(world, way), stage, wire, 6, **CASES[case])[0]
    if world.rank == 0:  # the others wait
        expected = zm.threads(world.size, lambda w: run(w, (stage + 1) % 4, wire, 6, **CASES[case]))
        assert {e[0] for e in expected} == {mine}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("wire", WIRES)
def test_recompute_changes_no_bit(world, wire, dropout):
    results = {
        (s, r): run(fresh(world, "mpi"), s, wire, 6, dropout=dropout, recompute=r)
        for s in (0, 3)
        for r in (False, True)
    }
    same_bytes(world, results)


@pytest.mark.spread
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("way", WAYS)
def test_micro_batches(world, way, wire):
    """Ranks are added after micro-batches at stages 0 and 1, before at 2 and 3: two kinds of bits.

    The difference is rounding: at most that of the numbers sent.
    """
    case = {"micro_batches": 2, "dropout": 0.1, "recompute": True, "clip": 0.5}
    results = {s: run(fresh(world, way), s, wire, 10, **case) for s in STAGES}
    same_bytes(world, {s: results[s] for s in (0, 1)})
    same_bytes(world, {s: results[s] for s in (2, 3)})
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3}[wire]
    losses = [[r.loss for r in results[s][1][2::3]] for s in (0, 2)]
    np.testing.assert_allclose(*losses, rtol=tolerance)
    if world.size == 1 and wire == "float32":
        same_bytes(world, results)


@pytest.mark.parametrize("way", WAYS)
def test_skipped_steps_are_skipped_alike(world, way):
    """A loss scale that is too high overflows float16 a few times, then training goes on."""
    results = {s: run(fresh(world, way), s, "float16", loss_scale=2.0**24) for s in STAGES}
    same_bytes(world, results)
    reports = results[0][1][1::2]
    first = [r.applied for r in reports].index(True)
    assert 0 < first < 15
    assert sum(r.applied for r in reports) > 5
    scale = 2.0**24
    for report in reports:
        assert report.loss_scale == scale
        assert ("in the gradient of" in report.reason) == (not report.applied)
        scale = scale if report.applied else scale / 2


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_change_rounding_only(world, stage):
    """Losses, norms and weights are those of one rank with the global batch, dropout included."""
    case = {"dropout": 0.2, "clip": 0.5}
    engine, clip = build(fresh(world, "ordered"), stage, "float32", **case)
    reports = train(engine, clip)[1::2]
    lone, clip = build(zm.alone(), 0, "float32", **case)
    for step, report in enumerate(reports):
        x, y, _ = rows(world.size, step)
        lone.backward(x, y)
        expected = lone.step(clip=clip)
        assert report.loss == pytest.approx(expected.loss, rel=2e-5), step
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=2e-4), step
        assert report.weight == expected.weight == (y >= 0).sum()
    for name in engine.zero.names:
        np.testing.assert_allclose(engine.full(name), lone.full(name), atol=2e-3)


# ---- bytes, from the papers' formulas ------------------------------------------------------------


def units(tied):
    """Elements of each unit, from the shapes."""
    block = 12 * WIDTH**2 + 13 * WIDTH
    embed = (VOCAB + CONTEXT) * WIDTH
    if tied:
        return [embed + 2 * WIDTH, *[block] * LAYERS]
    return [embed, *[block] * LAYERS, (VOCAB + 2) * WIDTH]


def own(n, world):
    return n * (world.rank + 1) // world.size - n * world.rank // world.size


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_held_are_the_papers(world, stage, wire, tied):
    """16 psi, 4 psi + 12 psi / N, 2 psi + 14 psi / N, 16 psi / N."""
    engine, _ = build(fresh(world, "mpi"), stage, wire, tied=tied)
    psi, mine = sum(units(tied)), sum(own(n, world) for n in units(tied))
    assert engine.model.num_parameters == psi
    held = engine.zero.store.held
    states = sum(held[kind] for kind in ("parameters", "gradients", "master", "m", "v"))
    assert states == [16 * psi, 4 * psi + 12 * mine, 2 * psi + 14 * mine, 16 * mine][stage]
    total = world.agree([states])[:, 0].sum()  # over all ranks nothing is padded
    n = world.size
    assert total == [16 * psi * n, 4 * psi * n + 12 * psi, 2 * psi * n + 14 * psi, 16 * psi][stage]


@pytest.mark.spread
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_sent_are_the_papers(world, stage, way, wire, tied):
    """(N - 1) / N of 2 psi at stages 0 to 2, 3 psi at stage 3, and a tied unit's second visit."""
    w = fresh(world, way)
    engine, clip = build(w, stage, wire, tied=tied)
    steps = 3
    train(engine, clip, steps)
    size, others, sizes = 2 if wire == "bfloat16" else 4, w.size - 1, units(tied)
    visited = [*sizes, sizes[0]] if tied else sizes
    gathered = sum(own(n, w) for n in sizes) if stage < 3 else 2 * sum(own(n, w) for n in visited)
    assert w.ledger.sent("reduce_scatter") == steps * size * sum(n - own(n, w) for n in sizes)
    assert w.ledger.sent("all_gather") == steps * size * others * gathered
    everyone = world.agree([w.ledger.sent("reduce_scatter"), w.ledger.sent("all_gather")])
    psi = sum(sizes)
    assert everyone[:, 0].sum() == steps * size * psi * others
    assert everyone[:, 1].sum() == steps * size * others * (psi if stage < 3 else 2 * sum(visited))


@pytest.mark.parametrize(("wire", "size"), [("float32", 4), ("bfloat16", 2)])
def test_window_is_all_that_stage_3_holds_whole(world, wire, size):
    """prefetch + 1 units as stored, one widened, and the two buckets that are open together."""
    sizes = units(True)
    widest, buckets = max(sizes), 4 * (sizes[0] + sizes[1])  # the tied unit's stays open
    peaks = []
    for prefetch in (0, 1, 2):
        engine, _ = build(fresh(world, "mpi"), 3, wire, prefetch=prefetch)
        train(engine, None, 1)
        peak = engine.zero.store.peak
        assert peak["parameters"] == size * sum(own(n, world) for n in sizes)
        whole = (prefetch + 1) * widest * size + (4 * widest if size == 2 else 0)
        assert whole <= peak["buffers"] <= whole + buckets + widest * size
        peaks.append(peak["buffers"])
    assert np.diff(peaks).tolist() == [widest * size] * 2
