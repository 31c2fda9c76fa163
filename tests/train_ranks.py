"""One rank of two that train one model together and measure it, in every way it may be wrapped."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ranks
from families import tokens
from qkscope.train import Probe
from ranks import flat, replicated, sharded, tensor_parallel, trained_before

DOCUMENTS = tokens(7, 48, seed=3).tolist()  # an odd number: one rank has a document less
STEPS, LAYERS, GROUPS = 2, 2, 3


def compiled_layers():
    model = ranks.llama().train()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


WAYS = {
    "plain": lambda: ranks.llama().train(),
    "ddp": replicated,
    "fsdp2": sharded,
    "fsdp2, trained before": lambda: trained_before(sharded()),
    "compiled layers": compiled_layers,
    "fsdp1": flat,
    "tensor parallel": tensor_parallel,
}


def losses(model, look):
    """A few steps on batches of this rank's own; ranks that share heads work on the same ones."""
    own = 0 if getattr(model, "tp_size", None) else dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        look(step)
        batch = tokens(2, 24, seed=10 * step + own)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def outcome(name, build, folder):
    """What is measured at the first step, and whether the training goes on as it would have."""
    out = folder / name.replace(" ", "-").replace(",", "")
    try:
        model = build()
        probe = Probe(model, DOCUMENTS, out, page=False, groups=GROUPS, batch_tokens=48)
        scalars = []
        found = losses(model, lambda step: scalars.append(probe(step)))
        probe.finish()
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    steps = probe.folder.steps if probe.folder else None
    return {"scalars": scalars, "out": str(out), "steps": steps, "same": found == losses(build(), lambda step: None)}


def failing(folder):
    """What one rank alone meets is an error of both."""
    model = ranks.llama().train()
    documents = [row[: 48 if dist.get_rank() == 0 else 40] for row in DOCUMENTS]
    try:
        Probe(model, documents, folder / "different", page=False)(0)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {}


def broken(folder):
    """A layer that fails on rank 1 only."""
    model = ranks.llama().train()
    if dist.get_rank() == 1:
        model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        Probe(model, DOCUMENTS, folder / "broken", page=False)(0)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {}


def taken(folder):
    """A folder that rank 0 refuses is refused on both."""
    place = folder / "taken"
    if dist.get_rank() == 0:
        place.mkdir()
        (place / "qk.csv").write_text("model\n")
    dist.barrier()
    try:
        Probe(ranks.llama(), DOCUMENTS, place, page=False)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {}


def with_trainer(folder):
    """Hugging Face's Trainer, which wraps the model itself."""
    from test_train_trainer import build, follow, logged, steps_logged

    plain = build(folder / "trainer-plain", max_steps=4, ddp_backend="gloo")
    plain.train()
    trainer = build(folder / "trainer", max_steps=4, ddp_backend="gloo")
    follow(trainer, every=2)
    trainer.train()
    wrapped = type(trainer.model_wrapped).__name__
    return {"steps": steps_logged(trainer), "same": logged(trainer) == logged(plain), "wrapped": wrapped}


def with_sharding_trainer(folder):
    """The same with `fsdp=True`, which is FSDP2: accelerate shards layers, embedding, and norm with head.

    It does so for GPUs alone, so it is told that these processes have some; the rest is as it is everywhere.
    """
    from accelerate.state import DistributedType, PartialState
    from transformers import Trainer

    from test_train_trainer import arguments, follow, llama, logged, rows, steps_logged

    def sharding(name):
        settings = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        given = arguments(folder / name, max_steps=4, ddp_backend="gloo", fsdp=True, fsdp_config=settings)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return Trainer(llama(), given, train_dataset=rows())

    def weights(trainer):
        return [each.full_tensor() for each in trainer.model.parameters()]

    plain = sharding("sharding-plain")
    plain.train()
    trainer = sharding("sharding")
    follow(trainer, every=2)
    trainer.train()
    return {
        "steps": steps_logged(trainer),
        "same": logged(trainer) == logged(plain),
        "equal": all(torch.equal(*pair) for pair in zip(weights(plain), weights(trainer), strict=True)),
        "sharded": sorted(
            {type(each).__name__ for each in trainer.model.modules() if type(each).__name__[:4] == "FSDP"}
        ),
        "out": str(folder / "sharding/qkscope"),
    }


def main():
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    ranks.LAYERS = LAYERS
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    found = {name: outcome(name, build, folder) for name, build in WAYS.items()}
    found |= {"different documents": failing(folder), "broken on one": broken(folder), "taken": taken(folder)}
    found["trainer"] = with_trainer(folder)
    found["sharding trainer"] = with_sharding_trainer(folder)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
