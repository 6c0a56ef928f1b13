"""What is not refused and yet no mistake, with the reason for each."""

UNTRIED = {
    "schedule": {
        "Found": "made by search",
        "Optimum": "made by optimum",
        "Time": "a type",
        "Versions": "a type",
    },
    "schedule.theory": {"NoClosedForm": "an exception", "Prediction": "made by predict"},
    "model": {
        "config_from_hf": "takes any object with transformers' fields",
        "config_to_hf": "needs transformers",
        "from_hf": "needs transformers",
    },
    "plan": {"Prediction": "made by predict"},
    "parallel": {
        "Blocks": "a type",
        "Entered": "made by CollectiveCounter",
        "ReshardPolicy": "a type",
        "TokenLoss": "a protocol",
    },
    "runtime": {"LossNotFinite": "an exception", "TokenLoss": "a protocol", "PipelineError": "an exception"},
    "training.data": {"Rows": "a protocol"},
    "training.checkpoint": {"CheckpointError": "an exception"},
    "launch": dict.fromkeys(["LaunchError", "RankDied", "RankTraceback", "RanksHung"], "an exception"),
    "exercises": {"Mistake": "an exception"},
    "collective": {"RankMissing": "an exception"},
    "loss": {"LossFn": "a type", "Share": "made by share_of", "TokenLoss": "a protocol"},
}


RECORDS = {
    *("Action", "Alignment", "Difference", "EmulatedRun", "Entry", "Finding", "Fitted", "ForwardFlops", "Gap"),
    *("Loaded", "Loss", "Overrun", "ParallelismTable", "Partition", "Peak", "Piece", "PlannedStage"),
    *("Product", "Progress", "Quiz", "RankMemory", "Receive", "Saved", "Saving", "Span", "Speed"),
    *("StepResult", "Tally", "TokenFile", "Use", "Verdict", "Wait"),
}
"""What the package makes itself, some by the thousand: their numbers are what was seen, and are not judged."""

NUMBERS = {
    ("ClusterLevel", "bandwidth", "inf"): "links that cost nothing",
    ("DistributedConfig", "dp_shard", "-1"): "what the other factors leave",
    ("CrossEntropy", "ignore_index", "-1"): "a target that is no token",
    ("VocabParallelCrossEntropy", "ignore_index", "-1"): "a target that is no token",
    ("EmulatedCluster", "seed", "-1"): "Python's generator takes any integer",
    **{(name, "seed", "-1"): "Python's generator takes any integer" for name in ("search", "optimum")},
    ("init_distributed", "seed", "-1"): "torch's generators take any integer",
    ("OptimisticStep", "max_norm", "inf"): "only an infinity is taken back",
    ("clip_grad_norm_", "max_norm", "inf"): "only measures",
    ("clip_grad_norm_", "norm_type", "inf"): "the largest entry",
    ("TrainConfig", "clip_norm", "inf"): "only measures",
    **{("explain", "example", odd): "that the model does not take it is the answer" for odd in ("-1", "nan", "inf")},
    **{
        ("reveal", parameter, odd): "whatever was guessed or measured is compared"
        for parameter in ("guess", "measured")
        for odd in ("-1", "nan", "inf")
    },
    ("format_bytes", "n_bytes", "-1"): "a label prints whatever was computed",
    ("format_bytes", "n_bytes", "nan"): "a label prints whatever was computed",
    ("format_bytes", "n_bytes", "inf"): "a label prints whatever was computed",
    ("format_time", "time", "-1"): "a label prints whatever was computed",
    ("format_time", "time", "nan"): "a label prints whatever was computed",
    ("format_time", "time", "inf"): "a label prints whatever was computed",
}
"""Numbers below 0, infinite or not a number, that nevertheless mean something."""

WORDS: dict[str | tuple[str, str], str] = {
    "title": "a figure's own title",
    "name": "a label",
    "unit": "a label",
    "what": "a label",
    "host": "a name to compare",
    ("reveal", "how"): "a word to print",
    ("reveal", "guess"): "whatever was guessed is compared",
    ("reveal", "measured"): "whatever was measured is compared",
    ("Exercise", "notebook"): "the notebook may be nobody's yet",
    ("ScratchFolder", "prefix"): "the beginning of a name",
    ("apply_ac", "attention"): "a name that counts only where attention alone is checkpointed",
    ("apply_ac", "blocks"): "the pattern of the module itself",
    ("apply_compile", "blocks"): "the pattern of the module itself",
    ("apply_fsdp2", "blocks"): "the pattern of the module itself",
    ("explain", "example"): "that the model does not take it is the answer",
    ("find_blocks", "blocks"): "the pattern of the module itself",
    ("refusals_said_once", "program"): "a label",
    ("run_torchrun", "where"): "local=True has decided",
    ("Trainer", "tokenizer_digest"): "only compared with that of a checkpoint",
    ("TensorEntry", "key"): "a label",
    ("Tokenizer", "definition"): "read at the first use, as documented",
}
"""Parameters that take any words."""

PATHS = dict.fromkeys(
    ["root", "path", "directory", "source", "cache_dir", "folder", "log_folder", "texts"],
    "a path that exists in the test's folder",
)
"""Parameters that take a path, of which ``'x'`` is one."""

USERS_CODE = {
    (name, parameter): "what the caller's own stage or loss raises is passed on"
    for name in ("forward_stage", "run_step", "train_step_pipeline_1f1b", "train_step_pipeline_gpipe")
    for parameter in ("x", "inputs", "target", "targets", "loss_fn")
} | {
    ("auto_split", "example"): "what the caller's own model raises is passed on",
    ("generate", "choose"): "what the caller's own function raises is passed on",
    ("load_stage", "names"): "what the caller's own function raises is passed on",
    ("Trainer", "optimizer"): "what the caller's own factory raises is passed on",
    ("emulate", "inputs"): "what the caller's own model raises is passed on",
    ("emulate", "targets"): "what the loss raises is passed on",
    ("loss_share", "output"): "what the caller's own loss raises is passed on",
    ("loss_share", "target"): "what the caller's own loss raises is passed on",
    ("share_of", "output"): "what the caller's own loss raises is passed on",
    ("share_of", "target"): "what the caller's own loss raises is passed on",
}
ONLY = dict.fromkeys(
    [("check", "fn"), ("hint", "exercise"), ("solution", "exercise"), ("course_map", "here")],
    "the only argument; the sentence is a learner's and says what to give",
)
UNNAMED = {
    "path": "the refusal says what is wrong at that path, and names the path",
    "first": "the refusal names the path",
    "second": "the refusal names the path",
    "source": "the refusal names the path",
    "root": "the refusal names the path",
    "folder": "the refusal names the path",
    "tied": "the refusal says which member will not do",
    "documents": "the refusal says that the corpus is empty",
}
"""Refusals that name the value instead of the parameter."""


def why(name: str, parameter: str, odd: str) -> str | None:
    """Why a value that fits its annotation is taken; None if there is no reason."""
    if name in RECORDS:
        return "a record"
    if odd in ("-1", "nan", "inf"):
        return NUMBERS.get((name, parameter, odd))
    if odd in ("'x'", "''"):
        return WORDS.get(parameter) or WORDS.get((name, parameter)) or (PATHS.get(parameter) if odd == "'x'" else None)
    return "it fits the annotation, and the documentation sets no narrower rule"
