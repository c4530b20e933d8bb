"""Bring your own gradients: ZeRO over named arrays, with no layer of zeromp.

    mpirun -n 4 python examples/own_gradients.py --stage 3

Least squares: each rank sees other rows of A and b, computes the gradient of its own mean of
|A w + c - b|^2 / 2 with plain NumPy (or JAX, PyTorch, Fortran: whatever hands out arrays), and
`Zero` keeps parameters, gradients and optimizer states sharded as the stage says.
"""

import argparse

import numpy as np

import zeromp as zm

ROWS, FEATURES, OUTPUTS = 64, 40, 3  # rows on each rank


def main():
    world = zm.world()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--steps", type=int, default=200)
    args = zm.parse(parser, world)

    truth = np.random.default_rng(0).standard_normal((FEATURES, OUTPUTS))
    rng = np.random.default_rng([1, world.rank])  # each rank has data of its own
    a = rng.standard_normal((ROWS, FEATURES))
    b = a @ truth + 0.5

    zero = zm.Zero(
        {"w": np.zeros((FEATURES, OUTPUTS)), "c": np.zeros(OUTPUTS)},
        world=world,
        stage=args.stage,
        optimizer=zm.AdamW(lr=0.05, weight_decay=0.0),
        groups=[zm.Group("offset", ["c"], lr_factor=2.0)],
    )
    for step in range(args.steps):
        error = a @ zero.full("w") + zero.full("c") - b
        gradients = {"w": a.T @ error / ROWS, "c": error.mean(axis=0)}
        loss = zero.backward(gradients, loss=float((error**2).sum() / (2 * ROWS)))
        report = zero.step(lr=zm.linear(step, args.steps, peak=0.05))
        if step % 40 == 0 or step == args.steps - 1:
            world.print(f"step {step:3}  loss {loss:.6f}  |g| {report.grad_norm:.4f}")
    furthest = float(np.abs(zero.master("w") - truth).max())
    world.print(f"largest error of a weight, bfloat16 in use, float32 kept: {furthest:.1e}")


if __name__ == "__main__":
    main()
