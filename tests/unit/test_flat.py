"""Layout: pieces cover everything once, and every holder finds every element at its place."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromp.flat import Array, Layout, bucket_slots, cuts, group_by_size, segments

FORMATS = ("float32", "bfloat16", "float16")
ranks = st.integers(1, 9)


@st.composite
def array_lists(draw):
    """Arrays of several units, formats and kinds, some of them empty, units in any order."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 3),
                st.lists(st.integers(0, 4), max_size=3).map(tuple),
                st.sampled_from(FORMATS),
                st.booleans(),
            ),
            min_size=1,
            max_size=9,
        )
    )
    return tuple(Array(f"a{i}", f"u{u}", *rest) for i, (u, *rest) in enumerate(rows))


@given(st.integers(0, 5000), st.integers(1, 70))
def test_cuts_cover_contiguously_and_evenly(n, num_ranks):
    edges = cuts(n, num_ranks)
    sizes = [b - a for a, b in pairwise(edges)]
    assert (edges[0], edges[-1], len(sizes), sum(sizes)) == (0, n, num_ranks, n)
    assert 0 <= max(sizes) - min(sizes) <= 1


@given(array_lists(), ranks)
def test_every_element_has_one_owner_and_one_place(arrays, num_ranks):
    """Number all elements; what views, pieces and shards show of the numbers tells their places."""
    layouts = [Layout(arrays, num_ranks, rank) for rank in range(num_ranks)]
    numbers = {a.name: 1000 * i + np.arange(a.size) for i, a in enumerate(arrays)}
    assert layouts[0].units == tuple(dict.fromkeys(a.unit for a in arrays))
    for index, flat in enumerate(layouts[0].flats):
        mine = [a for a in arrays if (a.format, a.trainable) == (flat.format.name, flat.trainable)]
        whole = np.full(flat.full.size, -1)
        shards = [np.full(layout.flats[index].shard.size, -1) for layout in layouts]
        for unit, group in flat.arrays.items():
            values = np.concatenate([numbers[a.name] for a, _ in group])
            whole[flat.full.spans[unit]] = values
            for layout, shard in zip(layouts, shards, strict=True):
                seen = layout.flats[index]
                shard[seen.shard.own[unit]] = values[seen.piece[unit]]
                assert (whole[seen.full.own[unit]] == values[seen.piece[unit]]).all()
                assert seen.counts[unit][layout.rank] == len(values[seen.piece[unit]])
                assert (seen.covered(seen.shard, unit, values) == values[seen.piece[unit]]).all()
                assert (seen.covered(seen.full, unit, values) == values).all()
            for name, view in flat.views(unit, values).items():
                assert (view.reshape(-1) == numbers[name]).all()
                at, array, place = layouts[0].find(name)
                assert (at, view.shape) == (index, array.shape)
                assert (values[place] == numbers[name]).all()
        expected = sorted(np.concatenate([numbers[a.name] for a in mine]))
        assert sorted(whole) == expected == sorted(np.concatenate(shards))
        assert flat.widest == max(map(flat.size, flat.counts))
        assert flat.widest_piece == max(c[0] for c in flat.counts.values())
    trainable = [flat.trainable for flat in layouts[0].flats]
    assert trainable == sorted(trainable, reverse=True)
    assert len(layouts[0].trainable) == sum(trainable)


@given(array_lists(), ranks, st.data())
def test_segments_map_each_covered_element(arrays, num_ranks, data):
    """Each element once, at the same place of its parameter in all arrays; runs are longest."""
    layout = Layout(arrays, num_ranks, data.draw(st.integers(0, num_ranks - 1)))
    group_of = {a.name: data.draw(st.integers(0, 2)) for a in arrays}
    numbers = {a.name: 1000 * i + np.arange(a.size) for i, a in enumerate(arrays)}
    for flat in layout.flats:
        held = {}
        for extent in (flat.full, flat.shard):
            held[extent.sharded] = np.full(extent.size, -1)
            for unit, group in flat.arrays.items():
                values = np.concatenate([numbers[a.name] for a, _ in group])
                held[extent.sharded][extent.spans[unit]] = flat.covered(extent, unit, values)
        combinations = [(flat.full, [flat.full, flat.full])]
        combinations += [(flat.shard, [g, p]) for g in (flat.full, flat.shard)
                         for p in (flat.full, flat.shard)]  # fmt: skip
        for extent, others in combinations:
            table, groups = segments(flat, extent, others, group_of)
            assert table.shape == (len(groups), 4) and table[:, 0].sum() == extent.size
            seen = np.full(extent.size, -1)
            for (size, at, *places), group in zip(table, groups, strict=True):
                seen[at : at + size] = held[extent.sharded][at : at + size]
                for other, place in zip(others, places, strict=True):
                    assert (held[other.sharded][place : place + size] == seen[at : at + size]).all()
                assert {group_of[f"a{i // 1000}"] for i in seen[at : at + size]} == {group}
            assert (seen == held[extent.sharded]).all()
            for k in range(1, len(groups)):
                follows = (table[k, 1:] == table[k - 1, 1:] + table[k - 1, 0]).all()
                assert not (follows and groups[k] == groups[k - 1])


@given(st.lists(st.sampled_from("abcdef"), max_size=14), st.data())
def test_bucket_slots_against_a_simulation(visits, data):
    """Walk backward: what is in use at once never shares a buffer, and no buffer is without need.

    In use is what is open, and the `late` buckets that have closed last.
    """
    sizes = {unit: data.draw(st.integers(0, 9)) for unit in sorted(set(visits))}
    late = data.draw(st.integers(0, 2))
    slots, widths = bucket_slots(visits, sizes, late)
    assert slots.keys() == sizes.keys()
    most = 0
    for i in range(len(visits)):
        seen = set(visits[: i + 1])
        last = {u: len(visits) - 1 - visits[::-1].index(u) for u in seen}
        closed = sorted((u for u in seen if last[u] < i), key=last.__getitem__)
        is_open = {u for u in seen if u in visits[i:]} | set(closed[len(closed) - late :])
        assert len({slots[u] for u in is_open}) == len(is_open)
        most = max(most, len(is_open))
    assert len(widths) == most
    for slot, width in enumerate(widths):
        assert width == max(sizes[u] for u in sizes if slots[u] == slot)


@given(st.lists(st.integers(0, 12)), st.integers(1, 15))
def test_group_by_size(sizes, limit):
    named = {f"a{i}": n for i, n in enumerate(sizes)}
    units = group_by_size(named, limit)
    assert list(units) == list(named)
    order = list(dict.fromkeys(units.values()))
    assert order == [f"unit{i}" for i in range(len(order))]
    assert list(units.values()) == sorted(units.values(), key=order.index)  # contiguous
    totals = [[named[n] for n in named if units[n] == u] for u in order]
    for members, following in zip(totals, [*totals[1:], [limit + 1]], strict=False):
        assert sum(members) <= limit or len([n for n in members if n]) == 1
        assert sum(members) + following[0] > limit  # nothing more would have fitted


def test_names_must_be_unique_and_known():
    with pytest.raises(ValueError, match="given twice: w"):
        Layout((Array("w", "u", (2,)), Array("w", "v", (2,))), 1, 0)
    names = [f"w{i}" for i in range(13)]
    layout = Layout(tuple(Array(n, "u", (2,)) for n in names), 1, 0)
    with pytest.raises(ValueError, match=r"no array is named 'x'.*w0, w1.*13 in all"):
        layout.find("x")
