"""Train a GPT or a Llama on text, on as many ranks as mpirun starts, at any stage of ZeRO.

    mpirun -n 8 python examples/train.py --stage 3

The default corpus is the text that every Python carries: its standard library, byte by byte.

With --save, SIGTERM or SIGUSR1 to any rank saves after the present step and ends the job with exit
code 75; the same command with --resume auto goes on.
"""

import argparse
import sys

import zeromp as zm

SCHEDULES = {
    "cosine": zm.cosine,
    "linear": zm.linear,
    "constant": lambda step, steps, peak, warmup: zm.constant(step, peak, warmup),
}


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("ZeRO").add_argument
    add("--stage", type=int, default=1, choices=range(4), help="what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too (default 1)")  # fmt: skip # noqa: E501
    add("--wire", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="format in which weights and gradients are stored and sent (default bfloat16)")  # fmt: skip # noqa: E501
    add("--loss-scale", type=float, metavar="S", help="initial scale of the loss, with float16 (default 65536)")  # fmt: skip # noqa: E501
    add("--reduce", default="auto", choices=("auto", "shared", "ordered", "mpi"), help="add gradients in rank order, over shared memory or by messages, or as the MPI library does (default auto: shared where ranks share a node)")  # fmt: skip # noqa: E501
    add("--recompute", action="store_true", help="keep each block's input only, and compute the block again in backward")  # fmt: skip # noqa: E501
    add("--fused", action="store_true", help="update each piece as soon as its gradient is reduced, and hold one piece of gradients (stages 2 and 3); clips by the norm of the step before")  # fmt: skip # noqa: E501
    add("--share-weights", action="store_true", help="hold full weights once per node, shared by its ranks (stages 1 to 3)")  # fmt: skip # noqa: E501
    add("--device-memory", type=zm.num_bytes, metavar="BYTES", help="refuse to hold more than this on a rank, and name the rung that fits")  # fmt: skip # noqa: E501
    add("--offload", default="", metavar="THING=TIER,...", help="where things live: optimizer, gradients, parameters, activations on device, host or disk")  # fmt: skip # noqa: E501
    add("--offload-dir", metavar="DIR", help="folder on the disk for what is offloaded there")
    add("--offload-io", default="auto", choices=("auto", "cached", "direct"), help="through the page cache, past it, or whichever is faster (default auto)")  # fmt: skip # noqa: E501
    add("--keep-offload", action="store_true", help="leave the HDF5 files on disk at the end")
    add("--host-numa-node", type=int, metavar="NODE", help="bind host memory to a NUMA node")

    add = parser.add_argument_group("model").add_argument
    add("--model", default="gpt", choices=("gpt", "llama"), help="(default gpt)")
    add("--layers", type=int, default=4, help="blocks (default 4)")
    add("--width", type=int, default=128, help="channels (default 128)")
    add("--heads", type=int, default=4, help="attention heads (default 4)")
    add("--context", type=int, default=128, help="tokens that a prediction may look back on (default 128)")  # fmt: skip # noqa: E501
    add("--dropout", type=float, default=0.0, help="(default 0)")
    add("--tiles", type=int, default=1, help="cut each block into tiles that are gathered one after the other: less memory for the weights in use (default 1)")  # fmt: skip # noqa: E501
    add("--seed", type=int, default=0, help="of weights, data and dropout (default 0)")

    add = parser.add_argument_group("data").add_argument
    add("--data", nargs="+", metavar="FILE", help="text files, or one .npy file of token ids (default: Python's standard library)")  # fmt: skip # noqa: E501
    add("--global-batch", type=int, default=24, help="rows of text per step, over all ranks (default 24)")  # fmt: skip # noqa: E501
    add("--micro-batch", type=int, help="rows that a rank computes at a time (default: all of its share)")  # fmt: skip # noqa: E501

    add = parser.add_argument_group("optimization").add_argument
    add("--steps", type=int, default=300, help="(default 300)")
    add("--optimizer", default="adamw", choices=("adamw", "sgd"), help="(default adamw)")
    add("--lr", type=float, default=3e-3, help="peak learning rate (default 0.003)")
    add("--warmup", type=int, default=20, help="steps over which the learning rate rises (default 20)")  # fmt: skip # noqa: E501
    add("--schedule", default="cosine", choices=SCHEDULES, help="of the learning rate after that (default cosine)")  # fmt: skip # noqa: E501
    add("--clip", type=float, default=1.0, help="limit of the gradient's norm; 0 does not clip (default 1)")  # fmt: skip # noqa: E501
    add("--weight-decay", type=float, default=0.1, help="of matrices; biases and norms never decay (default 0.1)")  # fmt: skip # noqa: E501

    add = parser.add_argument_group("checkpoints").add_argument
    add("--save", metavar="DIR", help="save there at the end, and when a signal asks to stop")
    add("--save-every", type=int, default=0, metavar="K", help="save every K steps, too")
    add("--keep", type=int, default=3, metavar="K", help="checkpoints to keep (default 3)")
    add("--resume", metavar="DIR|auto", help="go on from a checkpoint, or the newest in a folder; auto: from the newest in --save DIR, or from the start if there is none")  # fmt: skip # noqa: E501
    add("--stop-after", type=int, metavar="K", help="make K steps at most, then stop as a signal would; the schedule stays that of --steps")  # fmt: skip # noqa: E501

    add = parser.add_argument_group("output").add_argument
    add("--metrics", metavar="FILE", help="write one JSON object per step, and a summary")
    add("--eval-every", type=int, default=0, metavar="K", help="loss on held-out text every K steps (default: at the end only)")  # fmt: skip # noqa: E501
    add("--sample", type=int, default=200, metavar="N", help="characters of text to write at the end; 0 for none (default 200)")  # fmt: skip # noqa: E501
    return parser


# What must be as it was for a run that goes on to end as if it had never stopped.
SETTINGS = (
    "data", "context", "global_batch", "seed", "dropout",
    "steps", "lr", "warmup", "schedule", "clip", "weight_decay",
)  # fmt: skip


def check_checkpoints(args):
    if args.resume == "auto" and not args.save:
        raise ValueError("--resume auto takes the newest checkpoint of --save DIR: name one")
    if args.save_every and not args.save:
        raise ValueError(f"--save-every {args.save_every} needs --save DIR")
    if args.save and not args.resume and (found := zm.checkpoint.complete(args.save)):
        raise ValueError(
            f"--save {args.save} holds {found[-1].name} of another run: go on from it with "
            "--resume auto, or save elsewhere"
        )
    for flag, value in (("keep", args.keep), ("stop-after", args.stop_after)):
        if value is not None and value < 1:
            raise ValueError(f"--{flag} {value} must be at least 1")


def build(args, vocab):
    sizes = vocab, args.layers, args.width, args.heads, args.context
    if args.model == "gpt":
        return zm.models.gpt(*sizes, args.dropout, tiles=args.tiles)
    if args.dropout or args.tiles != 1:
        raise ValueError(
            f"--model {args.model} has neither --dropout nor --tiles: use gpt for them"
        )
    return zm.models.llama(*sizes)


def resume(engine, args):
    """Load what --resume names; returns the number of steps that have been made."""
    if args.resume is None:
        return 0
    auto = args.resume == "auto"
    report = engine.load(args.save if auto else args.resume, if_exists=auto)
    if report is None:
        return 0
    extra = report.extra
    engine.world.print(f"resumed {report.path} after step {extra['step']} of {args.steps}")
    for name in SETTINGS:
        before, now = extra["settings"][name], getattr(args, name)
        if before != now:
            engine.world.print(f"note: --{name.replace('_', '-')} was {before}, and is {now} now")
    return extra["step"]


def save(engine, args, step):
    position = {"step": step, "samples": step * args.global_batch}
    settings = {name: getattr(args, name) for name in SETTINGS}
    return engine.save(args.save, keep=args.keep, extra={**position, "settings": settings})


def held_out_loss(engine, tokens, rows):
    return engine.evaluate(*tokens.held_out_batch(rows, engine.world))


def main():
    world = zm.world()
    args = zm.parse(arguments(), world)
    world = world.reducing(args.reduce)
    with world.together():  # a wrong setting is one message, on all ranks, before anything starts
        micro = args.micro_batch or max(args.global_batch // world.size, 1)
        micro_batches = zm.data.check_batch(args.global_batch, micro, world.size)
        tokens = zm.data.Tokens(args.data, context=args.context, seed=args.seed)
        check_checkpoints(args)
        model = build(args, tokens.vocab)
    optimizer = zm.AdamW if args.optimizer == "adamw" else zm.SGD
    engine = zm.Engine(
        model,
        world=world,
        stage=args.stage,
        wire=args.wire,
        optimizer=optimizer(lr=args.lr, weight_decay=args.weight_decay),
        groups=[zm.Group("no decay", lambda name, shape: len(shape) < 2, weight_decay=0.0)],
        seed=args.seed,
        micro_batches=micro_batches,
        recompute=args.recompute,
        fused=args.fused,
        share_weights=args.share_weights,
        loss_scale=args.loss_scale,
        device_memory=args.device_memory,
        offload=args.offload,
        offload_dir=args.offload_dir,
        offload_io=args.offload_io,
        keep_offload=args.keep_offload,
        host_numa_node=args.host_numa_node,
    )
    world.print(engine.describe())

    first = resume(engine, args)
    log = zm.RunLog(engine, args.steps, args.metrics, first)
    signals = zm.signals.STOPPING if args.save else ()
    with zm.Interrupt(world, signals) as interrupt:
        for step in range(first, args.steps):
            lr = SCHEDULES[args.schedule](engine.applied, args.steps, args.lr, args.warmup)
            how = {"lr": lr, "clip": args.clip or None}
            if args.fused:
                engine.prepare(**how)
            for x, y in tokens.batches(step, args.global_batch, micro, world):
                engine.backward(x, y)
            log.step(engine.step() if args.fused else engine.step(**how))
            done = step + 1
            if args.eval_every and done % args.eval_every == 0:
                world.print(f"held-out loss {held_out_loss(engine, tokens, args.global_batch):.4f}")
            signal = interrupt.requested()
            stop = signal or done - first == args.stop_after
            due = args.save_every and done % args.save_every == 0
            path = (
                save(engine, args, done)
                if args.save and (stop or due or done == args.steps)
                else None
            )
            if stop:
                log.close()
                why = signal.name if signal else f"--stop-after {args.stop_after}"
                kept = f"saved {path}; --resume auto goes on" if path else "nothing is saved"
                world.print(f"stopped by {why} after step {done} of {args.steps}: {kept}")
                sys.exit(zm.signals.EXIT_CODE)

    held_out = held_out_loss(engine, tokens, 4 * args.global_batch)
    log.finish(held_out_loss=held_out)
    world.print(f"held-out loss {held_out:.4f}")
    if args.sample and tokens.vocab == zm.data.BYTES:
        text = bytes(engine.generate(b"def ", args.sample, seed=args.seed))
        world.print("\n" + text.decode(errors="replace"))


if __name__ == "__main__":
    main()
