"""A rank that trains the same GPT with PyTorch or DeepSpeed, and reports the same things.

Run by the interpreter in $ZEROMP_PEERS_PYTHON. Modes: ddp (DistributedDataParallel), zero1
(ZeroRedundancyOptimizer on it), fsdp2 and fsdp2-bf16 (fully_shard; bfloat16 parameters, float32
reduction), deepspeed1, deepspeed3 and each with -bf16, nosync (no communication), all on gloo.
"""

import os
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import ADAMW, Tokens, measured, shape_of, weights
from rank import Gemm, claim_stdout, forget_peak, settings, status_bytes
from torch import nn


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        c = shape.width
        self.heads = shape.heads
        self.ln1, self.qkv, self.proj = nn.LayerNorm(c), nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.ln2, self.fc, self.out = nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

    def forward(self, x):
        b, t, c = x.shape
        qkv = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        with torch.no_grad():
            parameters = dict(self.named_parameters())
            for name, values in weights(shape):
                parameters[name].copy_(torch.from_numpy(values))

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TorchTrainer:
    """A wrapped model and its optimizer; a step returns its loss and when each part ended."""

    def __init__(self, model, optimizer=None):
        self.model = model
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    def step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(x, y)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        return loss, forward, backward


class DeepSpeedTrainer:
    def __init__(self, engine):
        self.engine = engine

    def step(self, x, y):
        loss = self.engine(x, y)
        forward = time.perf_counter()
        self.engine.backward(loss)
        backward = time.perf_counter()
        self.engine.step()
        return loss, forward, backward


def build(mode, model, shape):
    """Wrap the model as the mode says."""
    if mode == "nosync":
        return TorchTrainer(model)
    if mode in ("ddp", "zero1"):
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return TorchTrainer(wrapped, zero1(model) if mode == "zero1" else None)
    if mode.startswith("fsdp2"):
        return fsdp2(model, bf16=mode.endswith("-bf16"))
    return deepspeed(model, shape, stage=int(mode[len("deepspeed")]), bf16=mode.endswith("-bf16"))


def zero1(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, **ADAMW, fused=True
    )


def fsdp2(model, bf16):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return TorchTrainer(model)


def deepspeed(model, shape, stage, bf16):
    import deepspeed as ds

    config = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # left out, DeepSpeed clips to norm 1
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": dict(ADAMW)},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    return DeepSpeedTrainer(engine)


def gathered(value):
    """Every rank's value."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def train(told):
    """Train as told; the same steps, probes and fields as in `gpt_zeromp.train`."""
    shape = shape_of(told["size"], **told.get("shape", {}))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, gemm = Tokens(shape), Gemm() if told.get("probe") else None
    start_rss = status_bytes("VmRSS")
    trainer = build(told["mode"], GPT(shape), shape)
    losses, seconds, parts, cpu_s, first_step_at = [], [], [], 0.0, None
    rates = [0.0]
    for step in range(told["warmup"] + told["steps"]):
        if step == told["warmup"]:
            forget_peak()
        x, y = (torch.from_numpy(a) for a in tokens.batch(step, rank, ranks))
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        loss, forward, backward = trainer.step(x, y)
        end, cpu = time.perf_counter(), time.process_time() - cpu
        first_step_at = first_step_at or time.time()
        losses.append(float(loss.detach()))
        rate = gemm.rate() if gemm else 0.0
        if step < told["warmup"]:
            rates = [rate]
            continue
        rates.append(rate)
        seconds.append(end - start)
        parts.append((forward - start, backward - forward, end - backward))
        cpu_s += cpu
    mine = {
        "seconds": seconds,
        "rates": rates,
        "losses": losses,
        "cpu_s": cpu_s,
        "peak": status_bytes("VmHWM"),
        "start": start_rss,
        "first": first_step_at,
    }
    every = gathered(mine)
    names = ("forward", "backward", "optimizer")
    record = measured(
        shape,
        ranks * shape.batch * shape.context,
        np.max([r["seconds"] for r in every], axis=0),
        np.sum([r["rates"] for r in every], axis=0),
    )
    return record | {
        "cpu_s": sum(r["cpu_s"] for r in every) / len(seconds),
        "parts_s": dict(zip(names, map(statistics.median, zip(*parts, strict=True)), strict=True)),
        "losses": np.mean([r["losses"] for r in every], axis=0).tolist(),
        "first_step_at": max(r["first"] for r in every),
        "peak_rss_bytes": [r["peak"] for r in every],
        "start_rss_bytes": max(r["start"] for r in every),
        "parameters": shape.num_parameters,
        "versions": versions(told["mode"]),
    }


def versions(mode):
    found = {"torch": torch.__version__, "numpy beside torch": np.__version__}
    if mode.startswith("deepspeed"):
        import deepspeed as ds

        found["deepspeed"] = ds.__version__
    return found


def main():
    report = claim_stdout()
    told = settings()
    torch.set_num_threads(1)
    if told["mode"].startswith("deepspeed"):
        import deepspeed as ds

        ds.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    record = train(told)
    if dist.get_rank() == 0:
        report(record)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
