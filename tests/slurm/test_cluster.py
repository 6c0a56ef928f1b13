"""The cluster of these tests hands out nodes and devices as a real one does."""

from tests.slurm.running import run


def test_each_node_hands_out_its_own_gpus():
    done = run("srun -p gpu -N 2 --gres=gpu:2 bash -c 'echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES'")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["n1 0 0,1", "n2 1 0,1"]
