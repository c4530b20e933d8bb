"""Records of runs: one JSON line each, collected a few at a time, then medians and tables.

[Note: alternation] A shared machine changes its speed by the minute. So the runs of a benchmark
alternate: a case is run when no other has fewer runs (A B C A B C, not A A B B), and a collection
that was stopped goes on where it was. Runs of other sources of zeromp, or of another machine, do
not count.
"""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import launcher

HERE = Path(__file__).resolve().parent
TURN_S = 30  # a shared machine's lock is passed on after the first job that ends later


def arguments(description, runs=5, **flags):
    """Parse what all benchmarks are told; `flags` are further ones, each with its help."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--runs", type=int, default=runs, help=f"runs of each case (default {runs})")
    add("--seconds", type=float, default=float("inf"), help="start no run after so many seconds; the next call goes on")  # fmt: skip # noqa: E501
    add("--only", default=[], nargs="+", metavar="TEXT", help="only cases whose name starts so")  # fmt: skip # noqa: E501
    add("--show", action="store_true", help="run nothing, show what has been collected")
    add("--quick", action="store_true", help="small sizes, one run each: does it work?")
    add("--out", type=Path, default=HERE / "results", help="folder of records (default benchmarks/results)")  # fmt: skip # noqa: E501
    add("--peers", default=os.environ.get("ZEROMP_PEERS_PYTHON"), metavar="PYTHON", help="interpreter that has torch (default: $ZEROMP_PEERS_PYTHON)")  # fmt: skip # noqa: E501
    for name, text in flags.items():
        add(f"--{name}", action="store_true", help=text)
    options = parser.parse_args()
    if options.quick:
        options.runs, options.out = 1, options.out / "quick"
    return options


def collect(bench, cases, options):
    """Run each case until it has been run so often; return the records of all runs."""
    path = options.out / f"{bench}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = {"code": code(), "machine": machine()}
    records = [r for r in read(path) if {k: r[k] for k in origin} == origin]
    counts = Counter(record["case"] for record in records)
    wanted = tuple(options.only) or ("",)
    cases = [case for case in cases if case.name.startswith(wanted)]
    start, broken, turn = time.monotonic(), set(), launcher.Turn()
    while not options.show and time.monotonic() - start < options.seconds:
        waiting = [c for c in cases if c.name not in broken and counts[c.name] < options.runs]
        if not waiting:
            break
        case = min(waiting, key=lambda c: counts[c.name])
        counts[case.name] += 1
        print(f"{bench}: {case.name}, run {counts[case.name]}", file=sys.stderr, flush=True)
        turn.take()
        try:
            result = launcher.run(case)
        except launcher.Failed as error:
            print(f"{case.name}: {error}", file=sys.stderr, flush=True)
            broken.add(case.name)
            continue
        finally:
            turn.pass_on(after=TURN_S)
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        records.append({"case": case.name, **origin, "at": at, **result})
        with path.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
    turn.pass_on()
    return [record for record in records if record["case"].startswith(wanted)]


def read(path):
    """All records of a file; a line cut short by the end of its job is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def by_case(records):
    """Records by the name of their case, in the order of first appearance."""
    groups = defaultdict(list)
    for record in records:
        groups[record["case"]].append(record)
    return groups


def spread(values):
    """Median, extremes and number of some values."""
    values = list(values)
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def medians(records, *keys):
    """The spread of each key over the runs of each case, by case; None where a run lacks it."""
    return {
        case: {
            key: spread([r[key] for r in runs]) if all(key in r for r in runs) else None
            for key in keys
        }
        for case, runs in by_case(records).items()
    }


def show(title, header, rows):
    """Print a table that can be pasted into Markdown."""
    from tabulate import tabulate

    if rows:
        print(f"\n{title}\n")
        print(tabulate(rows, header, tablefmt="github", disable_numparse=True, stralign="right"))


def save(bench, records, results, options):
    """Write what was found to a JSON file, with the machine and all versions."""
    versions = defaultdict(dict)  # of each library, those met, in order
    for record in records:
        for name, version in record.get("versions", {}).items():
            versions[name][version] = None
    versions = {name: ", ".join(met) for name, met in versions.items()}
    summary = {
        "bench": bench,
        "machine": machine(),
        "versions": {"zeromp": f"{revision()} ({code()})", **versions},
        "from": min((r["at"] for r in records), default=None),
        "to": max((r["at"] for r in records), default=None),
        "results": results,
    }
    path = options.out / f"{bench}.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    told = "; ".join(f"{name} {version}" for name, version in summary["versions"].items())
    print(f"\n{machine()}\n{told}\n{path}", flush=True)


def machine():
    """Processor, cores and memory, as text."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    name = fields.get("model name", platform.processor())
    model = f", family {fields['cpu family']} model {fields['model']}" if "model" in fields else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def code():
    """Short hash of zeromp's sources."""
    text = b"".join(p.read_bytes() for p in sorted((HERE.parent / "zeromp").rglob("*.py")))
    return hashlib.sha256(text).hexdigest()[:12]


def revision():
    """What git calls this state of the sources."""
    found = subprocess.run(
        ["git", "-C", HERE.parent, "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() or "unknown"
