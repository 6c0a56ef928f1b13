"""Ranks find each other under any launcher, and the mesh has the dimensions asked for."""

import gc
import os
import random
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig, Transformer
from course_pp.parallel import (
    DistributedConfig,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_stage,
    build_stage_module,
    destroy_distributed,
    get_device,
    get_dp_mesh,
    get_pp_mesh,
    get_pp_rank,
    get_pp_size,
    get_tp_mesh,
    get_world_info,
    has_dp_mesh,
    init_distributed,
    is_rank_zero,
    refusals_said_once,
)
from course_pp.parallel.mesh import lone_group
from course_pp.parallel.world import first_host

LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture
def launcher(monkeypatch):
    """Set launcher variables in an environment that has none, and leave none behind."""
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith("SLURM_"):
            monkeypatch.delenv(name)

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    before = dict(os.environ)
    yield set_variables
    for name in LAUNCHER_VARIABLES:
        if name not in before:
            os.environ.pop(name, None)


def test_without_a_launcher_there_is_one_process(launcher):
    assert get_world_info() == (0, 0, 1)
    assert is_rank_zero()


def test_torchrun_comes_before_slurm(launcher):
    launcher(
        RANK="5",
        LOCAL_RANK="1",
        WORLD_SIZE="8",
        SLURM_PROCID="3",
        SLURM_LOCALID="3",
        SLURM_NTASKS="4",
    )
    assert get_world_info() == (5, 1, 8)
    assert not is_rank_zero()


def test_slurm_variables_are_exported_for_env_rendezvous(launcher, monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda host, port: [host])
    launcher(
        SLURM_PROCID="3", SLURM_LOCALID="1", SLURM_NTASKS="4", SLURM_JOB_ID="77", SLURM_STEP_ID="0",
        SLURM_STEP_NODELIST="gpu[03-04]", SLURM_STEP_NUM_NODES="2", SLURM_NODEID="1", SLURM_STEP_TASKS_PER_NODE="2(x2)",
    )  # fmt: skip
    assert get_world_info() == (3, 1, 4)
    exported = {name: os.environ[name] for name in LAUNCHER_VARIABLES if name != "MASTER_PORT"}
    assert exported == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu03",
    }  # fmt: skip
    assert get_world_info() == (3, 1, 4), "a second call reads what the first exported"


@pytest.fixture
def scontrol_answers(tmp_path, monkeypatch):
    """Provide the ``scontrol`` that a rank on virtual nodes finds."""

    def answer_with(text):
        scontrol = tmp_path / "scontrol"
        scontrol.write_text(
            f'#!/bin/sh\n[ "$*" = "show node vn1.invalid" ] && printf "{text}\\n"\n'
        )
        scontrol.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return answer_with


@pytest.mark.parametrize(
    ("nodes", "n_nodes", "answer", "address"),
    [
        ("n1", 1, "", "127.0.0.1"),
        ("localhost,n2", 2, "", "localhost"),
        (
            "vn1.invalid,vn2.invalid",
            2,
            "NodeName=vn1\\n   NodeAddr=10.1.2.3 NodeHostName=vm",
            "10.1.2.3",
        ),
        ("vn1.invalid,vn2.invalid", 2, "slurm_load_node error", None),
    ],
    ids=["one node", "a host's name", "as Slurm reaches it", "nobody knows it"],
)
def test_ranks_meet_at_the_first_node(launcher, scontrol_answers, nodes, n_nodes, answer, address):
    scontrol_answers(answer)
    launcher(
        SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NTASKS="2", SLURM_STEP_NODELIST=nodes,
        SLURM_STEP_NUM_NODES=str(n_nodes),
    )  # fmt: skip
    if address is None:
        with pytest.raises(
            ValueError, match=r"'vn1.invalid' is no host's name .* set MASTER_ADDR yourself"
        ):
            get_world_info()
    else:
        get_world_info()
        assert os.environ["MASTER_ADDR"] == address


def slurm_port(launcher, job, step):
    launcher(
        SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NTASKS="2", SLURM_JOB_ID=job, SLURM_STEP_ID=step
    )
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    get_world_info()
    return int(os.environ["MASTER_PORT"])


def test_tasks_of_a_step_agree_on_a_port_that_other_steps_and_jobs_do_not_get(launcher):
    ports = {
        (job, step): slurm_port(launcher, job, step) for job in ("77", "78") for step in ("0", "1")
    }
    assert len(set(ports.values())) == 4
    assert slurm_port(launcher, "77", "1") == ports["77", "1"]
    assert all(1024 < port < 32768 for port in ports.values())


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("a[7,9-11]b,c", "a7b"),
        ("r[1-2]-n[3-4],x", "r1-n3"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is None"),
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
    ],
)
def test_half_a_launcher_is_refused(launcher, variables, named):
    launcher(**variables)
    with pytest.raises(ValueError, match=named):
        get_world_info()


@pytest.mark.parametrize(
    ("config", "world_size", "sizes"),
    [
        (DistributedConfig(), 1, (1, 1, 1, 1)),
        (DistributedConfig(), 6, (1, 1, 6, 1)),
        (DistributedConfig(pp=2, tp=2), 8, (2, 1, 2, 2)),
        (DistributedConfig(pp=2, dp_replicate=2, dp_shard=1), 4, (2, 2, 1, 1)),
    ],
)
def test_minus_one_takes_what_is_left(config, world_size, sizes):
    assert tuple(config.sizes(world_size).values()) == sizes


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (
            DistributedConfig(pp=3),
            4,
            "^pp = 3 does not divide the world size 4: start a multiple of 3 ranks",
        ),
        (DistributedConfig(pp=2, tp=2), 6, "^pp × tp = 2 × 2 = 4 does not divide the world size 6"),
        (DistributedConfig(pp=2, dp_shard=1), 4, "^pp = 2, but the world size is 4: start 2 ranks"),
        (DistributedConfig(dp_shard=1), 4, "^pp = 1, but the world size is 4: start 1 ranks"),
        (
            DistributedConfig(pp=2, ep=4),
            4,
            "^ep=4 must divide dp_shard=2, .*: use ep=1 or 2, or change dp_shard",
        ),
        (
            DistributedConfig(pp=2, dp_shard=3),
            4,
            "^pp × dp_shard = 2 × 3 = 6, but the world size is 4: start 6 ranks",
        ),
    ],
)
def test_factors_that_do_not_multiply_to_the_world_size_are_refused(config, world_size, message):
    with pytest.raises(ValueError, match=message):
        config.sizes(world_size)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"pp": 0}, "pp=0 must be"),
        ({"tp": 1.5}, "tp is 1.5 .*: pass an integer"),
        ({"ep": 0}, "ep=0 must be"),
        ({"dp_shard": 6, "ep": 4}, "ep=4 must divide dp_shard=6, .*: use ep=1 or 2 or 3 or 6"),
        ({"dp_shard": -2}, "dp_shard=-2 must be .* or -1"),
        ({"backend": "mpi"}, "backend is 'mpi' .*: pass one of 'gloo', 'nccl'"),
        ({"timeout_s": 0}, "timeout_s is 0 .*: give seconds above 0"),
        ({"share_gpus": True, "backend": "nccl"}, "share_gpus=True with backend='nccl'"),
    ],
)
def test_impossible_configurations_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        DistributedConfig(**kwargs)


def describe_mesh(rank, config):
    mesh = init_distributed(config, seed=3)
    dp = get_dp_mesh(mesh) if has_dp_mesh(mesh) else None
    return {
        "dims": mesh.mesh_dim_names,
        "shape": tuple(mesh.shape),
        "pp": (get_pp_mesh(mesh) is not None, get_pp_rank(mesh), get_pp_size(mesh)),
        "tp": get_tp_mesh(mesh) is not None,
        "dp": None if dp is None else (dp.mesh_dim_names, tuple(dp.shape)),
        "draw": (torch.rand(1).item(), random.random(), np.random.rand()),
    }


@pytest.mark.parametrize(
    ("config", "dims", "shape", "dp"),
    [
        (DistributedConfig(pp=2, dp_shard=1, tp=2), ("pp", "tp"), (2, 2), None),
        (DistributedConfig(pp=2), ("pp", "dp_shard"), (2, 2), (("dp_shard",), (2,))),
        (
            DistributedConfig(dp_replicate=4, dp_shard=1),
            ("dp_replicate", "dp_shard"),
            (4, 1),
            (("dp_replicate", "dp_shard"), (4, 1)),
        ),
    ],
    ids=["pp-tp", "pp-shard", "replicate"],
)
def test_the_mesh_has_the_dimensions_above_one_outermost_first(config, dims, shape, dp):
    ranks = on_ranks(4, describe_mesh, config)
    for rank, described in enumerate(ranks):
        assert (described["dims"], described["shape"], described["dp"]) == (dims, shape, dp)
        assert described["pp"] == ((True, rank // 2, 2) if "pp" in dims else (False, 0, 1))
        assert described["tp"] == ("tp" in dims)
    numbers = (
        torch.rand(1, generator=torch.Generator().manual_seed(3)).item(),
        random.Random(3).random(),
    )
    drawn = {described["draw"] for described in ranks}
    assert drawn == {(*numbers, np.random.RandomState(3).rand())}, (
        "torch, Python and NumPy draw from the seed"
    )


def warnings_on_rank(rank, node_of_rank, config):
    os.environ["SLURM_NODEID"] = node_of_rank[rank]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init_distributed(config)
    return [str(warning.message) for warning in caught]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("node_of_rank", "config", "ranks"),
    [
        ("0011", DistributedConfig(pp=2, tp=2), None),
        ("0101", DistributedConfig(pp=2, tp=2), "ranks 0 to 1"),
        ("0001", DistributedConfig(pp=2, tp=2), "ranks 2 to 3"),
        ("0011", DistributedConfig(tp=4), "ranks 0 to 3"),
        ("0011", DistributedConfig(pp=4), None),
    ],
    ids=["pp-across", "dealt-in-turn", "uneven", "wider-than-a-node", "no-tp"],
)
def test_a_layout_with_tensor_parallelism_across_nodes_warns_once(node_of_rank, config, ranks):
    first, *others = on_ranks(4, warnings_on_rank, node_of_rank, config)
    assert not any(others)
    if ranks is None:
        assert first == []
    else:
        (message,) = first
        assert message.startswith(
            f"tp={config.tp} crosses nodes: {ranks} share each layer but not a node"
        )


def strange_names_on_rank(rank):
    """Return the refusals of meshes with other names of dimensions, or with none."""
    refusals = []
    for sizes, names in [
        ((2,), None),
        ((2,), ("dp",)),
        ((1, 2), ("data", "tp")),
        ((2,), ("dp_replicate",)),
    ]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for step in (apply_tensor_parallel, apply_fsdp2):
            with pytest.raises(ValueError, match="mesh dimensions") as refusal:
                step(Transformer(ModelConfig(dim=8, n_layers=1, n_heads=2, vocab_size=5)), mesh)
            refusals.append(str(refusal.value))
    return refusals


def test_a_mesh_with_other_names_is_refused_instead_of_ignored():
    first, second = on_ranks(2, strange_names_on_rank)
    assert first == second
    assert all(
        "must be named pp, dp_replicate, dp_shard, tp, and dp_replicate needs a dp_shard" in r
        for r in first
    )


def test_one_process_gets_no_mesh_but_a_working_group(launcher):
    try:
        assert init_distributed(DistributedConfig()) is None
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 1
        assert (get_pp_mesh(None), get_pp_rank(None), get_pp_size(None), get_tp_mesh(None)) == (
            None,
            0,
            1,
            None,
        )
        assert not has_dp_mesh(None)
        with pytest.raises(ValueError, match="has no data-parallel one"):
            get_dp_mesh(None)
    finally:
        destroy_distributed()
    assert not dist.is_initialized()
    destroy_distributed()


@pytest.fixture
def slurm_task(launcher, monkeypatch):
    """Be the last of the tasks on one node, of which each sees some GPUs."""
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        monkeypatch.delenv(name)

    def become(n_tasks, n_visible, **variables):
        last = str(n_tasks - 1)
        launcher(SLURM_PROCID=last, SLURM_LOCALID=last, SLURM_NTASKS=str(n_tasks), **variables)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n_visible)

    return become


@pytest.mark.parametrize(
    ("n_tasks", "n_visible", "variables", "device"),
    [
        (4, 1, {"SLURM_GPUS_ON_NODE": "4"}, "cuda:0"),
        (2, 2, {"SLURM_GPUS_ON_NODE": "4"}, "cuda:0"),
        (4, 4, {"SLURM_GPUS_ON_NODE": "4"}, "cuda:3"),
        (4, 1, {"SLURM_GPUS_PER_TASK": "1"}, "cuda:0"),
        (4, 1, {"SLURM_NTASKS_PER_GPU": "1"}, "cuda:0"),
        (4, 1, {"SLURM_GPU_BIND": "verbose,single:1"}, "cuda:0"),
        (4, 4, {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "none"}, "cuda:3"),
    ],
    ids=[
        "one each",
        "two each",
        "all see all",
        "gpus-per-task",
        "ntasks-per-gpu",
        "gpu-bind",
        "not bound",
    ],
)
@pytest.mark.parametrize("backend", [None, "nccl"])
@pytest.mark.filterwarnings("error")
def test_a_task_takes_the_gpu_that_slurm_shows_it_alone(
    slurm_task, n_tasks, n_visible, variables, device, backend
):
    slurm_task(n_tasks, n_visible, **variables)
    assert get_device(backend) == torch.device(device)


@pytest.mark.parametrize(
    ("n_visible", "variables"),
    [
        (1, {"SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS_PER_GPU": "2", "SLURM_GPU_BIND": "single:2"}),
        (2, {"SLURM_GPUS_ON_NODE": "2"}),
        (1, {"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "1", "TORCHELASTIC_RUN_ID": "1"}),
    ],
    ids=["two tasks a GPU", "all see all", "torchrun is the task"],
)
def test_ranks_that_see_the_same_too_few_gpus_compute_on_the_cpu_and_say_so(
    slurm_task, n_visible, variables
):
    slurm_task(4, n_visible, **variables)
    with pytest.warns(
        UserWarning, match=f"this host has {n_visible} GPUs for 4 ranks: computing on the CPU"
    ):
        assert get_device() == torch.device("cpu")
    with pytest.raises(ValueError, match="backend='nccl' needs a GPU"):
        get_device("nccl")


@pytest.mark.parametrize(
    ("n_gpus", "devices"), [(2, [0, 0, 1, 1]), (3, [0, 0, 1, 2]), (4, [0, 1, 2, 3])]
)
@pytest.mark.filterwarnings("error")
def test_more_ranks_than_gpus_may_share_them(launcher, monkeypatch, n_gpus, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    for rank, device in enumerate(devices):
        launcher(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
        assert get_device(share=True) == torch.device("cuda", device)
    assert get_device("gloo") == torch.device("cpu")


@pytest.mark.parametrize(
    ("n_ranks", "backend"), [(1, "cpu:gloo,cuda:nccl"), (2, "gloo")], ids=["own", "shared"]
)
def test_ranks_that_share_a_gpu_talk_through_host_memory(launcher, monkeypatch, n_ranks, backend):
    made = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(device))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: made.append(backend))
    monkeypatch.setattr("course_pp.parallel.mesh.share_cores", lambda: None)
    mesh = SimpleNamespace(get_group=lambda name: None, mesh_dim_names=("pp",))
    monkeypatch.setattr("course_pp.parallel.mesh.init_device_mesh", lambda *_, **__: mesh)
    monkeypatch.setattr("course_pp.parallel.mesh.set_timeout", lambda *_: None)
    launcher(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(n_ranks), LOCAL_WORLD_SIZE=str(n_ranks))
    init_distributed(DistributedConfig(pp=n_ranks, share_gpus=True))
    assert made == [torch.device("cuda", 0), backend]


def refusal_of_a_shared_gpu(rank):
    mesh = init_distributed(DistributedConfig(pp=2))
    config = ModelConfig(dim=8, n_layers=2, n_heads=2, vocab_size=5)
    module = build_stage_module(config, rank, 2)
    with pytest.raises(ValueError, match=r"^device='cuda:0' over gloo: ") as refusal:
        build_pipeline_stage(
            module, mesh, "cuda:0", batch_size=1, seq_len=4, param_dtype=torch.float32
        )
    return str(refusal.value)


def test_torchs_pipeline_refuses_gpus_over_gloo_and_names_the_engine_that_can():
    for refusal in on_ranks(2, refusal_of_a_shared_gpu, where="local"):
        assert "engine='runtime'" in refusal
        assert "backend='gloo'" in refusal


def test_leaving_lets_go_of_the_group_that_stages_without_a_pipeline_share() -> None:
    """The group's threads would otherwise run until the interpreter goes down around them."""
    init_distributed(DistributedConfig())
    group = weakref.ref(lone_group(dist.group.WORLD))
    destroy_distributed()
    gc.collect()
    assert group() is None


def test_an_interrupted_script_ends_with_one_line(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended, refusals_said_once("script.py"):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == "script.py: interrupted\n"
