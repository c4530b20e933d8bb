"""The command line: what is in a checkpoint, whether it is sound, weights out of it, and diff.

    python -m zeromp inspect DIR
    python -m zeromp verify DIR
    python -m zeromp export DIR FILE
    python -m zeromp diff A B

One process, without MPI; at most two arrays are in memory at a time.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from zeromp import compare, weights
from zeromp.checkpoint import Broken, Checkpoint, complete, find

GOOD, BAD, WRONG = 0, 1, 2  # exit codes


def main(words: list[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    args = arguments().parse_args(words)
    try:
        return int(args.run(args))
    except BrokenPipeError:  # whoever reads what is printed has enough, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except (ValueError, OSError) as error:
        print(f"zeromp {args.command}: {_words(error)}", file=sys.stderr)
        return WRONG


def arguments() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m zeromp",
        description="Look into checkpoints, check them, export their weights, and compare them.",
        epilog="Exit code 2: a path, a file or an option is wrong.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], text: str, more: str = "") -> Any:
        sub = commands.add_parser(name, help=text, description=f"{text}. {more}")
        sub.set_defaults(run=run)
        return sub.add_argument

    folder = "a checkpoint, or a folder of checkpoints, of which the newest complete one is taken"
    add = command("inspect", _inspect, "Print what is in a checkpoint")
    add("dir", metavar="DIR", type=Path, help=folder)
    add("--json", action="store_true", help="as one JSON object")

    add = command(
        "verify",
        _verify,
        "Check a checkpoint",
        "Reads every byte: files complete, checksums right, numbers finite. "
        "Exit code 0 if all is well, 1 if not.",
    )
    add("dir", metavar="DIR", type=Path, help=folder)
    add("--all", action="store_true", help="check all complete checkpoints of the folder")

    add = command(
        "export",
        _export,
        "Write the weights into one file",
        "Writes the float32 masters, or these rounded once to 16 bits, one array at a time.",
    )
    add("dir", metavar="DIR", type=Path, help=folder)
    add("file", metavar="FILE", type=Path, help="its ending says how: .safetensors or .npz")
    add("--dtype", default="float32", choices=weights.CODES, help="(default float32)")

    add = command(
        "diff",
        _diff,
        "Compare two checkpoints, or files of weights, bit by bit",
        "Of two checkpoints weights and optimizer states are compared, of a file the weights. "
        "Exit code 0 if all arrays are equal, 1 if not.",
    )
    for name in ("a", "b"):
        add(name, metavar=name.upper(), type=Path, help="a checkpoint, a folder of them, or a file")
    return parser


def _words(error: Exception) -> str:
    """An error on one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or ''}: {error.strerror}".removeprefix(": ")
    return " ".join(str(error).split())


# ---- inspect -------------------------------------------------------------------------------------


def _inspect(args: Any) -> int:
    with Checkpoint(find(args.dir)) as checkpoint:
        found = _about(checkpoint)
        found["others"] = [p.name for p in complete(args.dir) if p != checkpoint.path]
        found["problems"] = checkpoint.check_files()
    print(json.dumps(found, indent=1) if args.json else _as_text(found))
    return GOOD


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    record = checkpoint.record
    return {
        "path": str(checkpoint.path),
        "record": record,
        "num_parameters": sum(a.size for a in checkpoint.arrays),
        "arrays": [
            {
                "name": a.name,
                "shape": list(a.shape),
                "size": a.size,
                "unit": a.unit,
                "format": a.format,
                "trainable": a.trainable,
                "kinds": list(checkpoint.kinds(a.name)),
            }
            for a in checkpoint.arrays
        ],
        "files": [{"name": f.path.name, "bytes": f.num_bytes} for f in checkpoint.files],
    }


def _as_text(found: Mapping[str, Any]) -> str:
    record, arrays, files = found["record"], found["arrays"], found["files"]
    rows = [
        [
            a["name"],
            " x ".join(map(str, a["shape"])) or "scalar",
            f"{a['size']:,}",
            a["format"] + ("" if a["trainable"] else ", frozen"),
            ", ".join(a["kinds"]),
        ]
        for a in arrays
    ]
    head = ["array", "shape", "elements", "format", "stored"]
    table = tabulate(
        rows, head, disable_numparse=True, colalign=("left", "left", "right", "left", "left")
    )
    sizes = [f["bytes"] for f in files]
    lines = [
        found["path"],
        _state(record),
        f"{record['optimizer']['name']}: {_pairs(record['optimizer'], 'name', 'states')}",
        "",
        table,
        *(f"{alias} is {owner}" for alias, owner in record["aliases"].items()),
        "",
        f"{len(arrays)} arrays, {found['num_parameters']:,} parameters, in {len(files)} "
        f"file{'s' * (len(files) > 1)} of {_span(sizes)}: {sum(sizes):,} bytes",
        *_extra(record.get("extra") or {}),
    ]
    if found["others"]:
        lines.append(f"older checkpoints here: {', '.join(found['others'])}")
    lines += [f"PROBLEM: {problem}" for problem in found["problems"]]
    return "\n".join(lines)


def _state(record: Mapping[str, Any]) -> str:
    """What a checkpoint was made by, in one line."""
    steps = f"{record['applied']:,} steps applied"
    if record.get("skipped"):
        steps += f", {record['skipped']:,} skipped"
    cut = f"{record['num_ranks']} rank{'s' * (record['num_ranks'] > 1)}"
    return f"{steps}; {cut}, stage {record['stage']}, wire {record['wire']}"


def _extra(extra: Mapping[str, Any]) -> Iterator[str]:
    """What the training script has put beside the arrays."""
    for key, value in extra.items():
        yield f"extra: {key} {_pairs(value) if isinstance(value, dict) else value}"


def _pairs(values: Mapping[str, Any], *but: str) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if key not in but)


def _span(sizes: list[int]) -> str:
    low, high = min(sizes, default=0), max(sizes, default=0)
    return f"{low:,} bytes" if low == high else f"{low:,} to {high:,} bytes"


# ---- verify --------------------------------------------------------------------------------------


def _verify(args: Any) -> int:
    if not args.dir.is_dir():
        raise ValueError(f"there is no folder {args.dir}")
    paths = complete(args.dir) if args.all else []
    try:
        paths = paths or [find(args.dir)]
    except FileNotFoundError as error:
        print(_words(error))
        return BAD
    return max(_verify_one(path) for path in paths)


def _verify_one(path: Path) -> int:
    try:
        with Checkpoint(path) as checkpoint:
            num_bytes = sum(f.num_bytes for f in checkpoint.files)
            with _bar(f"verifying {path.name}", num_bytes) as advance:
                problems = checkpoint.verify(advance)
            arrays, files = len(checkpoint.arrays), len(checkpoint.files)
    except Broken as error:
        problems = [str(error)]
    for problem in problems:
        print(f"BROKEN: {problem}")
    if not problems:
        print(
            f"{path}: good. {arrays} arrays in {files} file{'s' * (files > 1)} of {num_bytes:,} "
            "bytes: complete, checksums right, all numbers finite"
        )
    return BAD if problems else GOOD


@contextmanager
def _bar(what: str, num_bytes: int) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar, on a terminal only; yields what is told of bytes that are done."""
    with tqdm(
        desc=what, total=num_bytes, unit="B", unit_scale=True, disable=None, leave=False
    ) as bar:
        yield bar.update


# ---- export --------------------------------------------------------------------------------------


def _export(args: Any) -> int:
    weights.check_target(args.file, args.dtype)
    with Checkpoint(find(args.dir)) as checkpoint:
        if problems := checkpoint.check_files():
            raise ValueError(problems[0])
        shapes = {a.name: a.shape for a in checkpoint.arrays}
        total = sum(a.size for a in checkpoint.arrays) * 4
        with (
            _bar(f"exporting {args.file.name}", total) as advance,
            weights.writing(args.file, shapes, args.dtype, checkpoint.aliases) as put,
        ):
            for name in shapes:
                values = checkpoint.read(checkpoint.kinds(name)[0], name)
                put(name, values)
                advance(values.nbytes)
    num_bytes = args.file.stat().st_size
    print(
        f"{args.file}: {len(shapes)} arrays, {total // 4:,} parameters in {args.dtype}, "
        f"{num_bytes:,} bytes, from {checkpoint.path}"
    )
    return GOOD


# ---- diff ----------------------------------------------------------------------------------------


def _diff(args: Any) -> int:
    with ExitStack() as stack:
        a, b = (stack.enter_context(compare.side(path)) for path in (args.a, args.b))
        for letter, one in zip("AB", (a, b), strict=True):
            state = f" ({_state(one.record)})" if one.record else ""
            print(f"{letter}  {one.path}{state}")
        keys = compare.common(a, b)
        with _bar("comparing", 4 * sum(a.size(key) for key in keys)) as advance:
            rows: list[list[str]] = []
            for key in keys:
                rows += compare.rows(a, b, key)
                advance(4 * a.size(key))
    what = f"{len(keys)} arrays ({', '.join(dict.fromkeys(kind for kind, _ in keys))})"
    if not rows:
        print(f"equal: {what}, every bit")
        return GOOD
    head = ["array", "of", "what differs", "largest difference", "by largest number"]
    print(tabulate(rows, head, disable_numparse=True))
    print(f"{len(rows)} of {what} differ")
    return BAD


if __name__ == "__main__":
    sys.exit(main())
