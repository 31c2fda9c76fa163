"""One rank of two that train one model together, in every way it may be wrapped; writes what a capture gives."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import qkscope
from families import tiny, tokens

LAYERS = 4


def llama():
    return tiny("llama", num_hidden_layers=LAYERS)


def replicated():
    return DistributedDataParallel(llama().train())


def sharded():
    model = llama().train()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def trained_before(model):
    train(model)
    model.zero_grad()
    return model


def backbone_sharded():
    model = llama().train()
    fully_shard(model.model)
    return model


def diverged():
    model = llama()
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight[5, 7] = torch.nan
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def flat():
    return FullyShardedDataParallel(llama(), device_id=torch.device("cpu"))


def tensor_parallel():
    model = llama()
    folder = Path(sys.argv[2]) / "model"
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return type(model).from_pretrained(folder, tp_plan="auto")


def train(model):
    model(input_ids=tokens(), labels=tokens()).loss.backward()


WAYS = {
    "plain": lambda: llama().train(),
    "ddp": replicated,
    "fsdp2": sharded,
    "fsdp2, trained before": lambda: trained_before(sharded()),
    "fsdp2, backbone only": backbone_sharded,
    "fsdp2, diverged": diverged,
    "fsdp1": flat,
    "tensor parallel": tensor_parallel,
}


def outcome(build):
    model = build()
    try:
        table = qkscope.analyze(qkscope.capture_moments(model, tokens().tolist()))
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    train(model)  # goes on as if nothing had happened
    return {"r_q": list(table["r_q"]), "training": model.training}


def main():
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    found = {name: outcome(build) for name, build in WAYS.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
