"""The updates of `adam.py` by PyTorch's fused AdamW or DeepSpeed's CPU Adam, on one thread."""

import numpy as np
import torch
from gpt import ADAMW
from rank import alternate, claim_stdout, settings


def optimizer(peer, parameter):
    if peer == "torch":
        return torch.optim.AdamW([parameter], **ADAMW, fused=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([parameter], adamw_mode=True, **ADAMW)


@torch.no_grad()
def main():
    report, told = claim_stdout(), settings()
    torch.set_num_threads(1)
    n = told["parameters"]
    rng = np.random.default_rng(0)
    noise = torch.from_numpy(rng.standard_normal(n, np.float32))
    parameter = torch.nn.Parameter(noise * 0.02)
    parameter.grad = noise * 1e-3
    gradient = parameter.grad.bfloat16()
    copy = torch.empty(n, dtype=torch.bfloat16)
    rule = optimizer(told["peer"], parameter)

    def with_16_bits():
        parameter.grad.copy_(gradient)
        rule.step()
        copy.copy_(parameter)

    seconds = alternate({"float32": rule.step, "bfloat16": with_16_bits}, told["repeats"])
    versions = {"torch": torch.__version__}
    if told["peer"] == "deepspeed":
        import deepspeed

        versions["deepspeed"] = deepspeed.__version__
    report(
        {
            "ns": {name: s / n * 1e9 for name, s in seconds.items()},
            "parameters": n,
            "versions": versions,
        }
    )


if __name__ == "__main__":
    main()
