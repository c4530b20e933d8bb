"""Most memory that ranks hold, each and all of a node together, against the formula and the peers.

    python benchmarks/memory.py

4 ranks, bfloat16, size M, stages 1 and 3; "shared" holds full weights once for the node's ranks,
and "lean" recomputes activations as well. Per rank: the peak resident set (VmHWM) of the timed
steps, which counts pages that ranks share in each of them. Per node: the largest of samples, taken
four times a second from start to end, of the sum over ranks of the proportional set size (PSS),
which counts such pages once. "Before" is the resident set before anything is built: Python and
libraries. The formula is what `zeromp.account` predicts of states, buffers and activations.
"""

import cases
import records

RANKS = 4
PEERS = ("zero1", "fsdp2", "fsdp2-bf16")


def all_cases(options):
    """Stages 1 and 3, both again with what saves memory at no loss of bits, and the peers."""
    size, ranks = ("XXS", 2) if options.quick else ("M", RANKS)
    told = {"warmup": 1, "steps": 1, "ranks": ranks, "watch": True}
    ways = {"": {}, ", shared": {"share_weights": True}}
    ways[", lean"] = {"share_weights": True, "recompute": True}
    found = [
        cases.zeromp(f"{size}/stage {s}{way}/bfloat16", size, s, "bfloat16", options=chosen, **told)
        for way, chosen in ways.items()
        for s in (1, 3)
    ]
    return found + cases.peers(PEERS, options.peers, size, size + "/{}", **told)


def show(records_, options):
    """Print a table, and save the results."""
    for record in records_:
        record["peak_rank_bytes"] = max(record["peak_rss_bytes"])
    keys = ("peak_rank_bytes", "start_rss_bytes", "node_pss_bytes", "formula_bytes")
    found = records.medians(records_, *keys)
    nodes = {name.split("/", 1)[1]: f["node_pss_bytes"]["median"] for name, f in found.items()}
    rows = []
    for name, item in found.items():
        rank, start, node, formula = (item[key] for key in keys)
        item["node_ratio"] = {peer: node["median"] / nodes[peer] for peer in PEERS if peer in nodes}
        rows.append(
            (
                name,
                _mb(rank["median"]),
                _mb(start["median"]),
                _mb(formula["median"]) if formula else "-",
                _mb(node["median"]),
                *(f"{item['node_ratio'][p]:.2f}" if p in nodes else "-" for p in PEERS),
                rank["n"],
            )
        )
    header = ("case", "peak of a rank MB", "before MB", "formula MB", "peak of the node MB", *(f"to {p}" for p in PEERS), "runs")  # fmt: skip # noqa: E501
    records.show(f"Peak memory, {RANKS} ranks", header, rows)
    records.save("memory", records_, found, options)


def _mb(num_bytes):
    return f"{num_bytes / 1e6:,.0f}"


def main():
    options = records.arguments(__doc__, runs=1)
    show(records.collect("memory", all_cases(options), options), options)


if __name__ == "__main__":
    main()
