# The torchruns of several nodes meet at the first node. They use its address, because its name may
# resolve nowhere. The port differs between jobs and steps that share the node.
first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
head=$(scontrol show node "$first" | sed -n "s/.*NodeAddr=\([^ ]*\).*/\1/p")
: "${head:?Slurm tells no address of the first node}"
port=$((15000 + (7919 * SLURM_JOB_ID + SLURM_STEP_ID) % 15000))
