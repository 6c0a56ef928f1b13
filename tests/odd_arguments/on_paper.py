"""A good call of each public function of ``schedule``, ``show`` and ``model``."""

import inspect
from dataclasses import fields
from types import SimpleNamespace

from course_pp.model import ModelConfig, Transformer
from course_pp.plan import Constants, Layout, TimedStep, cluster_of, gpu_named, predict
from course_pp.schedule import Action, Costs, LayerCost, PlannedStage, Product, Span, Use, build, fit, ledger, simulate
from course_pp.schedule.schedule import looped
from course_pp.show.board_levels import LEVELS
from course_pp.show.explorer import Settings
from tests.odd_arguments.rows import Fresh, Rows

S = build("1f1b", 2, 4)
TL = simulate(S)
ASYNC = simulate(build("pipedream", 1, 1))
FIT = fit(TL)
CONFIG = ModelConfig(dim=8, n_layers=4, n_heads=2, vocab_size=11)
F0, B0 = Action(0, "F", 0), Action(0, "B", 1)
WHOLE = Fresh(lambda: Transformer(CONFIG))

SCHEDULE: Rows = {
    "Action": {"stage": 0, "kind": "F", "microbatch": 0},
    "ClusterLevel": {"size": 2, "bandwidth": 1.0},
    "Costs": dict.fromkeys(inspect.signature(Costs).parameters, 1.0),
    "Edge": {"name": "own", "writer": 0, "readers": (1,)},
    "Entry": {
        "name": "own",
        "order": build,
        "n_chunks": 1,
        "any_chunks": False,
        "placed": looped,
        "torch_name": "",
        "chunks_in": 1,
        "updates": False,
    },
    "Fit": {name: getattr(FIT, name) for name in inspect.signature(type(FIT)).parameters},
    "LayerCost": {"time": 1.0, "output_bytes": 1.0, "weight_bytes": 1.0},
    "Ledger": {"versions": "stash", "uses": (Use(0, 0, 0, 0, 0),)},
    "Gap": {"rank": 0, "start": 0, "end": 1, "cause": "because"},
    "Loss": {"cause": "rest", "time": 1.0, "per_rank": (1.0,), "per_link": {}},
    "Overlap": {"forward": F0, "backward": B0},
    "Partition": {"stages": (PlannedStage(0, 1, 1),), "slowest": 1.0, "work": (1.0,), "messages": ()},
    "PlannedStage": {"start": 0, "end": 1, "replicas": 1},
    "Product": {"what": "activation", "stage": 0, "microbatch": 0, "name": ""},
    "Receive": {"rank": 0, "product": Product("activation", 0, 0), "start": 0, "end": 1},
    "Schedule": {"name": "own", "placement": ((0,),), "actions": ((F0,),), "edges": (), "feedback": 0},
    "Span": {"rank": 0, "action": F0, "start": 0, "end": 1},
    "Use": {"stage": 0, "microbatch": 0, "forward": 0, "backward": 0, "update": 0},
    "Timeline": {
        "n_ranks": 1,
        "spans": (Span(0, F0, 0, 1),),
        "unit": "",
        "transfers": (),
        "receives": (),
        "name": "",
        "edges": (),
        "edge_transfers": (),
        "feedback": 0,
        "token_transfer": 0,
        "measured": False,
    },
    "bound": {"n_ranks": 2, "n_microbatches": 4, "costs": None, "memory_limit": None, "placement": None},
    "build": {
        "name": "1f1b",
        "n_ranks": 2,
        "n_microbatches": 4,
        "n_chunks": None,
        "replicas": None,
        "group": None,
        "round_size": None,
        "costs": None,
    },
    "check": {"schedule": S},
    "find": {"name": "1f1b"},
    "fit": {"measured": TL, "expected": None},
    "format_time": {"time": 1.0, "unit": ""},
    "from_torch_csv": {"text": "0F0,0B0\n", "placement": None, "name": "own"},
    "generation": {"n_ranks": 2, "n_groups": 2, "n_tokens": 2, "n_chunks": 1, "placement": None},
    "ledger": {"schedule": build("pipedream", 2, 4), "versions": "stash"},
    "names": {},
    "optima": {},
    "optimum": {
        "n_ranks": 1,
        "n_microbatches": 1,
        "costs": None,
        "memory_limit": None,
        "n_chunks": 1,
        "seconds": 1.0,
        "placement": None,
        "split": True,
        "seed": 0,
        "workers": 1,
    },
    "partition": {"layers": [LayerCost(1.0)], "levels": 2},
    "search": {
        "n_ranks": 1,
        "n_microbatches": 1,
        "costs": None,
        "memory_limit": None,
        "n_chunks": 1,
        "seconds": 1.0,
        "placement": None,
        "split": True,
        "seed": 0,
    },
    "simulate": {"schedule": S, "costs": None, "durations": None},
    "to_torch_csv": {"schedule": S},
}

THEORY: Rows = {
    "noam": {"replicas": (2, 1)},
    "predict": {
        **{"name": "interleaved_1f1b", "n_ranks": 1, "n_microbatches": 4, "costs": None, "n_chunks": None},
        "round_size": 1,
    },
}

SHOW: Rows = {
    "ChartFigure": {"width": 4.0, "height": 2.0},
    "ParallelismTable": {"rows": (), "break_even_tokens": 1.0, "note": ""},
    "Player": {"tl": TL, "title": None},
    "autograd": {"n_stages": 2, "n_microbatches": 2, "title": None},
    "bubble_curve": {
        "schedules": "1f1b",
        "n_ranks": 2,
        "microbatches": (2, 4),
        "costs": None,
        "within_span": False,
        "title": None,
    },
    "bytes_by_kind": {"parts": {"weights": 1.0}, "budget": None, "title": None},
    "course_map": {"here": None, "title": None},
    "cut": {"config": CONFIG, "layers": [(0, 2), (2, 4)], "tokens": 8, "itemsize": 4, "title": None},
    "explore": {field.name: getattr(Settings, field.name) for field in fields(Settings)},
    "fsdp_step": {
        "reshard": True,
        "n_layers": 2,
        "n_shards": 2,
        "schedule": None,
        "rank": 0,
        "title": None,
    },
    "mesh": {"layout": {"pp": 2}, "gpus_per_node": 8, "rank": 0, "title": None},
    "message": {"values": (1.0,), "n_ranks": 2, "sender": 0, "receiver": 1, "title": None},
    "microbatches": {"timeline": TL, "frames": 2, "times": None, "title": None},
    "parallelisms": {"config": CONFIG, "n_ranks": 2, "tokens": 8, "itemsize": 2},
    "placement": {"schedule": S, "title": None},
    "Board": {
        "game": LEVELS[0].game,
        "costs": LEVELS[0].costs,
        "level": None,
    },
    "board": {
        "level": None,
        "n_ranks": 2,
        "n_microbatches": 4,
        "placement": None,
        "costs": None,
        "memory_limit": None,
        "split": False,
    },
    "play": {"tl": TL, "title": None},
    "break_even": {"curves": {"own": {1: 0.5, 2: 2.0}}, "title": None},
    "published": {"rows": {"own": (1.0, 1.1)}, "title": None},
    "ring": {"n_ranks": 2, "step": None, "n_bytes": None, "title": None},
    "speed_up": {
        "schedules": "1f1b",
        "ranks": (1, 2),
        "n_microbatches": 4,
        "n_chunks": None,
        "costs": None,
        "measured": (TL,),
        "title": None,
    },
    "tensor_cut": {
        "n_ranks": 2,
        "plan": ("column", "row"),
        "tokens": 8,
        "dim": 4,
        "hidden": 8,
        "itemsize": 4,
        "title": None,
    },
    "compare": {"predicted": TL, "measured": TL, "names": ("a", "b"), "seconds_per_unit": None, "title": None},
    "dependencies": {"tl": TL, "action": "0B0", "title": None},
    "format_bytes": {"n_bytes": 1},
    "lost_time": {"fit": FIT, "title": None},
    "memory": {"tl": TL, "costs": None, "title": None, "measured": None, "kind": "activation"},
    "pareto": {
        "n_ranks": 2,
        "n_microbatches": 4,
        "costs": None,
        "schedules": None,
        "within_span": False,
        "title": None,
    },
    "pieces": {"tensors": {"a": [SimpleNamespace(offsets=(0,), sizes=(1,), rank=0)]}, "title": None},
    "timeline": {"tl": TL, "title": None},
    "timeline_text": {"tl": TL, "width": 80, "colour": False},
    "to_trace": {"tl": TL, "name": "own"},
    "carried": {"cut": SimpleNamespace(calls=("a", "b"), begins=(1,), values=()), "title": None},
    "versions": {"tl": ASYNC, "ledger": ledger(build("pipedream", 1, 1), "stash"), "title": None},
    "waits": {"waits": [SimpleNamespace(rank=0, operation="recv", peers=(1,))]},
}

MODEL: Rows = {
    "CrossEntropy": {"ignore_index": -100},
    "DecoderLayer": {"config": CONFIG},
    "ForwardFlops": {"embed": 0.0, "layers": (1.0,), "head": 1.0},
    "KVCache": {},
    "ModelConfig": {
        "dim": 8,
        "n_layers": 4,
        "n_heads": 2,
        "vocab_size": 11,
        "n_kv_heads": None,
        "ffn_dim": None,
        "max_seq_len": 16,
        "rope_theta": 1e4,
        "norm_eps": 1e-5,
        "tie_embeddings": False,
        "qkv_bias": False,
        "rope_factor": 1.0,
        "rope_low_freq": 1.0,
        "rope_high_freq": 4.0,
        "rope_original_len": 8,
        "gated_ffn": True,
    },
    "PipelineStageModule": {"config": CONFIG, "stage_id": 0, "num_stages": 2, "layer_range": (0, 2)},
    "Transformer": {"config": CONFIG, "layer_range": None, "has_embedding": True, "has_head": True},
    "build_stage_module": {"config": CONFIG, "pp_rank": 0, "pp_size": 2, "layer_ranges": None},
    "compute_layer_assignment": {"n_layers": 4, "pp_size": 2},
    "drop_other_stages": {"model": WHOLE, "stage_id": 0, "num_stages": 2, "layer_range": (0, 2)},
    "hf_state_dict": {"module": WHOLE},
    "layer_costs": {"config": CONFIG, "seq_len": 4},
    "load_hf_state_dict": {"module": WHOLE, "state": Fresh(dict)},
    "partition_by_cost": {"costs": [1.0, 2.0], "n_stages": 2, "first": 0.0, "last": 0.0},
}

GPU, LAYOUT, PAPER = gpu_named("A100"), Layout(pp=2, microbatch_size=2), cluster_of("1x2xA100")
ON_PAPER = predict(CONFIG, LAYOUT, PAPER, 8, 16)
ASKED = {"model": CONFIG, "cluster": PAPER, "global_batch": 8, "seq_len": 16, "constants": None}

TIMED = {"model": CONFIG, "layout": LAYOUT, "global_batch": 8, "seq_len": 16, "seconds": ON_PAPER.step_s}
STEPS = [
    TimedStep(CONFIG, LAYOUT, batch, 16, predict(CONFIG, LAYOUT, PAPER, batch, 16).step_s)
    for batch in (8, 12, 16, 20, 24)
]

PLAN: Rows = {
    "Cluster": {field.name: getattr(PAPER, field.name) for field in fields(PAPER)},
    "Constants": {field.name: getattr(Constants(), field.name) for field in fields(Constants)},
    "Gpu": {field.name: getattr(GPU, field.name) for field in fields(GPU)},
    "Layout": {field.name: getattr(LAYOUT, field.name) for field in fields(LAYOUT)},
    "ModelConfig": {field.name: getattr(CONFIG, field.name) for field in fields(CONFIG)},
    "TimedStep": TIMED,
    "calibrate": {"steps": STEPS, "cluster": PAPER, "constants": None},
    "cluster_of": {"text": "1x2xA100"},
    "explain": {"first": ON_PAPER, "second": ON_PAPER},
    "gpu_named": {"name": "A100"},
    "gpu_names": {},
    "model_named": {"name": "gpt2"},
    "model_names": {},
    "plan": {**ASKED, "n_best": 1, "precision": "mixed", "like": LAYOUT},
    "predict": {**ASKED, "layout": LAYOUT},
}

SHOW["plan"] = {"prediction": ON_PAPER, "title": None, "rank": 0}
