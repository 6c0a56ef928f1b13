"""A good call of each public function of ``parallel``, ``runtime`` and ``training``, in a process group of one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from course_pp import parallel, runtime
from course_pp.model import CrossEntropy, ModelConfig, Transformer, build_stage_module
from course_pp.runtime import Link
from course_pp.schedule import Action, Costs, Edge, build
from course_pp.training import Peak, Speed, TrainConfig
from course_pp.training.checkpoint import save
from course_pp.training.data import Corpus, Sequences, Stream, train_tokenizer, write_tokens
from tests.odd_arguments.on_paper import MODEL, SCHEDULE
from tests.odd_arguments.rows import Fresh, Rows

CONFIG = ModelConfig(dim=8, n_layers=2, n_heads=2, vocab_size=11)
ONE = build("1f1b", 1, 1)
X, IDS = torch.ones(2, 3), torch.ones(2, 4, dtype=torch.int64)
WHOLE = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
SEQUENCES = Sequences(IDS, IDS)


LLAMA = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("gate_proj", "up_proj", "down_proj")})


def nothing() -> None:
    """A step that does nothing."""


def documents_from(start: int) -> list[str]:
    """A stream of one document."""
    return ["some text"]


def parallel_rows(folder: Path) -> Rows:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    layout = parallel.DistributedConfig(pp=2, dp_shard=1)
    model = Fresh(lambda: Transformer(CONFIG))

    def stage() -> Any:
        return parallel.build_pipeline_stage(build_stage_module(CONFIG, 0, 1), None, "cpu", 2, 4, torch.float32)

    of_mesh = {"device_mesh": mesh}
    return {
        "CollectiveCounter": {"device_mesh": None},
        "CollectiveCounts": {"tallies": {("tp", "all_reduce"): parallel.Tally(1, 4)}},
        "DistributedConfig": {
            "pp": 1,
            "dp_replicate": 1,
            "dp_shard": -1,
            "tp": 1,
            "backend": None,
            "timeout_s": 9.0,
            "share_gpus": False,
        },
        "ModelConfig": MODEL["ModelConfig"],
        "OptimisticStep": {
            "optimizer": Fresh(lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)),
            "max_norm": 1.0,
            "group": None,
        },
        "PipelineSchedule": {
            "stages": [stage()],
            "n_microbatches": 2,
            "loss_fn": CrossEntropy(),
            "schedule": "gpipe",
            "rows": 2,
        },
        "PipelineStageModule": MODEL["PipelineStageModule"],
        "Tally": {"number": 1, "n_bytes": 4},
        "VocabParallelCrossEntropy": {"ignore_index": -100},
        "apply_ac": {"model": model, "mode": "full", "blocks": None, "attention": None, "device_mesh": None},
        "apply_compile": {"model": model, "blocks": None, "backend": "eager"},
        "apply_fsdp2": {
            "model": model,
            "device_mesh": None,
            "mp_policy": None,
            "reshard_after_forward": "auto",
            "blocks": None,
        },
        "apply_tensor_parallel": {"model": model, "device_mesh": None, "plan": None, "gather_logits": True},
        "auto_split": {"model": WHOLE, "example": X, "n_stages": 2, "by": "parameters", "at": None},
        "build_pipeline_schedule": {
            "stage": stage(),
            "n_microbatches": 2,
            "loss_fn": CrossEntropy(),
            "schedule": "gpipe",
            "tied": None,
            "timeout_s": 9.0,
        },
        "build_pipeline_stage": {
            "stage_module": build_stage_module(CONFIG, 0, 1),
            "device_mesh": None,
            "device": "cpu",
            "batch_size": 2,
            "seq_len": 4,
            "param_dtype": torch.float32,
            "stage": None,
            "n_stages": None,
            "inputs": None,
            "outputs": None,
        },
        "build_stage_module": MODEL["build_stage_module"],
        "CarryingCost": {"edges": (Edge("x", 0, (1,)),), "sizes": {"x": 8}, "ranks": (0, 1)},
        "carry_along": {"modules": Fresh(lambda: {0: nn.Linear(3, 3)}), "device_mesh": None},
        "carried_bytes": {
            "pipeline": Fresh(lambda: parallel.build_pipeline_schedule(stage(), 2, CrossEntropy(), "gpipe"))
        },
        "clip_grad_norm_": {
            "model_or_stages": model,
            "max_norm": 1.0,
            "foreach": True,
            "device_mesh": None,
            "tied": None,
            "norm_type": 2.0,
            "error_if_nonfinite": False,
            "copies": 1,
        },
        "compute_layer_assignment": MODEL["compute_layer_assignment"],
        "count_collectives": {"fn": nothing, "device_mesh": None},
        "default_mp_policy": {"param_dtype": torch.float32},
        "destroy_distributed": {},
        "compute_dtype": {"module": model},
        "compute_in": {"module": model, "dtype": torch.bfloat16},
        "explain": {"model": WHOLE, "example": X},
        "find_blocks": {"module": model, "blocks": None},
        "find_ties": {"model": model},
        "get_device": {"backend": "gloo", "share": False},
        "get_dp_mesh": of_mesh,
        "get_dp_rank": of_mesh,
        "get_dp_size": of_mesh,
        "get_pp_mesh": of_mesh,
        "get_pp_rank": of_mesh,
        "get_pp_size": of_mesh,
        "get_stage_indices": {"schedule": "1f1b", "pp_rank": 0, "pp_size": 2, "stages_per_rank": None},
        "get_tp_mesh": of_mesh,
        "get_world_info": {},
        "has_dp_mesh": of_mesh,
        "init_distributed": {"config": parallel.DistributedConfig(), "seed": 42},
        "is_rank_zero": {},
        "measure_unsharded_bytes": {"fn": nothing, "modules": nn.Linear(2, 2)},
        "llama_plan": {"module": LLAMA, "tp": 2, "gather_logits": True, "sequence_parallel": False},
        "transformer_plan": {"module": model, "tp": 2, "gather_logits": True},
        "partition_by_cost": MODEL["partition_by_cost"],
        "predict_collectives": {
            "config": CONFIG,
            "layout": layout,
            "batch_size": 2,
            "seq_len": 4,
            "n_microbatches": 2,
            "schedule": "1f1b",
            "reshard_after_forward": "auto",
            "ac": "none",
            "dtype": torch.float32,
            "mp_policy": None,
            "gather_logits": True,
            "clip": True,
            "foreign": True,
        },
        "predict_unsharded_bytes": {
            "config": CONFIG,
            "layout": layout,
            "schedule": "1f1b",
            "reshard_after_forward": "auto",
            "dtype": torch.float32,
            "mp_policy": None,
        },
        "refusals_said_once": {"program": "train.py"},
        "resolve_reshard_after_forward": {"policy": "auto", "device_mesh": None},
        "schedule_names": {},
        "weights_on_meta": {},
        "wire_factor": {"collective": "all_reduce", "n_ranks": 2},
    }


def runtime_rows(folder: Path) -> Rows:
    link = Link((2, 3))
    y = Fresh(lambda: X.clone().requires_grad_() * 2)
    pipeline = {"schedule": ONE, "stages": Fresh(lambda: nn.Linear(3, 3)), "loss_fn": mse_loss}
    more = {
        "group": None,
        "device": None,
        "recompute": False,
        "tied": (),
        "recorder": None,
        "cluster": None,
        "transport": None,
        "timeout_s": 9.0,
        "optimizers": None,
        "versions": None,
    }
    step = {
        "stage": Fresh(lambda: nn.Linear(3, 3)),
        "microbatches": [X],
        "targets": [X],
        "loss_fn": mse_loss,
        "link": link,
    }
    timeline = SCHEDULE["Timeline"]
    return {
        "Alignment": {"offset_ns": 0, "error_ns": 0},
        "EmulatedCluster": {"costs": Costs(), "links": None, "stragglers": {}, "jitter": 0.0, "seed": 0},
        "EmulatedLink": {"latency": 0.0, "bandwidth": None},
        "EmulatedTimeline": timeline | {"wall": runtime.EmulatedTimeline(1, ()), "overruns": ()},
        "Hold": {"meter": runtime.Meter(), "kind": "buffer", "storages": [X.untyped_storage()], "forward": None},
        "Link": {"shape": (2, 3), "dtype": torch.float32, "device": "cpu", "group": None},
        "Meter": {"clock": lambda: 0},
        "Overrun": {"rank": 0, "action": Action(0, "F", 0), "seconds": 1.0},
        "Pipeline": pipeline | more,
        "RankMemory": {"rank": 0, "curves": {"total": ((0.0, 1),)}, "per_forward": {(0, 0): 1}},
        "Recorder": {"device": None, "memory": False},
        "align": {"group": None, "clock": lambda: 0, "host": None},
        "backward_stage": {"x": X, "y": y, "dy": X},
        "forward_stage": {"stage": nn.Linear(3, 3), "x": X, "target": X, "loss_fn": mse_loss, "link": link},
        "generate": {
            "stages": {0: Transformer(CONFIG)},
            "prompts": [[1, 2]],
            "n_tokens": 2,
            "choose": None,
            "end": None,
            "group_size": 1,
            "cache": True,
            "group": None,
            "device": None,
            "recorder": None,
            "cluster": None,
            "transport": None,
            "timeout_s": 9.0,
        },
        "get_stage_layers": {"n_layers": 4, "n_stages": 2, "stage": 0},
        "partition_model": {"layers": [nn.Linear(2, 2), nn.Linear(2, 2)], "n_stages": 2, "stage": 0},
        "profile_layers": {"layers": [nn.Linear(3, 3)], "inputs": X, "repeats": 1, "device": None},
        "recv_activation": {"microbatch": X, "link": link},
        "recv_gradient": {"y": X, "n_microbatches": 2, "link": link},
        "run_step": pipeline | {"inputs": X, "targets": X, "seeds": None, "recorder": None, "group": None},
        "send_activation": {"y": X, "link": link},
        "send_gradient": {"dx": X, "link": link},
        "train_step_pipeline_1f1b": step,
        "train_step_pipeline_gpipe": step,
    }


def training_rows(folder: Path) -> Rows:
    config = TrainConfig(steps=2, batch=2, microbatches=1, peak_flops=1e9, engine="runtime")
    peak = Peak(1e9, "given")
    return {
        "Fitted": {"steps": 1, "loss": 1.0, "validation_loss": None, "speed": Speed(1, 1.0, peak)},
        "Peak": {"flops": 1e9, "source": "given"},
        "Speed": {"tokens_of_a_step": 1, "flops_of_a_step": 1.0, "peak": peak, "steps": 0, "seconds": 0.0},
        "StepResult": {
            "step": 1,
            "loss": 1.0,
            "grad_norm": 1.0,
            "lr": 0.1,
            "seconds": 1.0,
            "skipped": False,
            "loss_scale": 1.0,
        },
        "TrainConfig": {name: getattr(TrainConfig(), name) for name in TrainConfig.__dataclass_fields__},
        "Trainer": {
            "config": config,
            "modules": Fresh(lambda: [build_stage_module(CONFIG, 0, 1)]),
            "train": SEQUENCES,
            "validation": None,
            "device_mesh": None,
            "loss_fn": None,
            "param_dtype": None,
            "tokenizer_digest": None,
            "tied": (),
            "optimizer": None,
        },
        "stages_of_rank": {"config": TrainConfig(), "pp_rank": 0, "pp_size": 2},
    }


def data_rows(folder: Path) -> Rows:
    corpus = Corpus("own", ("some text", "more"))
    tokenizer = train_tokenizer(corpus, 259, folder)
    batch = {"sequences": SEQUENCES, "global_batch": 2}
    part = {"dp_rank": 0, "dp_size": 1}
    documents = [torch.arange(9)]
    tokens = write_tokens(folder / "tokens", ["some text"], tokenizer)
    (folder / "x").write_text("a document")
    (folder / "tokenizer.json").write_text(tokenizer.definition)
    from datasets import Dataset  # here: it takes a second

    Dataset.from_dict({"input_ids": [[1, 2, 3]]}).save_to_disk(folder / "arrow")
    return {
        "open_arrow": {"folder": folder / "arrow", "column": "input_ids"},
        "Batches": batch | {"seed": 0} | part,
        "Stream": {"name": "own", "documents": documents_from, "tokenizer": tokenizer, "seq_len": 4, "first": 0}
        | {"is_padded": False},
        "StreamedBatches": {"stream": Stream("own", documents_from, tokenizer, 4), "global_batch": 2},
        "load_stream": {"dataset": "no/such", "subset": None, "split": "train", "text_column": "text"},
        "PackedTokens": {"file": tokens, "seq_len": 4, "first": 0, "last": None},
        "PaddedTokens": {"file": tokens, "seq_len": 4, "first": 0, "last": None},
        "TokenFile": dict(vars(tokens)),
        "load_tokenizer": {"path": folder / "tokenizer.json"},
        "open_tokens": {"path": folder / "tokens", "verify": False},
        "write_tokens": {"path": folder / "written", "documents": ["text"], "tokenizer": tokenizer},
        "Corpus": {"name": "own", "documents": ("text",)},
        "Sequences": {"inputs": IDS, "targets": IDS, "attention_mask": None},
        "Tokenizer": {"definition": tokenizer.definition},
        "check_vocabulary": {"vocab_size": 259, "tokenizer": tokenizer},
        "encode": {"corpus": corpus, "tokenizer": tokenizer, "cache_dir": folder},
        "load_corpus": {
            "texts": str(folder / "x"),
            "dataset": None,
            "subset": None,
            "split": "train",
            "text_column": "text",
            "max_bytes": 9,
        },
        "packed": {"documents": documents, "seq_len": 4},
        "padded": {"documents": documents, "seq_len": 4, "pad_id": 0},
        "train_tokenizer": {"corpus": corpus, "vocab_size": 259, "cache_dir": folder},
        "unigram_entropy": {"targets": IDS, "vocab_size": 4, "reference": None},
        "validation_batches": batch | {"max_batches": None} | part,
    }


def checkpoint_rows(folder: Path) -> Rows:
    model, weights = Transformer(CONFIG), folder / "weights"
    weights.mkdir()
    save_file(nn.Linear(1, 1).state_dict(), weights / "model.safetensors")
    saved = save(folder / "run", 1, model, device_mesh=None).path
    what = {"path": saved, "modules": model, "optimizer": None, "device_mesh": None, "tied": ()}
    kept = {"keep_last": None, "keep_every": None}
    return {
        "AsyncSaver": {"root": folder / "async", "device_mesh": None, **kept, "timeout_s": 9.0},
        "Difference": {"key": "a", "what": "missing", "max_abs": None},
        "Loaded": {"path": saved, "step": 1, "extra": {}},
        "Piece": {"offsets": (0,), "sizes": (1,), "file": "__0_0.distcp", "n_bytes": 4},
        "Saved": {
            "path": saved,
            "step": 1,
            "n_bytes": 4,
            "stall_s": 0.1,
            "write_s": 0.1,
            "staged_bytes": 0,
        },
        "Saving": {"step": 1, "staged_bytes": 0},
        "TensorEntry": {"key": "a", "dtype": torch.float32, "shape": (1,), "pieces": ()},
        "contents": {"path": saved},
        "diff": {"first": saved, "second": saved},
        "export_hf": {"path": saved, "directory": Fresh(_new(folder, "hf")), "dtype": None},
        "find_latest": {"root": folder / "run"},
        "import_hf": {"source": folder / "no model", "root": folder / "imported"},
        "load": what,
        "load_stage": {"stage": nn.Linear(1, 1), "folder": weights, "device": "cpu", "names": None},
        "resume": what,
        "save": {
            "root": Fresh(_new(folder, "run")),
            "step": 1,
            "modules": nn.Linear(1, 1),
            "optimizer": None,
            "device_mesh": None,
            "extra": None,
            "attachments": None,
            "tied": (),
            **kept,
        },
        "verify": {"path": saved},
    }


def _new(folder: Path, name: str) -> Callable[[], Path]:
    """Makes one path after another that does not exist yet."""
    numbers = iter(range(10**6))
    return lambda: folder / f"{name} {next(numbers)}"
