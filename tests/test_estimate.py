"""Costs on paper against costs measured: FLOPs by torch's counter, sums by their tensors, disk by the files."""

import argparse
import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from families import tiny, tokens
from qkscope.capture.backbone import evaluation, run_backbone, text_backbone
from qkscope.capture.blueprint import WeightCounts, blueprint
from qkscope.capture.collect import collect_moments, make_batch
from qkscope.capture.probe import probe_model
from qkscope.cli.arguments import build_parser, quantity
from qkscope.cli.commands import cluster_of
from qkscope.cli.describe import estimate_lines
from qkscope.cost import (
    CheckpointWork,
    Cluster,
    Flops,
    attended_pairs,
    device_memory,
    estimate,
    estimate_plan,
    flops_of,
    hub_work,
    planned_work,
)
from qkscope.errors import InputError
from qkscope.layers import LayerFacts
from qkscope.moments.layout import Layout, bucket_edges, capture_layout
from qkscope.moments.running_sums import RunningSums
from qkscope.moments.sizes import predict_sizes
from qkscope.results.folder import shard_path
from qkscope.run.execute import run_study
from qkscope.run.plan import make_plan
from qkscope.run.progress import Events
from qkscope.study.load import load_study

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))


def work(shards=(3, 1), context=4, layers=None, **changes) -> CheckpointWork:
    """Two layers of 2 query heads and 1 key head of width 4, as small as hands can count."""
    facts = layers or (LayerFacts(0, 2, 1, 4), LayerFacts(1, 2, 1, 4))
    counts = WeightCounts(embedding=200, active=700, head=200, hidden=8, inner=16)
    given = {
        "blueprint": SimpleNamespace(probe=SimpleNamespace(layers=facts), parameters=1000, weights=counts),
        "layout": Layout(bucket_edges(context, 2), 1),
        "shards": tuple(shards),
        "batch_tokens": 8,
        "width": 2,
        "stored": 2400,
        "source": "tiny",
        "remote": True,
        **changes,
    }
    return CheckpointWork(**given)


# -- by hand ----------------------------------------------------------------------------------------------


def test_flops_by_hand():
    # 4 documents of 4 tokens are 16 tokens: matrices take 2 x 700 for each.
    # Four tokens see 1 + 2 + 3 + 4 = 10 pairs; scores and values are 2 FLOPs x 4 wide each: 16 per pair;
    # 2 heads x 2 layers x 4 documents x 10 pairs x 16.
    # x xT is 16 products, x u is 4: 20 x 2 FLOPs per token; 3 heads x 2 layers x 16 tokens, so narrow that all are
    # float64.
    assert flops_of(work()) == Flops(matrices=2 * 700 * 16, attention=2560, sums32=0, sums64=40 * 3 * 2 * 16)
    # Of 4 positions one is skipped and of the others half are sampled: 1.5 tokens for each of 4 documents.
    sampled = work(layout=Layout((0, 2, 4), 1, skip_positions=1, rate=0.5))
    assert flops_of(sampled).sums64 == 40 * 3 * 2 * 6
    # 64 wide: 64 x 65 x 2 FLOPs in float32 for 3 heads and 5 documents of 2048 tokens.
    wide = flops_of(work((4, 1), 2048, layers=(LayerFacts(0, 2, 1, 64),)))
    assert (wide.sums32, wide.sums64) == (8320 * 3 * 5 * 2048, 0)


def test_bytes_by_hand():
    # Memory, 2 x 3 heads: 8 bytes x (2 segments of 10 squares, 2 buckets with two rows of 4 sums, 4 for the pivot). 4
    # bytes x the group's two rows of 4 in each bucket; the squares of the only group are those of the segments.
    assert work().sizes.memory == 2 * 3 * (8 * (2 * 10 + 2 * 8 + 4) + 4 * 2 * 8) == 2304
    # File: 8 bytes x (8 numbers per bucket, 3 counts per bucket and group, 4 for the pivot, a scale per segment); 4
    # bytes x 10 squares per segment; 2 bytes x 8 sums per bucket of the group and two scales of 4 bytes; documents.
    assert work().sizes.file == 2 * 3 * (8 * (2 * 8 + 2 * 3 + 4 + 2) + 4 * 20 + 2 * (2 * 8 + 2 * 4)) + 2 * 8 == 2128
    one, two = device_memory(work(), 1), device_memory(work(), 2)
    assert (one.weights, one.sums) == (1000 * 2, 2304)
    assert (two.weights, two.sums) == ((200 + 400) * 2, 1152)  # the embedding is on the first device


def test_disk_and_network_by_hand():
    works = [work(), work(source="other", stored=5000)]
    found = estimate(works, Cluster(devices=1))
    assert found.disk.moments == 2 * 2128
    assert found.disk.shards == 2 * 2128  # the two shards of one checkpoint
    assert found.disk.weights == found.downloaded == 7400
    assert found.saved == 2 * 2128 * 6  # per checkpoint 2 shards and the sum are written and read
    three = [*works, work(source="third", stored=1000)]
    assert estimate(three, Cluster(devices=1, evict=True)).disk.weights == 7400  # one at work, the next fetched ahead
    assert estimate(works, Cluster(devices=2)).disk.shards == 4 * 2128
    assert estimate([work(), work()], Cluster(devices=1)).downloaded == 2400  # one commit with two contexts
    single = estimate([work((4,))], Cluster(devices=1))
    assert (single.disk.shards, single.saved) == (0, 2 * 2128)  # written as the whole, read for the tables
    assert estimate([work(remote=False)], Cluster()).downloaded == 0


def test_time_by_hand():
    # Everything but the matrices is made free: 2 x 700 x 16 = 22400 FLOPs at 0.5 x 1000 per second are 44.8 s.
    given = {"devices", "devices_per_model", "flops", "utilization", "evict"}
    free = {field.name: 1e30 for field in dataclasses.fields(Cluster) if field.name not in given}
    no_attention = work(layers=(LayerFacts(0, 1, 1, 1, attention="sliding", attention_window=1),))
    one = estimate([no_attention], Cluster(devices=1, flops=1000, utilization=0.5, **free))
    # One pair per token: 4 FLOPs each, 64 in all, 0.128 s.
    assert one.seconds["computing"] == pytest.approx(44.8 + 0.128)
    assert one.device_hours == pytest.approx(44.928 / 3600)
    two = estimate([no_attention], Cluster(devices=2, flops=1000, utilization=0.5, **free))
    assert two.seconds["computing"] == pytest.approx(44.928 / 2)
    assert two.bottleneck == "computing"
    # Two devices that share the model take turns: no faster.
    shared = estimate([no_attention], Cluster(devices=2, devices_per_model=2, flops=1000, utilization=0.5, **free))
    assert shared.seconds["computing"] == pytest.approx(one.seconds["computing"])
    # Two workers wait for one link: 2400 bytes at 24 per second.
    link = estimate([no_attention], Cluster(devices=2, flops=1000, utilization=0.5, **{**free, "download": 24.0}))
    assert link.seconds["downloads"] == pytest.approx(100)
    assert link.bottleneck == "downloads"


@pytest.mark.parametrize("facts", [
    LayerFacts(0, 1, 1, 1),
    LayerFacts(0, 1, 1, 1, attention="sliding", attention_window=5),
    LayerFacts(0, 1, 1, 1, attention="sliding", attention_window=100),
    LayerFacts(0, 1, 1, 1, attention="chunked", attention_window=5),
])  # fmt: skip
@pytest.mark.parametrize("context", [1, 4, 5, 17, 20])
def test_pairs_are_those_the_mask_allows(facts, context):
    allowed = {
        "full": lambda q, k: True,
        "sliding": lambda q, k: q - k < facts.attention_window,
        "chunked": lambda q, k: q // facts.attention_window == k // facts.attention_window,
    }[facts.attention]
    counted = sum(allowed(q, k) for q in range(context) for k in range(q + 1))
    assert attended_pairs(context, facts) == counted


def test_a_blueprint_leaves_the_config_its_dtype():
    """`dtype: auto` asks the config for it afterwards."""
    config = tiny("llama").config
    config.dtype = torch.float32
    blueprint(config)
    assert config.dtype == torch.float32


# -- against real models ----------------------------------------------------------------------------------

MODELS = {
    "llama": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2},
}
LENGTH, ROWS = 48, 3


def real_work(model, context=LENGTH, documents=ROWS, layout=None, batch_tokens=8) -> CheckpointWork:
    layout = layout or Layout(bucket_edges(context, 2), 1)
    return hub_work(blueprint(model.config), model.config, layout, (documents,), batch_tokens, "real")


@pytest.mark.pinned  # earlier versions of transformers turn positions into angles by one more small product
@pytest.mark.parametrize("kind", MODELS)
def test_parameters_and_forward_flops_are_those_of_the_real_model(kind):
    model = tiny(kind, **MODELS[kind])
    model.set_attn_implementation("eager")  # torch's counter knows no fused kernels on a CPU
    model.set_experts_implementation("eager")
    planned = real_work(model)
    backbone = text_backbone(model)
    assert planned.blueprint.parameters == sum(parameter.numel() for parameter in backbone.parameters())
    stored = sum(tensor.numel() for tensor in {id(p): p for p in model.parameters()}.values())
    assert planned.stored == 4 * stored
    with evaluation(backbone), FlopCounterMode(display=False) as counter:
        run_backbone(backbone, tokens(ROWS, LENGTH))
    # Eager attention computes all pairs and masks afterwards.
    masked = sum(4 * f.q_heads * f.head_dim * ROWS * (LENGTH**2 - attended_pairs(LENGTH, f)) for f in planned.layers)
    planned = flops_of(planned)
    assert planned.matrices + planned.attention + masked == counter.get_total_flops()


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_flops_of_the_sums_are_bounded_by_the_estimate(kind, monkeypatch):
    """The estimate is of plain products: the sums may be made with fewer, never with many times as many."""
    monkeypatch.setattr("qkscope.capture.collect.can_stop_early", lambda model: False)  # both passes are whole
    model = tiny(kind)
    layout = Layout(bucket_edges(LENGTH, 4), 2)
    planned = real_work(model, layout=layout)
    probe = probe_model(model)
    batch = make_batch(list(tokens(ROWS, LENGTH).numpy()), [0, 1, 0], list("abc"), [0, 1, 2])
    backbone = text_backbone(model)
    with FlopCounterMode(display=False) as whole:
        collect_moments(model, [batch], layout, probe=probe)
    with evaluation(backbone), FlopCounterMode(display=False) as forward:
        run_backbone(backbone, torch.from_numpy(batch.ids))
    counted = whole.get_total_flops() - forward.get_total_flops()
    _, _, *sums = flops_of(planned)
    assert sum(sums) / 2.5 <= counted <= sum(sums)


def test_memory_of_the_sums_is_that_of_their_tensors(monkeypatch):
    made = []
    start = RunningSums.__init__
    monkeypatch.setattr(RunningSums, "__init__", lambda self, *a, **k: (made.append(self), start(self, *a, **k))[1])
    model = tiny("llama")
    layout = Layout(bucket_edges(LENGTH, 4), 2)
    batch = make_batch(list(tokens(ROWS, LENGTH).numpy()), [0, 1, 0], list("abc"), [0, 1, 2])
    collect_moments(model, [batch], layout)
    tensors = [value for state in made for value in vars(state).values() if isinstance(value, torch.Tensor)]
    assert len(made) == 4
    planned = real_work(model, layout=layout)
    assert device_memory(planned, 1).sums == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_activations_are_about_what_a_forward_pass_holds():
    """Rough is said to be rough: within a factor of two of the bytes that torch has allocated at the most."""
    from torch.profiler import ProfilerActivity, profile

    model = tiny("llama", hidden_size=128, intermediate_size=384, max_position_embeddings=1024)
    layout = Layout(bucket_edges(1024, 16), 1)
    planned = real_work(model, 1024, 4, layout=layout, batch_tokens=4096)
    backbone = text_backbone(model)
    ids = tokens(4, 1024)
    with evaluation(backbone):
        run_backbone(backbone, ids)  # what torch sets up once
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run_backbone(backbone, ids)
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    estimated = device_memory(planned, 1).activations
    assert peak / 2 < estimated < 2 * peak


# -- against a real run -----------------------------------------------------------------------------------


class Watched(Events):
    """Looks at the results folder after every batch."""

    def __init__(self, folder):
        self.folder, self.peak, self.shards = folder, 0, {}

    def finished(self, plan, seconds):
        self.look()

    def advanced(self, plan, documents, tokens):
        self.look()

    def look(self):
        found = {path: without_header(path) for path in self.folder.rglob("*.safetensors") if path.name[0] != "."}
        self.peak = max(self.peak, sum(found.values()))


def without_header(path: Path) -> int:
    """Bytes of a safetensors file after its header, whose length the first eight bytes say."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def study(world, **changes):
    return world(shard_tokens=512, batch_tokens=64, **changes)


@pytest.mark.slow
def test_disk_of_a_real_run(world, tmp_path, monkeypatch):
    """Six documents: one shard at context 64, three at 256."""
    plan = make_plan(load_study(study(world)))
    found = estimate_plan(plan, Cluster(devices=1))
    assert found.shards == 4
    out = tmp_path / "out"
    watched = Watched(out)
    # Shards are whole and the sum of them is written just before they are dropped: the moment of most bytes.
    import qkscope.run.finished as shards

    drop = shards.remove_shards
    monkeypatch.setattr(shards, "remove_shards", lambda *which: (watched.look(), drop(*which))[1])
    run_study(study(world), out, watched)
    files = {path.stem: path for path in (out / "moments").glob("*.safetensors")}
    for each in plan.checkpoints:
        assert without_header(files[each.checkpoint.name]) == planned_work(each).sizes.file
    assert found.disk.moments == sum(map(without_header, files.values()))
    # The checkpoint with most shards is the last, so that the bound is reached.
    assert watched.peak == found.disk.moments + found.disk.shards


def test_shard_files_are_as_large_as_moments_files(world, tmp_path):
    class Stop(Exception):
        pass

    class Stopping(Events):
        documents = 0

        def advanced(self, plan, documents, tokens):
            self.documents += documents
            if self.documents > 10:
                raise Stop

    with pytest.raises(Stop):
        run_study(study(world), tmp_path / "out", Stopping())
    two = make_plan(load_study(study(world))).checkpoints[1]
    first = shard_path(tmp_path / "out", "two", 0)
    assert without_header(first) == planned_work(two).sizes.file


def test_work_is_read_off_a_plan(world, checkpoints):
    plan = make_plan(load_study(study(world)))
    one, two = map(planned_work, plan.checkpoints)
    assert (one.shards, two.shards) == ((6,), (2, 2, 2))
    assert (one.tokens, two.tokens) == (6 * 64, 6 * 256)
    assert (one.rows, two.rows) == (1, 1)
    assert not one.remote
    saved = sum(path.stat().st_size for path in (checkpoints / "short").glob("*.safetensors"))
    assert one.stored == saved
    first = plan.checkpoints[0]
    on_hub = hub_work(first.blueprint, first.config, first.layout, (6,), 64, "hub")
    assert on_hub.stored == pytest.approx(saved, abs=8192)  # the header of the safetensors file


def test_documents_are_tokenized_once_and_as_far_as_the_longest_context(world):
    plan = make_plan(load_study(study(world)))
    bytes_of = [path.stat().st_size for path in (world().parent / "docs").glob("*.txt")]  # a byte is a token
    found = estimate_plan(plan, Cluster(devices=1, tokenize=10))
    assert found.seconds["tokenizing"] == sum(min(size, 256) for size in bytes_of) / 10


# -- properties -------------------------------------------------------------------------------------------

clusters = st.builds(
    Cluster,
    devices=st.integers(1, 12),
    devices_per_model=st.just(1),
    flops=st.floats(1e3, 1e9),
    flops64=st.floats(1e3, 1e9),
    download=st.floats(1, 1e6),
    tokenize=st.floats(1, 1e6),
)
documents = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def wall(found) -> float:
    return found.seconds[found.bottleneck]


def checkpoints_of(counts) -> list[CheckpointWork]:
    return [work((3,) * (n // 3) + (n % 3,) * bool(n % 3), source=str(i)) for i, n in enumerate(counts)]


@given(documents, clusters)
@settings(deadline=None)
def test_more_workers_are_never_slower(counts, cluster):
    more = dataclasses.replace(cluster, devices=cluster.devices + 1)
    works = checkpoints_of(counts)
    assert wall(estimate(works, more)) <= wall(estimate(works, cluster)) * (1 + 1e-9)


@given(documents, documents, clusters)
@settings(deadline=None)
def test_costs_add_over_checkpoints(first, second, cluster):
    both = checkpoints_of(first + second)
    parts = [estimate(both[: len(first)], cluster), estimate(both[len(first) :], cluster)]
    whole = estimate(both, cluster)
    for of in ("tokens", "device_hours", "downloaded", "saved", "flops.matrices", "disk.moments", "disk.weights"):
        values = []
        for found in (*parts, whole):
            for name in of.split("."):
                found = getattr(found, name)
            values.append(found)
        assert values[2] == pytest.approx(values[0] + values[1])
    assert max(map(wall, parts)) <= wall(whole) * (1 + 1e-9)


@given(documents, clusters, st.integers(0, 4), st.integers(1, 9))
@settings(deadline=None, max_examples=300)
def test_more_documents_never_cost_less(counts, cluster, where, added):
    longer = list(counts)
    longer[where % len(counts)] += added
    few, many = estimate(checkpoints_of(counts), cluster), estimate(checkpoints_of(longer), cluster)
    assert sum(few.flops) < sum(many.flops)
    assert few.device_hours < many.device_hours
    assert sum(few.disk) <= sum(many.disk)
    assert few.memory.sums == many.memory.sums  # the sums do not grow with tokens
    assert wall(few) <= wall(many) * (1 + 1e-9)


# -- the command line and the page ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GB", 80e9), ("312T", 312e12), ("2 GB/s", 2e9), ("1e9", 1e9), ("19.5TFLOPS", 19.5e12), ("300k", 3e5), ("7", 7)],
)
def test_quantities(text, value):
    assert quantity(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "GB", "80GiB", "-3", "1e", "3 apples"])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        quantity(text)


def options(*words):
    return build_parser("plan").parse_args(["plan", "study.yaml", *words])


def test_options_make_a_cluster():
    assert cluster_of(options()) == Cluster()
    given = cluster_of(options("--devices", "64", "--device-memory", "141GB", "--flops", "989T", "--evict"))
    assert given == Cluster(devices=64, device_memory=141e9, flops=989e12, evict=True)


@pytest.mark.parametrize(
    "words", [("--devices", "0"), ("--utilization", "1.5"), ("--devices", "2", "--devices-per-model", "4")]
)
def test_impossible_clusters_are_refused(words):
    with pytest.raises(InputError, match="cluster: "):
        cluster_of(options(*words))


def test_lines_of_a_plan(world):
    plan = make_plan(load_study(study(world)))
    text = "\n".join(estimate_lines(plan, Cluster(devices=2, tokenize=1e3)))
    assert "2 workers of 1 of the 2 devices, 4 shards" in text
    assert "bottleneck: tokenizing" in text
    assert "does not fit" not in text
    cramped = "\n".join(estimate_lines(plan, Cluster(devices=2, device_memory=1e4)))
    assert "does not fit: the fullest device needs" in cramped
    assert "take turns" in cramped  # both devices for one model, for want of memory


def test_as_few_devices_as_fit():
    needs = [sum(device_memory(work(), n)) for n in (1, 2)]
    assert needs[0] > needs[1]
    assert estimate([work()], Cluster(devices=4, device_memory=needs[0])).workers == 4
    assert estimate([work()], Cluster(devices=4, device_memory=needs[1])).devices_per_model == 2
    nowhere = estimate([work()], Cluster(devices=4, device_memory=10))
    assert (nowhere.devices_per_model, nowhere.workers, nowhere.fits) == (4, 1, False)


@pytest.mark.slow
def test_the_page_is_up_to_date():
    import scaling

    written = scaling.PAGE.read_text(encoding="utf-8")
    assert "<!-- engines -->" in written or "## Engines" in written
    assert written == scaling.page(), "run: python benchmarks/scaling.py --write"


@pytest.mark.parametrize(("width", "common"), [(128, 4096), (64, 65536)])
def test_the_formulas_of_the_page_give_the_bytes_that_a_run_shows(width, common):
    """What the page says is worked out as it stands there, so that it cannot fall behind the code."""
    import scaling

    written = scaling.PAGE.read_text(encoding="utf-8").splitlines()
    formulas = [line.split("|")[2].partition(" bytes per head")[0] for line in written if " bytes per head" in line]
    layout = capture_layout(65536, buckets=16, groups=8, common=common, rows=0)
    letters = {"B": layout.buckets, "G": layout.groups, "d": width, "p": width * (width + 1) / 2}
    letters |= {"W": 2 if common < 65536 else 1, "S": len(layout.sketch_spans), "m": layout.sketched}
    letters |= {"s": layout.unrotated_sketched, "C": len(layout.segments)}
    letters["N"] = layout.buckets - letters["C"] + (layout.groups - 1) * letters["W"]
    memory, memory_sketches, memory_before, file, file_sketches, file_before = (
        eval(formula.replace("·", "*").replace("²", "**2"), {}, letters) for formula in formulas
    )
    sizes = predict_sizes(layout, [LayerFacts(layer=0, q_heads=4, kv_heads=4, head_dim=width, rotary="rotary")])
    assert 8 * (memory + memory_sketches + memory_before) == sizes.memory
    assert 8 * (file + file_sketches + file_before) == pytest.approx(
        sizes.file, rel=0.01
    )  # and counts that a layer's heads share
