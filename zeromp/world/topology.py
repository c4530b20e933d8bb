"""Which ranks share a node, and who deals with whom between nodes."""

from collections.abc import Sequence


class Topology:
    """One rank's view of the nodes.

    Parameters
    ----------
    node_of : sequence of int
        A name of each rank's node, as a number.
    rank : int

    Attributes
    ----------
    nodes : list of list of int
        Ranks of each node in order; nodes in the order of their lowest ranks.
    num_nodes, node : int
        How many, and this rank's own.
    ranks : list of int
        Of this node.
    index : int
        This rank's place among them.
    partners : list of (int, int)
        Node, and the rank of it that deals with this one, for every other node.
    cared_for : list of int
        Ranks of other nodes that this one deals with.
    most_cared : int
        The most that any rank deals with.
    entries : dict of int to (int, int)
        For every rank of another node: the place of the rank of this node that deals with it, and
        its number among those that this one deals with.
    """

    def __init__(self, node_of: Sequence[int], rank: int) -> None:
        by_name: dict[int, list[int]] = {}
        for r, name in enumerate(node_of):
            by_name.setdefault(name, []).append(r)
        self.nodes = list(by_name.values())
        self.num_nodes = len(self.nodes)
        self.node = next(i for i, ranks in enumerate(self.nodes) if rank in ranks)
        self.ranks = self.nodes[self.node]
        self.index = self.ranks.index(rank)
        count = len(self.ranks)
        away = [(i, ranks) for i, ranks in enumerate(self.nodes) if i != self.node]
        self.partners = [(i, ranks[self.index % len(ranks)]) for i, ranks in away]
        self.entries: dict[int, tuple[int, int]] = {}
        held = [0] * count
        for _, ranks in away:
            for i, r in enumerate(ranks):
                self.entries[r] = (i % count, held[i % count])
                held[i % count] += 1
        self.cared_for = [r for r, (index, _) in self.entries.items() if index == self.index]
        self.most_cared = max(
            sum(-(-len(ranks) // len(mine)) for ranks in self.nodes if ranks is not mine)
            for mine in self.nodes
        )
