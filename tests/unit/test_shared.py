"""Who deals with whom between nodes: every rank's view agrees with every other's."""

from hypothesis import given
from hypothesis import strategies as st

from zeromp.world.topology import Topology


@given(st.lists(st.integers(0, 4), min_size=1, max_size=16))
def test_all_views_agree(node_of):
    views = [Topology(node_of, rank) for rank in range(len(node_of))]
    nodes = views[0].nodes
    assert sorted(r for ranks in nodes for r in ranks) == list(range(len(node_of)))
    assert [ranks[0] for ranks in nodes] == sorted(ranks[0] for ranks in nodes)
    most = 0
    for rank, view in enumerate(views):
        assert view.nodes == nodes and view.num_nodes == len(nodes)
        assert rank in view.ranks and view.ranks[view.index] == rank
        assert {node_of[r] for r in view.ranks} == {node_of[rank]}
        assert [node for node, _ in view.partners] == [
            i for i in range(len(nodes)) if i != view.node
        ]
        for node, partner in view.partners:  # one of each other node cares for this rank,
            assert partner in nodes[node] and rank in views[partner].cared_for
        for other in view.cared_for:  # and this one for those that count on it
            assert (view.node, rank) in views[other].partners
        assert list(view.entries) == [r for ranks in nodes if ranks != view.ranks for r in ranks]
        for other, (index, number) in view.entries.items():
            assert views[view.ranks[index]].cared_for[number] == other
        most = max(most, len(view.cared_for))
    assert views[0].most_cared == most
