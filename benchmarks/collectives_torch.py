"""The operations of `collectives.py` by gloo, from PyTorch."""

import numpy as np
import torch
import torch.distributed as dist
from rank import claim_stdout, settings, time_together

MB = 2**20


def main():
    report, told = claim_stdout(), settings()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, results = dist.get_world_size(), {}
    for dtype in (torch.float32, torch.bfloat16):
        for mb in told["sizes"]:
            n = mb * MB // dtype.itemsize // ranks * ranks
            whole, piece = torch.ones(n, dtype=dtype), torch.ones(n // ranks, dtype=dtype)
            room = torch.empty_like(whole)
            calls = {
                "memcpy": lambda room=room, whole=whole: room.copy_(whole),
                "reduce_scatter": lambda p=piece, w=whole: dist.reduce_scatter_tensor(p, w),
                "all_gather": lambda p=piece, w=whole: dist.all_gather_into_tensor(w, p),
            }
            for name, call in calls.items():
                mine = time_together(call, dist.barrier, 3 * told["repeats"])
                every = [None] * ranks
                dist.all_gather_object(every, mine)
                median = float(np.median(np.max(every, axis=0))) * 1e3
                results[f"{name}/{str(dtype).split('.')[1]}/{mb}"] = median
    if dist.get_rank() == 0:
        report({"ms": results, "ranks": ranks, "versions": {"torch": torch.__version__}})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
